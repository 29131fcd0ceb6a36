"""Root-mean-square normalisation, alone or fused with the residual addition before it.

    y = x / sqrt(mean(x^2) + eps) * weight          over the last dimension, in fp32
    add_rms_norm: residual' = x + residual,  y = rms_norm(residual')

Source: Root Mean Square Layer Normalization, arXiv 1910.07467.
"""

from __future__ import annotations

import torch

from kernels.cpu import library as cpu


def rms_norm_with_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., hidden], any strides -> [..., hidden] in the dtype of `weight`."""
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse * weight).to(weight.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise x [..., hidden] and scale by weight [hidden]; the result has weight's dtype."""
    library = cpu.active()
    if library is not None and library.supports(x, weight):
        return library.rms_norm(x, weight, eps)
    return rms_norm_with_torch(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual); neither argument is changed.

    The residual stream may be wider than x (fp32 beside bf16); the sum has the residual's dtype.
    """
    library = cpu.active()
    if library is not None and library.supports(x, residual, weight):
        return library.add_rms_norm(x, residual, weight, eps)
    new_residual = residual + x
    return rms_norm_with_torch(new_residual, weight, eps), new_residual
