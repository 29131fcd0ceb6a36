"""Attention of several new tokens per sequence over its paged context, causally.

The new tokens may be a whole prompt or a chunk on top of a cached prefix: token i of n sees the
first context_len - n + i + 1 positions. Prefill is bound by arithmetic. The GPU kernel walks the
pages of a context once for a tile of queries, with the online softmax of FlashAttention; its tiles
mix tokens and the query heads of one KV head, so that a key is loaded once for all of them.

Sources: FlashAttention-2, arXiv 2307.08691; The Anatomy of a Triton Attention Kernel, 2511.11581.
"""

from __future__ import annotations

import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.kv_cache import PagedKVCache
from kernels.paged_decode_attention import (
    MIN_DOT_ROWS,
    NUM_STAGES,
    attend_by_formula,
    tokens_at_once,
)
from kernels.triton_support import cdiv, jit, next_power_of_2, tl

# The path by the formula holds fp32 scores of this many queries at a time.
FORMULA_QUERY_ROWS = 256


@jit
def _prefill_kernel(
    q_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    out_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    num_kv_heads: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
) -> None:
    """ROWS // GROUP tokens of one sequence against its context; scores are in units of log2."""
    sequence, kv_head = tl.program_id(0), tl.program_id(1)
    first_token = tl.program_id(2) * (ROWS // GROUP)
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    num_queries = tl.load(starts_ptr + sequence + 1).to(tl.int32) - start.to(tl.int32)
    if first_token >= num_queries:
        return
    length = tl.load(lens_ptr + sequence)
    rows = tl.arange(0, ROWS)  # [ROWS]
    tokens = first_token + rows // GROUP
    is_row = (rows // GROUP < ROWS // GROUP) & (tokens < num_queries)
    own_positions = length - num_queries + tokens
    channels = tl.arange(0, HEAD_BLOCK)  # [HEAD_BLOCK]
    is_channel = channels < HEAD_DIM
    heads = kv_head * GROUP + rows % GROUP
    q = tl.load(
        q_ptr
        + (start + tokens)[:, None] * q_stride
        + heads[:, None] * HEAD_DIM
        + channels[None, :],
        mask=is_row[:, None] & is_channel[None, :],
        other=0.0,
    )  # [ROWS, HEAD_BLOCK]
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    values_sum = tl.zeros([ROWS, HEAD_BLOCK], tl.float32)
    # Context that no token of this program sees is skipped on both sides.
    last_token = tl.minimum(first_token + ROWS // GROUP, num_queries) - 1
    last = (length - num_queries + last_token) // TILE + 1
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - num_queries + first_token - window + 1, 0) // TILE
    for tile in range(first, last):
        # A page's offset may pass 2^31 elements.
        block = tl.load(tables_ptr + sequence * table_stride + tile * TILE // PAGE).to(tl.int64)
        base = ((block * num_kv_heads + kv_head) * PAGE + tile * TILE % PAGE) * HEAD_DIM
        positions = tile * TILE + tl.arange(0, TILE)  # [TILE]
        offsets = tl.arange(0, TILE)[:, None] * HEAD_DIM + channels[None, :]
        # What lies beyond the context may be NaN: it is never loaded.
        mask = (positions < length)[:, None] & is_channel[None, :]
        keys = tl.load(keys_ptr + base + offsets, mask=mask, other=0.0)  # [TILE, HEAD_BLOCK]
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale  # [ROWS, TILE]
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (e^2x + 1)
            ratio = scores / softcap
            scores = softcap * (1 - 2 / (tl.exp2(ratio * (2 * 1.4426950408889634)) + 1))
        is_visible = positions[None, :] <= own_positions[:, None]
        if HAS_WINDOW:
            is_visible = is_visible & (positions[None, :] > own_positions[:, None] - window)
        scores = tl.where(is_visible, scores * 1.4426950408889634, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        # A row that has seen nothing yet (its window starts in a later page) keeps -inf.
        anchor = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink = tl.exp2(largest - anchor)
        probabilities = tl.exp2(scores - anchor[:, None])  # [ROWS, TILE]
        values = tl.load(values_ptr + base + offsets, mask=mask, other=0.0)
        weight = weight * shrink + tl.sum(probabilities, axis=1)
        values_sum = values_sum * shrink[:, None] + tl.dot(
            probabilities.to(values.dtype), values, input_precision="ieee"
        )
        largest = new_largest
    out = values_sum / weight[:, None]
    place = ((start + tokens) * num_kv_heads * GROUP + heads)[:, None] * HEAD_DIM
    tl.store(
        out_ptr + place + channels[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_channel[None, :],
    )


def tile_rows(dtype: torch.dtype, head_dim: int, capability: int) -> int:
    """The most rows (tokens times the query heads of one KV head) of one program without spills.

    `capability` is the GPU's major compute capability. `kernels.check` compiles every answer. fp32
    products have no tensor core to run on: larger tiles would only take registers.
    """
    if dtype == torch.float32:
        return MIN_DOT_ROWS
    rows = 128 if capability >= 9 else 64
    return rows // 2 if head_dim > 128 else rows


def tile_warps(rows: int, head_dim: int, capability: int) -> int:
    """How many warps share a tile, so that its rows fit their registers."""
    return 8 if rows >= 32 or (head_dim > 128 and capability < 9) else 4


def prefill_with_triton(
    q: torch.Tensor,
    kv_cache: PagedKVCache,
    layer: int,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attend for every sequence of the step, decodes among them: q [T, num_heads, D] -> like q."""
    _, num_heads, head_dim = q.shape
    assert q.stride(1) == head_dim
    num_kv_heads = kv_cache.num_kv_heads
    group = num_heads // num_kv_heads
    capability = torch.cuda.get_device_capability(q.device)[0] if q.is_cuda else 9
    # Short chunks take smaller tiles: idle rows cost as much as busy ones.
    needed = max(MIN_DOT_ROWS, next_power_of_2(group * metadata.max_query_len))
    rows = min(needed, tile_rows(q.dtype, head_dim, capability))
    rows = max(rows, next_power_of_2(group))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grid = (metadata.num_sequences, num_kv_heads, cdiv(metadata.max_query_len, rows // group))
    if metadata.num_sequences == 0:
        return out
    tables = metadata.block_tables
    _prefill_kernel[grid](
        q,
        kv_cache.keys[layer],
        kv_cache.values[layer],
        out,
        metadata.query_start,
        metadata.context_lens,
        tables,
        q.stride(0),
        tables.stride(0),
        num_kv_heads,
        scale,
        window or 0,
        softcap or 0.0,
        GROUP=group,
        ROWS=rows,
        HEAD_DIM=head_dim,
        HEAD_BLOCK=max(MIN_DOT_ROWS, next_power_of_2(head_dim)),
        PAGE=kv_cache.block_size,
        TILE=tokens_at_once(q.dtype, kv_cache.block_size),
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        num_warps=tile_warps(rows, head_dim, capability),
        num_stages=NUM_STAGES,
    )
    return out


def prefill_with_torch(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One sequence: q [n, num_heads, D], keys and values [num_kv_heads, c, D] -> like q."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, length, _ = keys.shape
    group = num_heads // num_kv_heads
    # KV heads as the batch and a stride of 0 over the group: GQA without copying a key.
    rows = q.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys = keys[:, None].expand(-1, group, -1, -1)  # [H_kv, G, c, D]
    values = values[:, None].expand(-1, group, -1, -1)
    if softcap is not None or sinks is not None:
        if sinks is not None:
            sinks = sinks.view(num_kv_heads, group, 1, 1)
        mask = causal_mask(num_queries, length, window, q.device)
        chunks = [
            slice(i, i + FORMULA_QUERY_ROWS) for i in range(0, num_queries, FORMULA_QUERY_ROWS)
        ]
        out = torch.cat(
            [
                attend_by_formula(
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
    sinks: torch.Tensor | None = None,
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
            q[own], keys, values, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
