"""Root-mean-square normalisation, alone or fused with the residual addition before it.

    y = x / sqrt(mean(x^2) + eps) * weight          over the last dimension, in fp32
    add_rms_norm: residual' = x + residual,  y = rms_norm(residual')

Source: Root Mean Square Layer Normalization, arXiv 1910.07467.
"""

from __future__ import annotations

import torch

from kernels.cpu import library as cpu
from kernels.triton_support import jit, next_power_of_2, runs_triton, tl


@jit
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    hidden: tl.tensor,
    eps: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program normalises one row; the row is read once."""
    row = tl.program_id(0).to(tl.int64)  # a row's offset may pass 2^31
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    mask = columns < hidden
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=mask, other=0.0)
        total = (residual.to(tl.float32) + x).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * hidden + columns, total, mask=mask)
        x = total.to(tl.float32)
    mean = tl.sum(x * x, axis=0) / hidden
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    out = x * tl.rsqrt(mean + eps) * weight
    tl.store(out_ptr + row * hidden + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm_with_triton(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(normalised [..., hidden] in weight's dtype, x + residual in residual's dtype or None)."""
    hidden = x.shape[-1]
    rows = x.reshape(-1, hidden)
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(residual).contiguous()
    added = rows if residual is None else residual.reshape(-1, hidden)
    if len(rows) > 0:
        block = next_power_of_2(hidden)
        _rms_norm_kernel[(len(rows),)](
            rows,
            added,
            weight,
            out,
            out if total is None else total,
            rows.stride(0),
            added.stride(0),
            hidden,
            eps,
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 256)),
        )
    return out, total


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
    if runs_triton(x):
        return rms_norm_with_triton(x, None, weight, eps)[0]
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
    if runs_triton(x):
        out, total = rms_norm_with_triton(x, residual, weight, eps)
        assert total is not None
        return out, total
    new_residual = residual + x
    return rms_norm_with_torch(new_residual, weight, eps), new_residual
