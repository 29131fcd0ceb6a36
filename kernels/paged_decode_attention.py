"""Attention of one new token per sequence over its paged context.

Decode reads every key and value once and does little arithmetic on them: it is bound by memory
bandwidth, so the G query heads of one KV head are packed into rows of one product.
"""

from __future__ import annotations

import torch

from kernels.attention_metadata import AttentionMetadata, DecodeBucket
from kernels.kv_cache import PagedKVCache


def decode_with_torch(
    q: torch.Tensor,
    kv_cache: PagedKVCache,
    layer: int,
    bucket: DecodeBucket,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Decode one bucket by gathering its pages once: q [B, num_heads, head_dim] -> like q."""
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
    keys, values = keys[:, :, :length], values[:, :, :length]  # [B, H_kv, L, D]
    # 2. what lies beyond a member's own context may be anything, NaN included: make it zero
    is_visible = _visible(bucket, first_page * size, length, window)
    if is_visible is not None:
        keys.masked_fill_(~is_visible[:, None, :, None], 0)
        values.masked_fill_(~is_visible[:, None, :, None], 0)
        is_visible = is_visible[:, None, None, :]  # [B, 1, 1, L]
    # 3. G query heads as rows. NOTE: enable_gqa=True here is 20 to 50 times slower on the CPU.
    rows = q.view(batch, kv_cache.num_kv_heads, -1, head_dim)  # [B, H_kv, G, D]
    if softcap is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            rows, keys, values, attn_mask=is_visible, scale=scale
        )
    else:
        out = attend_with_softcap(rows, keys, values, is_visible, scale=scale, softcap=softcap)
    return out.reshape(batch, num_heads, head_dim)


def attend_with_softcap(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    is_visible: torch.Tensor | None,
    *,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """softmax(c * tanh(scale * q k^T / c)) v in fp32; q [..., M, D], keys [..., L, D]."""
    scores = torch.matmul(q.float(), keys.float().transpose(-1, -2)) * scale
    scores = torch.tanh(scores / softcap) * softcap
    if is_visible is not None:
        scores.masked_fill_(~is_visible, float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1), values.float()).to(q.dtype)


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


def paged_decode_attention(
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
    """Fill `out` [T, num_heads, head_dim] at the tokens of sequences that have one token."""
    for bucket in metadata.decode_buckets:
        out[bucket.rows] = decode_with_torch(
            q[bucket.rows], kv_cache, layer, bucket, scale=scale, window=window, softcap=softcap
        )
