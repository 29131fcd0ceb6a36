"""Paged attention in plain torch, on any device: the path of machines without our kernels.

Pages are gathered before they are attended to: those of decodes in buckets of like length, those of
a prefill one sequence at a time. Without softcap and sinks torch's own attention does the rest.
"""

from __future__ import annotations

import torch

from kernels.attention_metadata import AttentionMetadata, DecodeBucket
from kernels.kv_cache import PagedKVCache

# The path by the formula holds fp32 scores of this many queries at a time.
FORMULA_QUERY_ROWS = 256


def attention_with_torch(
    q: torch.Tensor,
    kv_cache: PagedKVCache,
    layer: int,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """See `kernels.paged_attention`: q [T, num_heads, D] -> [T, num_heads, D_v]."""
    out = torch.empty((*q.shape[:2], kv_cache.value_dim), dtype=q.dtype, device=q.device)
    for bucket in metadata.decode_buckets:
        out[bucket.rows] = _decode(
            q[bucket.rows],
            kv_cache,
            layer,
            bucket,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
    starts = metadata.query_starts
    for i in metadata.prefill_sequences:
        own = slice(starts[i], starts[i + 1])
        length = metadata.context_lengths[i]
        first_seen = 0 if window is None else length - (own.stop - own.start) - window + 1
        first_page = max(0, first_seen) // kv_cache.block_size
        keys, values = kv_cache.gather(layer, metadata.block_tables[i], length, first_page)
        out[own] = _prefill(
            q[own], keys, values, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
    return out


def _decode(
    q: torch.Tensor,
    kv_cache: PagedKVCache,
    layer: int,
    bucket: DecodeBucket,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Decode one bucket by gathering its pages once: q [B, num_heads, D] -> [B, num_heads, D_v]."""
    batch, num_heads, head_dim = q.shape
    size = kv_cache.block_size
    # 1. the pages that any member sees; under a window the first ones are skipped
    first_page = 0 if window is None else max(0, bucket.min_context_len - window) // size
    last_page = -(-bucket.max_context_len // size)
    tables = bucket.block_tables[:, first_page:last_page]
    if window is not None:
        # Pages that slid out of a member's window may belong to others or to nobody by now.
        ends = torch.arange(first_page + 1, last_page + 1, device=q.device) * size
        is_used = ends > (bucket.context_lens - window)[:, None]
        newest = ((bucket.context_lens - 1) // size - first_page).long()[:, None]
        tables = torch.where(is_used, tables, tables.gather(1, newest))
    keys, values = kv_cache.gather_blocks(layer, tables)
    length = bucket.max_context_len - first_page * size
    keys, values = keys[:, :, :length].to(q.dtype), values[:, :, :length].to(q.dtype)
    # 2. what lies beyond a member's own context may be anything, NaN included: make it zero
    is_visible = _visible(bucket, first_page * size, length, window)
    if is_visible is not None:
        keys.masked_fill_(~is_visible[:, None, :, None], 0)
        values.masked_fill_(~is_visible[:, None, :, None], 0)
        is_visible = is_visible[:, None, None, :]  # [B, 1, 1, L]
    # 3. G query heads as rows. NOTE: enable_gqa=True here is 20 to 50 times slower on the CPU.
    rows = q.view(batch, kv_cache.num_kv_heads, -1, head_dim)  # [B, H_kv, G, D]
    if softcap is None and sinks is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            rows, keys, values, attn_mask=is_visible, scale=scale
        )
    else:
        if sinks is not None:
            sinks = sinks.view(1, kv_cache.num_kv_heads, -1, 1)
        out = _by_formula(rows, keys, values, is_visible, scale=scale, softcap=softcap, sinks=sinks)
    return out.reshape(batch, num_heads, -1)


def _visible(
    bucket: DecodeBucket, first_position: int, length: int, window: int | None
) -> torch.Tensor | None:
    """[B, length] True where a gathered position is seen; None = everywhere."""
    is_same_length = bucket.min_context_len == bucket.max_context_len
    if is_same_length and (window is None or window >= length):
        return None
    positions = torch.arange(first_position, first_position + length, device=bucket.rows.device)
    ends = bucket.context_lens[:, None]
    is_visible = positions < ends
    if window is not None:
        is_visible &= positions >= ends - window
    return is_visible


def _prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One sequence: q [n, num_heads, D], keys and values [num_kv_heads, c, D or D_v] -> [n, H, D_v]."""
    num_queries, num_heads, head_dim = q.shape
    keys, values = keys.to(q.dtype), values.to(q.dtype)
    num_kv_heads, length, _ = keys.shape
    group = num_heads // num_kv_heads
    # KV heads as the batch and a stride of 0 over the group: GQA without copying a key.
    rows = q.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys = keys[:, None].expand(-1, group, -1, -1)  # [H_kv, G, c, D]
    values = values[:, None].expand(-1, group, -1, -1)
    if softcap is not None or sinks is not None:
        if sinks is not None:
            sinks = sinks.view(num_kv_heads, group, 1, 1)
        mask = _causal_mask(num_queries, length, window, q.device)
        chunks = [
            slice(i, i + FORMULA_QUERY_ROWS) for i in range(0, num_queries, FORMULA_QUERY_ROWS)
        ]
        out = torch.cat(
            [
                _by_formula(
                    rows[:, :, chunk],
                    keys,
                    values,
                    mask[chunk],
                    scale=scale,
                    softcap=softcap,
                    sinks=sinks,
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
        mask = _causal_mask(num_queries, length, window, q.device)
        out = torch.nn.functional.scaled_dot_product_attention(
            rows, keys, values, attn_mask=mask, scale=scale
        )
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_heads, -1)


def _causal_mask(
    num_queries: int, length: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """[num_queries, length] True where a query sees a position; the queries are the last ones."""
    mask = torch.ones((num_queries, length), dtype=torch.bool, device=device)
    mask.tril_(length - num_queries)
    if window is not None:
        mask.triu_(length - num_queries - window + 1)
    return mask


def _by_formula(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    is_visible: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(c * tanh(scale * q k^T / c)) v in fp32; q [..., M, D], keys [..., L, D].

    `sinks` [..., 1] broadcasts to [..., M, 1]: a logit per query head that takes its share of the
    softmax and adds nothing to the sum. Source: attention sinks, arXiv 2309.17453.
    """
    scores = torch.matmul(q.float(), keys.float().transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if is_visible is not None:
        scores.masked_fill_(~is_visible, float("-inf"))
    if sinks is None:
        return torch.matmul(torch.softmax(scores, dim=-1), values.float()).to(q.dtype)
    column = sinks.float().expand(*scores.shape[:-1], 1)
    shares = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    return torch.matmul(shares, values.float()).to(q.dtype)
