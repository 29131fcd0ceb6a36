"""Attention of one new token per sequence over its paged context.

Decode reads every key and value once and does little arithmetic on them: it is bound by memory
bandwidth, so the G query heads of one KV head are packed into rows of one product. On a GPU long
contexts are split among programs and merged (Flash-Decoding):

    out = sum_s w_s 2^(m_s - m) o_s / sum_s w_s 2^(m_s - m),   m = max_s m_s

Sources: FlashAttention-2, arXiv 2307.08691; The Anatomy of a Triton Attention Kernel, 2511.11581.
"""

from __future__ import annotations

import torch

from kernels.attention_metadata import AttentionMetadata, DecodeBucket
from kernels.kv_cache import PagedKVCache
from kernels.triton_support import cdiv, jit, next_power_of_2, tl

MIN_DOT_ROWS = 16  # the smallest tile of a tensor-core product
NUM_STAGES = 2  # pages in flight; Triton gains no buffer and spills registers with 3
PAGES_PER_SPLIT = 8  # 512 tokens: enough work for one program, enough programs for one sequence


@jit
def _decode_split_kernel(
    q_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    table_stride: tl.tensor,
    num_kv_heads: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
) -> None:
    """One sequence, one KV head, PAGES pages: unnormalised values and what normalises them.

    The G query heads of the KV head are the rows of one product. Scores are in units of log2.
    """
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens_ptr + sequence)
    rows = tl.arange(0, GROUP_BLOCK)  # [GROUP_BLOCK]
    channels = tl.arange(0, HEAD_BLOCK)  # [HEAD_BLOCK]
    tokens = tl.arange(0, TILE)  # [TILE]
    is_channel = channels < HEAD_DIM
    is_row = rows < GROUP
    heads = (sequence * num_kv_heads + kv_head) * GROUP + rows
    q = tl.load(
        q_ptr + heads[:, None] * HEAD_DIM + channels[None, :],
        mask=is_row[:, None] & is_channel[None, :],
        other=0.0,
    )  # [GROUP_BLOCK, HEAD_BLOCK]
    largest = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP_BLOCK], tl.float32)
    values_sum = tl.zeros([GROUP_BLOCK, HEAD_BLOCK], tl.float32)
    first = split * (PAGES * PAGE // TILE)
    last = tl.minimum(first + PAGES * PAGE // TILE, (length + TILE - 1) // TILE)
    if HAS_WINDOW:
        first = tl.maximum(first, tl.maximum(length - window, 0) // TILE)
    for tile in range(first, last):
        # A page's offset may pass 2^31 elements.
        block = tl.load(tables_ptr + sequence * table_stride + tile * TILE // PAGE).to(tl.int64)
        base = ((block * num_kv_heads + kv_head) * PAGE + tile * TILE % PAGE) * HEAD_DIM
        positions = tile * TILE + tokens
        is_visible = positions < length
        if HAS_WINDOW:
            is_visible = is_visible & (positions >= length - window)
        offsets = tokens[:, None] * HEAD_DIM + channels[None, :]
        # What lies beyond the context may be NaN: it is never loaded.
        mask = is_visible[:, None] & is_channel[None, :]
        keys = tl.load(keys_ptr + base + offsets, mask=mask, other=0.0)  # [TILE, HEAD_BLOCK]
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (e^2x + 1)
            ratio = scores / softcap
            scores = softcap * (1 - 2 / (tl.exp2(ratio * (2 * 1.4426950408889634)) + 1))
        scores = tl.where(is_visible[None, :], scores * 1.4426950408889634, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        anchor = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink = tl.exp2(largest - anchor)
        probabilities = tl.exp2(scores - anchor[:, None])  # [GROUP_BLOCK, TILE]
        values = tl.load(values_ptr + base + offsets, mask=mask, other=0.0)
        weight = weight * shrink + tl.sum(probabilities, axis=1)
        values_sum = values_sum * shrink[:, None] + tl.dot(
            probabilities.to(values.dtype), values, input_precision="ieee"
        )
        largest = new_largest
    place = (sequence * num_kv_heads + kv_head) * tl.num_programs(2) + split
    at = place * GROUP_BLOCK + rows
    tl.store(largest_ptr + at, largest)
    tl.store(weight_ptr + at, weight)
    tl.store(partial_ptr + at[:, None] * HEAD_BLOCK + channels[None, :], values_sum)


@jit
def _decode_merge_kernel(
    partial_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_splits: tl.tensor,
    num_kv_heads: tl.tensor,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
) -> None:
    """One sequence, one query head: the splits, weighted by what each of them saw."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    splits = tl.arange(0, SPLITS_BLOCK)  # [SPLITS_BLOCK]
    channels = tl.arange(0, HEAD_BLOCK)  # [HEAD_BLOCK]
    is_split = splits < num_splits
    place = (sequence * num_kv_heads + head // GROUP) * num_splits + splits
    at = place * GROUP_BLOCK + head % GROUP
    largest = tl.load(largest_ptr + at, mask=is_split, other=float("-inf"))
    weight = tl.load(weight_ptr + at, mask=is_split, other=0.0)
    share = tl.exp2(largest - tl.max(largest, axis=0))  # [SPLITS_BLOCK]
    parts = tl.load(
        partial_ptr + at[:, None] * HEAD_BLOCK + channels[None, :],
        mask=is_split[:, None],
        other=0.0,
    )  # [SPLITS_BLOCK, HEAD_BLOCK]
    out = tl.sum(parts * share[:, None], axis=0) / tl.sum(weight * share, axis=0)
    tl.store(
        out_ptr + (sequence * num_kv_heads * GROUP + head) * HEAD_DIM + channels,
        out.to(out_ptr.dtype.element_ty),
        mask=channels < HEAD_DIM,
    )


def tokens_at_once(dtype: torch.dtype, block_size: int) -> int:
    """Context tokens of one product: a page, or less in fp32, whose registers would overflow."""
    return MIN_DOT_ROWS if dtype == torch.float32 else block_size


def decode_with_triton(
    q: torch.Tensor,
    kv_cache: PagedKVCache,
    layer: int,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """A step in which every sequence has one token: q [B, num_heads, head_dim] -> like q."""
    assert metadata.max_query_len <= 1
    q = q.contiguous()
    batch, num_heads, head_dim = q.shape
    num_kv_heads = kv_cache.num_kv_heads
    group = num_heads // num_kv_heads
    group_block = max(MIN_DOT_ROWS, next_power_of_2(group))
    head_block = max(MIN_DOT_ROWS, next_power_of_2(head_dim))
    num_splits = cdiv(cdiv(metadata.max_context_len, kv_cache.block_size), PAGES_PER_SPLIT)
    shape = (batch, num_kv_heads, num_splits, group_block)
    largest = torch.empty(shape, dtype=torch.float32, device=q.device)
    weight = torch.empty_like(largest)
    partial = torch.empty((*shape, head_block), dtype=torch.float32, device=q.device)
    out = torch.empty_like(q)
    tables = metadata.block_tables
    if batch == 0:
        return out
    _decode_split_kernel[(batch, num_kv_heads, num_splits)](
        q,
        kv_cache.keys[layer],
        kv_cache.values[layer],
        tables,
        metadata.context_lens,
        partial,
        largest,
        weight,
        tables.stride(0),
        num_kv_heads,
        scale,
        window or 0,
        softcap or 0.0,
        GROUP=group,
        GROUP_BLOCK=group_block,
        HEAD_DIM=head_dim,
        HEAD_BLOCK=head_block,
        PAGE=kv_cache.block_size,
        PAGES=PAGES_PER_SPLIT,
        TILE=tokens_at_once(q.dtype, kv_cache.block_size),
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        num_warps=4,
        num_stages=NUM_STAGES,
    )
    _decode_merge_kernel[(batch, num_heads)](
        partial,
        largest,
        weight,
        out,
        num_splits,
        num_kv_heads,
        GROUP=group,
        GROUP_BLOCK=group_block,
        HEAD_DIM=head_dim,
        HEAD_BLOCK=head_block,
        SPLITS_BLOCK=next_power_of_2(num_splits),
        num_warps=4,
    )
    return out


def decode_with_torch(
    q: torch.Tensor,
    kv_cache: PagedKVCache,
    layer: int,
    bucket: DecodeBucket,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
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
    if softcap is None and sinks is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            rows, keys, values, attn_mask=is_visible, scale=scale
        )
    else:
        if sinks is not None:
            sinks = sinks.view(1, kv_cache.num_kv_heads, -1, 1)
        out = attend_by_formula(
            rows, keys, values, is_visible, scale=scale, softcap=softcap, sinks=sinks
        )
    return out.reshape(batch, num_heads, head_dim)


def attend_by_formula(
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
    sinks: torch.Tensor | None = None,
) -> None:
    """Fill `out` [T, num_heads, head_dim] at the tokens of sequences that have one token."""
    for bucket in metadata.decode_buckets:
        out[bucket.rows] = decode_with_torch(
            q[bucket.rows],
            kv_cache,
            layer,
            bucket,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
