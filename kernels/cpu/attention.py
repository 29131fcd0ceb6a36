"""The C++ library's attention and rotary embedding over the pages of a KV cache."""

from __future__ import annotations

import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.cpu.library import DTYPES, CpuLibrary
from kernels.kv_cache import PagedKVCache


def rotary_and_write_kv(
    library: CpuLibrary,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: PagedKVCache,
    layer: int,
    metadata: AttentionMetadata,
) -> None:
    """Rotate q in place, write rotated k and v to the pages. `supports_heads(q, k, v)` holds."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv_cache.num_kv_heads
    positions, slots = metadata.positions, metadata.slot_mapping
    assert head_dim == kv_cache.head_dim
    assert k.shape == v.shape == (num_tokens, num_kv_heads, head_dim), (k.shape, v.shape)
    assert positions.numel() == slots.numel() == num_tokens
    max_positions, _, half = cos_sin.shape
    library.call(
        "rotary_and_write_kv",
        *(kv_cache.keys[layer].data_ptr(), kv_cache.values[layer].data_ptr()),
        *(kv_cache.num_blocks, num_kv_heads, head_dim, DTYPES[kv_cache.dtype]),
        *(num_tokens, num_heads, q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0)),
        *(v.data_ptr(), v.stride(0), DTYPES[q.dtype]),
        *(cos_sin.data_ptr(), max_positions, 2 * half),
        *(positions.data_ptr(), slots.data_ptr()),
    )


def paged_attention(
    library: CpuLibrary,
    q: torch.Tensor,
    kv_cache: PagedKVCache,
    layer: int,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attend from q [T, num_heads, head_dim] to the pages. `supports_heads(q)` holds."""
    num_tokens, num_heads, head_dim = q.shape
    assert head_dim == kv_cache.head_dim
    dtype, context_lens, tables = q.dtype, metadata.context_lens, metadata.block_tables
    num_sequences, max_blocks = tables.shape
    assert context_lens.numel() == num_sequences
    assert metadata.query_start.numel() == num_sequences + 1
    assert tables.is_contiguous()
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=dtype)
    library.call(
        "paged_attention",
        *(kv_cache.keys[layer].data_ptr(), kv_cache.values[layer].data_ptr()),
        *(kv_cache.num_blocks, kv_cache.num_kv_heads, head_dim, DTYPES[kv_cache.dtype]),
        *(num_tokens, num_heads, q.data_ptr(), q.stride(0), DTYPES[dtype], out.data_ptr()),
        *(num_sequences, metadata.query_start.data_ptr(), context_lens.data_ptr()),
        *(tables.data_ptr(), max_blocks, scale, window or 0, softcap or 0.0),
    )
    return out
