"""Linear layers: y = x W^T + b (+ residual), with the weight in whatever form the backend likes.

On CUDA and in plain torch this is the vendor's GEMM; the C++ library keeps weights packed for its
register tiles and multiplies any number of rows with them.
"""

from __future__ import annotations

import torch


class PackedLinear:
    """A weight [out_features, in_features] and maybe a bias [out_features], ready to multiply."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.device = weight.device
        self.bias = bias
        self.weight = weight


def linear(
    x: torch.Tensor, packed: PackedLinear, *, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x: [T, in_features] -> [T, out_features]; a residual of that shape is added to the result.

    The residual is left as it is. It may be of a wider dtype, which is then the result's.
    """
    out = torch.nn.functional.linear(x, packed.weight, packed.bias)
    return out if residual is None else residual + out
