"""Builds steps for attention tests: scattered pages, and poison wherever nothing may be read."""

from dataclasses import dataclass

import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.kv_cache import FLOAT8, PagedKVCache

# (atol, rtol) against float64: what one rounding of inputs and of the result costs, twice over.
TOLERANCES = {
    torch.float32: (2e-6, 2e-5),
    torch.float16: (2e-3, 4e-3),
    torch.bfloat16: (1.6e-2, 2e-2),
}


@dataclass(frozen=True)
class Step:
    """One attention call: q [T, H, D], a filled cache and where everything lies."""

    q: torch.Tensor
    kv_cache: PagedKVCache
    metadata: AttentionMetadata


def build_step(
    query_lens: list[int],
    context_lens: list[int],
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    num_layers: int = 1,
    spare_blocks: int = 2,
    value_dim: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Step:
    """Contexts in scattered pages; unused pages and slots are NaN, unused table entries wild."""
    pages_of = [-(-length // 64) for length in context_lens]
    num_blocks = sum(pages_of) + spare_blocks
    cache = PagedKVCache(
        *(num_layers, num_blocks, num_kv_heads, head_dim, kv_dtype or dtype, "cpu"),
        value_dim=value_dim,
    )
    order = torch.randperm(num_blocks).tolist()
    tables = [[order.pop() for _ in range(n)] for n in pages_of]
    metadata = AttentionMetadata.build(
        query_lens=query_lens, context_lens=context_lens, block_tables=tables
    )
    for pages in (*cache.keys, *cache.values):
        whole = torch.full(pages.shape, float("nan"))
        for table, length in zip(tables, context_lens, strict=True):
            for i, block in enumerate(table):
                num_tokens = min(64, length - 64 * i)
                whole[block, :, :num_tokens].normal_()
        pages.copy_(whole)
    for scales in (cache.key_scales, cache.value_scales):
        if cache.dtype == FLOAT8:
            scales.uniform_(0.5, 1.5)
    for i, n in enumerate(pages_of):
        metadata.block_tables[i, n:] = 1_000_000_000
    q = torch.randn(sum(query_lens), num_heads, head_dim).to(dtype)
    return Step(q, cache, metadata)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare with float64 truth within what `dtype` can hold."""
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), atol=atol, rtol=rtol)
