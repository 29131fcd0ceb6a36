"""The gated activation of SwiGLU feed-forward layers.

    out = silu(gate) * up,   silu(x) = x * sigmoid(x),   [gate | up] = gate_up

Source: GLU Variants Improve Transformer, arXiv 2002.05202.
"""

from __future__ import annotations

import torch

from kernels.cpu import library as cpu
from kernels.triton_support import cdiv, jit, next_power_of_2, runs_triton, tl

MAX_BLOCK = 1024  # columns of one program


@jit
def _silu_and_mul_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    gate_up_stride: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program: BLOCK columns of one row, computed in fp32."""
    row = tl.program_id(0).to(tl.int64)  # a row's offset may pass 2^31
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = columns < width
    gate = tl.load(gate_up_ptr + row * gate_up_stride + columns, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + row * gate_up_stride + width + columns, mask=mask, other=0.0)
    gate = gate.to(tl.float32)
    out = gate * tl.sigmoid(gate) * up.to(tl.float32)
    tl.store(out_ptr + row * width + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul_with_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [T, 2 * intermediate], rows any distance apart -> [T, intermediate]."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(MAX_BLOCK, next_power_of_2(width))
    if num_rows > 0:
        _silu_and_mul_kernel[(num_rows, cdiv(width, block))](
            gate_up, out, gate_up.stride(0), width, BLOCK=block, num_warps=4
        )
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [T, 2 * intermediate], gate first -> [T, intermediate] in the same dtype."""
    library = cpu.active()
    if library is not None and library.supports(gate_up):
        return library.silu_and_mul(gate_up)
    if runs_triton(gate_up):
        return silu_and_mul_with_triton(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
