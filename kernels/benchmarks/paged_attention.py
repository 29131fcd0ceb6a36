"""Paged attention at the heads of SmolLM2-135M and of Llama 3 8B.

    python -m kernels.benchmarks.paged_attention [--device cuda] [--dtype bf16]

Decode is held against the time to read its keys and values, prefill against its causal products.
"""

from __future__ import annotations

import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.benchmarks.limits import Setting, open_setting
from kernels.kv_cache import BLOCK_SIZE, PagedKVCache
from kernels.paged_attention import paged_attention

HEADS = ((9, 3, 64), (32, 8, 128))  # query heads, KV heads, head size
DECODES = ((1, 512), (64, 288), (16, 2048))  # sequences, context
PREFILLS = ((256, 256), (1024, 1024), (256, 1280))  # new tokens, context


def measure(
    setting: Setting, name: str, heads: tuple[int, int, int], num_new: int, lengths: list[int]
) -> None:
    """One call with `num_new` tokens in each sequence, on pages in random order."""
    num_heads, num_kv_heads, head_dim = heads
    num_pages = sum(-(-length // BLOCK_SIZE) for length in lengths)
    cache = PagedKVCache(1, num_pages, num_kv_heads, head_dim, setting.dtype, setting.device)
    for pages in (*cache.keys, *cache.values):
        pages.normal_()  # untouched zero pages of the CPU would all be one page
    free = torch.randperm(num_pages).tolist()
    tables = [[free.pop() for _ in range(-(-length // BLOCK_SIZE))] for length in lengths]
    metadata = AttentionMetadata.build(
        query_lens=[num_new] * len(lengths),
        context_lens=lengths,
        block_tables=tables,
        device=setting.device,
    )
    q = torch.randn(num_new * len(lengths), num_heads, head_dim, device=setting.device)
    q = q.to(setting.dtype)
    seen = sum(num_new * length - num_new * (num_new - 1) // 2 for length in lengths)
    setting.report(
        f"{name} {num_heads}/{num_kv_heads} heads of {head_dim}",
        lambda: paged_attention(q, cache, 0, metadata, scale=head_dim**-0.5),
        num_bytes=2 * sum(lengths) * num_kv_heads * head_dim * setting.dtype.itemsize,
        num_operations=4 * seen * num_heads * head_dim,
    )


if __name__ == "__main__":
    opened = open_setting(__doc__)
    for shape in HEADS:
        for batch, context in DECODES:
            measure(opened, f"decode {batch} x {context}", shape, 1, [context] * batch)
        for new, context in PREFILLS:
            measure(opened, f"prefill {new} of {context}", shape, new, [context])
