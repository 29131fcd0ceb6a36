"""RMSNorm with residual, SiLU gate and rotary with the KV write, held against their traffic.

python -m kernels.benchmarks.elementwise [--device cuda] [--dtype bf16]
"""

from __future__ import annotations

import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.benchmarks.launches import GatedLaunch, RmsNormLaunch, RotaryLaunch
from kernels.benchmarks.limits import Setting, open_setting
from kernels.gated_activation import silu_and_mul
from kernels.kv_cache import BLOCK_SIZE, PagedKVCache
from kernels.rms_norm import add_rms_norm
from kernels.rotary import build_cos_sin, rotary_and_write_kv

NUM_TOKENS = (64, 4096)
HIDDEN, INTERMEDIATE = 4096, 14336
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
TARGET = 0.85
MIN_TOKENS = 1024
"""With fewer a launch is over before the memory is busy: no target."""


def measure(setting: Setting, num_tokens: int) -> None:
    """All three at the sizes of Llama 3 8B."""
    target = TARGET if num_tokens >= MIN_TOKENS else None

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=setting.device).to(setting.dtype)

    x, residual, weight = random(num_tokens, HIDDEN), random(num_tokens, HIDDEN), random(HIDDEN)
    setting.report(
        f"add_rms_norm {num_tokens} x {HIDDEN}",
        lambda: add_rms_norm(x, residual, weight, 1e-5),
        RmsNormLaunch.of(x, weight, residual),
        target=target,
    )
    gate_up = random(num_tokens, 2 * INTERMEDIATE)
    setting.report(
        f"silu_and_mul {num_tokens} x {INTERMEDIATE}",
        lambda: silu_and_mul(gate_up),
        GatedLaunch.of(gate_up),
        target=target,
    )
    num_pages = -(-num_tokens // BLOCK_SIZE)
    cache = PagedKVCache(1, num_pages, NUM_KV_HEADS, HEAD_DIM, setting.dtype, setting.device)
    metadata = AttentionMetadata.build(
        query_lens=[num_tokens],
        context_lens=[num_tokens],
        block_tables=[list(range(num_pages))],
        device=setting.device,
    )
    q = random(num_tokens, NUM_HEADS, HEAD_DIM)
    k, v = (random(num_tokens, NUM_KV_HEADS, HEAD_DIM) for _ in range(2))
    table = build_cos_sin(num_tokens, HEAD_DIM, 5e5).to(setting.device)
    setting.report(
        f"rotary_and_write_kv {num_tokens}",
        lambda: rotary_and_write_kv(q, k, v, table, cache, 0, metadata),
        RotaryLaunch.of(q, k, v, table, cache),
        target=target,
    )


def measure_all(setting: Setting) -> None:
    """Few tokens and many."""
    for num_tokens in NUM_TOKENS:
        measure(setting, num_tokens)


if __name__ == "__main__":
    measure_all(open_setting(__doc__))
