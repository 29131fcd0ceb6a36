"""Attention of several new tokens per sequence over its paged context, causally.

The new tokens may be a whole prompt or a chunk on top of a cached prefix: token i of n sees the
first context_len - n + i + 1 positions. Prefill is bound by arithmetic. The GPU kernel walks the
pages of a context once for a tile of queries, with the online softmax of FlashAttention; its tiles
mix tokens and the query heads of one KV head, so that a key is loaded once for all of them. What
comes after the last token of a tile is skipped. `mixed_attention` launches it, beside decodes.

Sources: FlashAttention-2, arXiv 2307.08691; The Anatomy of a Triton Attention Kernel, 2511.11581.
"""

from __future__ import annotations

import torch

from kernels.attention_tile import MIN_DOT_ROWS, NUM_STAGES, attend_range
from kernels.triton_support import jit, next_power_of_2, tl
from kernels.tuning import Tile, active, shape_of

LARGE_CAPABILITIES = (9, 10)
"""GPUs with 227 KiB of shared memory for a program; consumers' later ones have 99 again."""


@jit
def _prefill_tile(
    sequence: tl.tensor,
    tile: tl.tensor,
    kv_head: tl.tensor,
    tensors: tl.tuple,
    pages: tl.tuple,
    boxes: tl.tuple,
    strides: tl.tuple,
    score: tl.tuple,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FLOAT8: tl.constexpr,
    USES_BOXES: tl.constexpr,
) -> None:
    """ROWS // GROUP tokens of one sequence against its context, for one KV head."""
    q_ptr, sinks_ptr, out_ptr, starts_ptr, lens_ptr, tables_ptr = tensors
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr = pages
    q_stride, table_stride, num_kv_heads = strides
    scale, window, softcap = score
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    num_queries = tl.load(starts_ptr + sequence + 1) - start.to(tl.int32)
    length = tl.load(lens_ptr + sequence)
    first_token = tile * (ROWS // GROUP)
    last_token = tl.minimum(first_token + ROWS // GROUP, num_queries) - 1
    rows = tl.arange(0, ROWS)  # [ROWS]
    tokens = first_token + rows // GROUP
    is_row = (rows // GROUP < ROWS // GROUP) & (tokens < num_queries)
    heads = kv_head * GROUP + rows % GROUP
    channels = tl.arange(0, HEAD_BLOCK)  # [HEAD_BLOCK]
    places = (start + tokens)[:, None] * q_stride + heads[:, None] * HEAD_DIM
    q = tl.load(
        q_ptr + places + channels[None, :],
        mask=is_row[:, None] & (channels < HEAD_DIM)[None, :],
        other=0.0,
    )  # [ROWS, HEAD_BLOCK]
    value_scale = 1.0
    if FLOAT8 != "none":
        scale = scale * tl.load(key_scales_ptr + kv_head)
        value_scale = tl.load(value_scales_ptr + kv_head)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + heads).to(tl.float32)
        largest, weight = sinks * 1.4426950408889634, weight + 1.0
    # Context that no token of this tile sees is skipped on both sides.
    before = length - num_queries
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(before + first_token - window + 1, 0) // TILE
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    largest, weight, values_sum = attend_range(
        *(q, before + tokens),
        (largest, weight, tl.zeros([ROWS, VALUE_BLOCK], tl.float32)),
        *((before + first_token, before + last_token), (first, (before + last_token) // TILE + 1)),
        (keys_ptr, values_ptr, boxes[0], boxes[1], table_ptr, length, kv_head, num_kv_heads),
        (scale, window, softcap),
        *(HEAD_DIM, HEAD_BLOCK, VALUE_DIM, VALUE_BLOCK, PAGE, TILE),
        *(HAS_WINDOW, HAS_SOFTCAP, FLOAT8, USES_BOXES),
    )
    weight = tl.where(is_row, weight, 1.0)  # idle rows may have seen nothing
    out = values_sum * value_scale / weight[:, None]
    value_channels = tl.arange(0, VALUE_BLOCK)  # [VALUE_BLOCK]
    places = ((start + tokens) * num_kv_heads * GROUP + heads)[:, None] * VALUE_DIM
    tl.store(
        out_ptr + places + value_channels[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (value_channels < VALUE_DIM)[None, :],
    )


@jit
def prefill_tiles(
    work: tl.tensor,
    num_sequences: tl.tensor,
    tensors: tl.tuple,
    pages: tl.tuple,
    boxes: tl.tuple,
    strides: tl.tuple,
    score: tl.tuple,
    SEQUENCES_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FLOAT8: tl.constexpr,
    USES_BOXES: tl.constexpr,
) -> None:
    """The work-th tile of all sequences that have several tokens, if there are so many.

    The last tile of a sequence comes first: it sees most, and short ones fill the gaps it leaves.
    """
    starts_ptr, num_kv_heads = tensors[3], strides[2]
    sequences = tl.arange(0, SEQUENCES_BLOCK)  # [SEQUENCES_BLOCK]
    is_there = sequences < num_sequences
    query_lens = tl.load(starts_ptr + sequences + 1, mask=is_there, other=0)
    query_lens -= tl.load(starts_ptr + sequences, mask=is_there, other=0)
    counts = (query_lens + ROWS // GROUP - 1) // (ROWS // GROUP)
    counts = tl.where(query_lens > 1, counts, 0)
    index = work // num_kv_heads
    if index < tl.sum(counts, axis=0):
        sequence = tl.sum((tl.cumsum(counts, axis=0) <= index).to(tl.int32), axis=0)
        until = tl.sum(tl.where(sequences <= sequence, counts, 0), axis=0)
        _prefill_tile(
            *(sequence, until - 1 - index, work % num_kv_heads),
            *(tensors, pages, boxes, strides, score),
            *(GROUP, ROWS, HEAD_DIM, HEAD_BLOCK, VALUE_DIM, VALUE_BLOCK, PAGE, TILE),
            *(HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, FLOAT8, USES_BOXES),
        )


def tile_rows(
    dtype: torch.dtype, head_dim: int, capability: int, *, is_float8: bool = False
) -> int:
    """The most rows (tokens times the query heads of one KV head) of one program without spills.

    `head_dim` is the larger of a key's and a value's, `capability` the GPU's major compute
    capability. Pages of 8-bit floats (`is_float8`) are widened in registers. fp32 products have no
    tensor core to run on: larger tiles would only take registers. `kernels.check` compiles every
    answer.
    """
    if dtype == torch.float32:
        return MIN_DOT_ROWS
    is_large = capability in LARGE_CAPABILITIES
    rows = 128 if is_large else 64
    if head_dim > 128:
        return rows // 4 if is_float8 and is_large else rows // 2
    return rows


def chosen_rows(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    max_query_len: int,
    capability: int,
    *,
    is_float8: bool = False,
) -> int:
    """The rows of a tile: fewer for short chunks, as idle rows cost as much as busy ones."""
    needed = max(MIN_DOT_ROWS, next_power_of_2(group * max_query_len))
    rows = min(needed, tile_rows(dtype, head_dim, capability, is_float8=is_float8))
    return max(rows, next_power_of_2(group))


def tile_warps(rows: int, head_dim: int, capability: int) -> int:
    """How many warps share a tile, so that its rows fit their registers."""
    is_large = capability in LARGE_CAPABILITIES
    return 8 if rows >= 32 or head_dim > 128 or not is_large else 4


def rule_of_tile(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    max_query_len: int,
    capability: int,
    *,
    is_float8: bool = False,
) -> Tile:
    """The tile of a launch where no table knows a better one."""
    rows = chosen_rows(dtype, head_dim, group, max_query_len, capability, is_float8=is_float8)
    return Tile(rows, tile_warps(rows, head_dim, capability), NUM_STAGES)


def chosen_tile(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    max_query_len: int,
    capability: int,
    *,
    is_float8: bool = False,
) -> Tile:
    """What the GPU's tuning table says, else the rule. Tables know no pages of 8-bit floats."""
    table = None if is_float8 else active()
    found = table and table.find(shape_of(dtype, head_dim, group, max_query_len))
    return found or rule_of_tile(
        dtype, head_dim, group, max_query_len, capability, is_float8=is_float8
    )
