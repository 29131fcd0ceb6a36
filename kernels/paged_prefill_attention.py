"""Attention of several new tokens per sequence over its paged context, causally.

The new tokens may be a whole prompt or a chunk on top of a cached prefix: token i of n sees the
first context_len - n + i + 1 positions. Prefill is bound by arithmetic.
"""

from __future__ import annotations

import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.kv_cache import PagedKVCache
from kernels.paged_decode_attention import attend_with_softcap

# The softcap path holds fp32 scores of this many queries at a time.
SOFTCAP_QUERY_ROWS = 256


def prefill_with_torch(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """One sequence: q [n, num_heads, D], keys and values [num_kv_heads, c, D] -> like q."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, length, _ = keys.shape
    group = num_heads // num_kv_heads
    # KV heads as the batch and a stride of 0 over the group: GQA without copying a key.
    rows = q.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys = keys[:, None].expand(-1, group, -1, -1)  # [H_kv, G, c, D]
    values = values[:, None].expand(-1, group, -1, -1)
    if softcap is not None:
        mask = causal_mask(num_queries, length, window, q.device)
        chunks = [
            slice(i, i + SOFTCAP_QUERY_ROWS) for i in range(0, num_queries, SOFTCAP_QUERY_ROWS)
        ]
        out = torch.cat(
            [
                attend_with_softcap(
                    rows[:, :, chunk], keys, values, mask[chunk], scale=scale, softcap=softcap
                )
                for chunk in chunks
            ],
            dim=2,
        )
    elif num_queries == length and (window is None or window >= length):
        out = torch.nn.functional.scaled_dot_product_attention(
            rows, keys, values, is_causal=True, scale=scale
        )
    else:
        mask = causal_mask(num_queries, length, window, q.device)
        out = torch.nn.functional.scaled_dot_product_attention(
            rows, keys, values, attn_mask=mask, scale=scale
        )
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)


def causal_mask(
    num_queries: int, length: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """[num_queries, length] True where a query sees a position; the queries are the last ones."""
    mask = torch.ones((num_queries, length), dtype=torch.bool, device=device)
    mask.tril_(length - num_queries)
    if window is not None:
        mask.triu_(length - num_queries - window + 1)
    return mask


def paged_prefill_attention(
    q: torch.Tensor,
    kv_cache: PagedKVCache,
    layer: int,
    metadata: AttentionMetadata,
    out: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Fill `out` [T, num_heads, head_dim] at the tokens of sequences that have several tokens."""
    starts = metadata.query_starts
    for i in metadata.prefill_sequences:
        own = slice(starts[i], starts[i + 1])
        length = metadata.context_lengths[i]
        first_seen = 0 if window is None else length - (own.stop - own.start) - window + 1
        first_page = max(0, first_seen) // kv_cache.block_size
        keys, values = kv_cache.gather(layer, metadata.block_tables[i], length, first_page)
        out[own] = prefill_with_torch(
            q[own], keys, values, scale=scale, window=window, softcap=softcap
        )
