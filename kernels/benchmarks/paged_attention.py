"""Paged attention at the heads of SmolLM2-135M and of Llama 3 8B.

    python -m kernels.benchmarks.paged_attention [--device cuda] [--dtype bf16]

Decode is held against the time to read its keys and values, prefill against its causal products;
on a GPU beside others' kernels on the same keys (`peers`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.benchmarks.launches import AttentionLaunch
from kernels.benchmarks.limits import Setting, median_seconds, open_setting
from kernels.benchmarks.peers import PEERS, PREFILL_PEER, PagedCall
from kernels.kv_cache import BLOCK_SIZE, PagedKVCache
from kernels.paged_attention import paged_attention

HEADS = ((9, 3, 64), (32, 8, 128))
"""Query heads, KV heads, head size."""
DECODES = ((1, 512), (64, 288), (16, 2048))
"""Sequences, context."""
GPU_DECODES = ((1, 512), (64, 1024), (256, 1024), (16, 16384))
PREFILLS = ((256, 256), (1024, 1024), (256, 1280))
"""New tokens, context."""
GPU_PREFILLS = ((256, 256), (1024, 1024), (4096, 4096), (2048, 16384))
DECODE_TARGETS = ((262_144, 0.90), (65_536, 0.85))
"""Of the bandwidth, from so many tokens of context in the batch on."""
PREFILL_TARGET = 0.70
"""Of FlashAttention's rate, from 1024 new tokens on."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences with equally many new tokens and equal contexts."""

    num_sequences: int
    num_new: int
    context: int
    heads: tuple[int, int, int]

    @property
    def name(self) -> str:
        """As the table prints it."""
        num_heads, num_kv_heads, head_dim = self.heads
        kind = "decode" if self.num_new == 1 else "prefill"
        size = self.num_sequences if self.num_new == 1 else self.num_new
        return f"{kind} {size} x {self.context}, {num_heads}/{num_kv_heads} heads of {head_dim}"

    @property
    def target(self) -> float | None:
        """Least fraction of the bandwidth; None where there is too little to read."""
        num_tokens = self.num_sequences * self.context
        if self.num_new > 1:
            return None
        return next((goal for least, goal in DECODE_TARGETS if num_tokens >= least), None)


def measure(setting: Setting, batch: Batch) -> None:
    """One call on pages in random order; on a GPU the peers' as well."""
    call = _paged_call(setting, batch)
    seconds = setting.report(
        batch.name,
        lambda: paged_attention(call.q, call.kv_cache, 0, call.metadata, scale=call.scale),
        AttentionLaunch.of(call.q, call.kv_cache, call.metadata),
        target=batch.target,
    )
    if setting.device.type != "cuda":
        return
    for name, prepare in PEERS.items():
        run = prepare(call)
        if run is None:
            continue
        peer_s = median_seconds(run, setting.device)
        ratio = peer_s / seconds
        is_judge = name == PREFILL_PEER and batch.num_new >= 1024
        verdict = "  MISSED" if is_judge and ratio < PREFILL_TARGET else ""
        print(
            f"  {name:44} {peer_s * 1e6:10.1f} us: ours has {100 * ratio:.0f} % of its rate{verdict}"
        )


def _paged_call(setting: Setting, batch: Batch) -> PagedCall:
    num_heads, num_kv_heads, head_dim = batch.heads
    num_pages = -(-batch.context // BLOCK_SIZE)
    total = batch.num_sequences * num_pages
    cache = PagedKVCache(1, total, num_kv_heads, head_dim, setting.dtype, setting.device)
    for pages in (*cache.keys, *cache.values):
        pages.normal_()  # untouched zero pages of the CPU would all be one page
    order = torch.randperm(total).view(batch.num_sequences, num_pages).tolist()
    metadata = AttentionMetadata.build(
        query_lens=[batch.num_new] * batch.num_sequences,
        context_lens=[batch.context] * batch.num_sequences,
        block_tables=order,
        device=setting.device,
    )
    num_tokens = batch.num_new * batch.num_sequences
    q = torch.randn(num_tokens, num_heads, head_dim, device=setting.device).to(setting.dtype)
    return PagedCall(q, cache, metadata, head_dim**-0.5)


def measure_all(setting: Setting) -> None:
    """Decodes and prefills; on a GPU such as fill it."""
    is_gpu = setting.device.type == "cuda"
    for heads in HEADS:
        for num_sequences, context in GPU_DECODES if is_gpu else DECODES:
            measure(setting, Batch(num_sequences, 1, context, heads))
        for num_new, context in GPU_PREFILLS if is_gpu else PREFILLS:
            measure(setting, Batch(1, num_new, context, heads))


if __name__ == "__main__":
    measure_all(open_setting(__doc__))
