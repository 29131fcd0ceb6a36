"""Linear layers: y = x W^T + b (+ residual), with the weight in whatever form the backend likes.

On CUDA and in plain torch this is the vendor's GEMM; the C++ library keeps weights packed for its
register tiles and multiplies any number of rows with them.
"""

from __future__ import annotations

import torch

from kernels.cpu import library as cpu


class PackedLinear:
    """A weight [out_features, in_features] and maybe a bias [out_features], ready to multiply."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.device = weight.device
        self.packed: cpu.PackedWeight | None = None
        self.weight: torch.Tensor | None = None
        library = cpu.active()
        if library is not None and library.supports(weight):
            self.packed = library.pack(weight)
            self.bias = bias if bias is None else bias.float()
        else:
            self.weight = weight
            self.bias = bias


def linear(
    x: torch.Tensor,
    packed: PackedLinear,
    *,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x: [T, in_features] -> [T, out_features]; a residual of that shape is added to the result.

    The residual is left as it is. It may be of a wider dtype, which is then the result's. Without
    one the result has `dtype`, or the weight's: fp32 logits of bf16 weights keep near ties apart.
    """
    assert residual is None or dtype is None
    if packed.packed is not None:
        library = cpu.active()
        assert library is not None, "the weight was packed for a library that is disabled"
        return library.linear(x, packed.packed, packed.bias, residual, dtype)
    assert packed.weight is not None
    out = torch.nn.functional.linear(x, packed.weight, packed.bias)
    return out.to(dtype or out.dtype) if residual is None else residual + out
