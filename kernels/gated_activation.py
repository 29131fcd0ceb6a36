"""The gated activation of SwiGLU feed-forward layers.

    out = silu(gate) * up,   silu(x) = x * sigmoid(x),   [gate | up] = gate_up

Source: GLU Variants Improve Transformer, arXiv 2002.05202.
"""

from __future__ import annotations

import torch

from kernels.cpu import library as cpu


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [T, 2 * intermediate], gate first -> [T, intermediate] in the same dtype."""
    library = cpu.active()
    if library is not None and library.supports(gate_up):
        return library.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
