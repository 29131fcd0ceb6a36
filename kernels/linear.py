"""Linear layers: y = x W^T + b (+ residual), with the weight in whatever form the backend likes.

On CUDA and in plain torch this is the vendor's GEMM; the C++ library keeps weights packed for its
register tiles and multiplies any number of rows with them. Weights may be quantised:

    int8                weights and activations in 8 bits, a scale for each output and each row
    int8_weight_only    weights in 8 bits, everything else as without; only the C++ library has it
"""

from __future__ import annotations

import torch

from kernels.cpu import library as cpu
from kernels.cpu.library import Quantization
from kernels.gated_activation import silu_and_mul
from kernels.scaled_gemm import ScaledWeight, scaled_linear

__all__ = [
    "PackedGatedLinear",
    "PackedLinear",
    "Quantization",
    "gate_and_up",
    "gated_linear",
    "linear",
]


class PackedLinear:
    """A weight [out_features, in_features] and maybe a bias [out_features], ready to multiply."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        quantization: Quantization = "none",
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.device = weight.device
        self.packed: cpu.PackedWeight | None = None
        self.weight: torch.Tensor | None = None
        self.scaled: ScaledWeight | None = None
        library = cpu.active()
        if library is not None and library.supports(weight):
            self.packed = library.pack(weight, quantization)
            self.bias = bias if bias is None else bias.float()
        else:
            assert quantization != "int8_weight_only", "only the compiled CPU kernels have it"
            self.bias = bias
            if quantization == "int8":
                self.scaled = ScaledWeight.quantise(weight, "int8")
            else:
                self.weight = weight

    @property
    def num_bytes(self) -> int:
        """Of the weight, as a product reads it."""
        if self.packed is not None:
            return self.packed.memory.nbytes
        if self.scaled is not None:
            return self.scaled.num_bytes
        return self.out_features * self.in_features * self.dtype.itemsize


class PackedGatedLinear:
    """The gate and the up projection of a SwiGLU layer, [intermediate, in_features] each."""

    def __init__(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
        quantization: Quantization = "none",
    ) -> None:
        self.merged: PackedLinear | None = None
        library = cpu.active()
        if library is not None and library.supports(gate, up):
            self.gate = PackedLinear(gate, gate_bias, quantization)
            self.up = PackedLinear(up, up_bias, quantization)
        else:
            biases = None if gate_bias is None or up_bias is None else [gate_bias, up_bias]
            bias = None if biases is None else torch.cat(biases)
            self.merged = PackedLinear(torch.cat([gate, up]), bias, quantization)

    @property
    def num_bytes(self) -> int:
        """Of both weights, as a product reads them."""
        if self.merged is not None:
            return self.merged.num_bytes
        return self.gate.num_bytes + self.up.num_bytes


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
    if packed.scaled is not None:
        out = scaled_linear(x, packed.scaled, packed.bias)
    else:
        assert packed.weight is not None
        out = torch.nn.functional.linear(x, packed.weight, packed.bias)
    return out.to(dtype or out.dtype) if residual is None else residual + out


def gated_linear(
    x: torch.Tensor, packed: PackedGatedLinear, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """silu(x G^T + b) * (x U^T + c): [T, in_features] -> [T, intermediate] in `dtype`, or the
    weights'.
    """
    if packed.merged is not None:
        gated = silu_and_mul(linear(x, packed.merged))
        return gated.to(dtype or gated.dtype)
    library = cpu.active()
    gate, up = packed.gate, packed.up
    assert library is not None, "the weights were packed for a library that is disabled"
    assert gate.packed is not None
    assert up.packed is not None
    return library.gated_linear(x, gate.packed, up.packed, gate.bias, up.bias, dtype)


def gate_and_up(x: torch.Tensor, packed: PackedGatedLinear) -> torch.Tensor:
    """[x G^T + b, x U^T + c], not yet gated: [T, in_features] -> [T, 2 * intermediate], fp32."""
    if packed.merged is not None:
        return linear(x, packed.merged, dtype=torch.float32)
    parts = (linear(x, each, dtype=torch.float32) for each in (packed.gate, packed.up))
    return torch.cat(list(parts), dim=1)
