"""Splits of the contexts that decodes attend to: how a program finds its share, and who merges.

    out = sum_s w_s 2^(m_s - m) o_s / sum_s w_s 2^(m_s - m),   m = max_s m_s

over the splits s of one context (Flash-Decoding). The programs of a launch walk one list of all
splits, which they count themselves; the one that finishes a context's last split merges them. How
a context is split depends on its own length alone, so a sequence's result does not depend on what
shares its batch.

Source: FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

from kernels.attention_tile import attend_range
from kernels.triton_support import jit, tl


@jit
def count_splits(
    lens: tl.tensor,
    window: tl.tensor,
    TILE: tl.constexpr,
    TILES_PER_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> tl.tensor:
    """Contexts of `lens` tokens -> (splits, tiles in each split but the last, first tile seen)."""
    first = lens * 0
    if HAS_WINDOW:
        first = tl.maximum(lens - window, 0) // TILE
    num_tiles = (lens + TILE - 1) // TILE - first
    tiles = tl.maximum((num_tiles + MAX_SPLITS - 1) // MAX_SPLITS, TILES_PER_SPLIT)
    return (num_tiles + tiles - 1) // tiles, tiles, first


@jit
def _merge(
    partial_ptr: tl.tensor,
    statistics_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first_work: tl.tensor,
    num_splits: tl.tensor,
    num_kv_heads: tl.tensor,
    value_scale: tl.tensor,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    MERGE_BLOCK: tl.constexpr,
) -> None:
    """The splits of one KV head, weighted by what each of them saw -> out_ptr [GROUP, VALUE_DIM].

    Loads bypass the first-level cache, which may hold what stood there before other programs wrote.
    """
    channels = tl.arange(0, VALUE_BLOCK)  # [VALUE_BLOCK]
    is_channel = channels < VALUE_DIM
    for row in range(0, GROUP):
        largest = float("-inf")
        weight = 0.0
        out = tl.zeros([VALUE_BLOCK], tl.float32)
        for first in range(0, num_splits, MERGE_BLOCK):
            splits = first + tl.arange(0, MERGE_BLOCK)  # [MERGE_BLOCK]
            is_split = splits < num_splits
            at = (first_work + splits.to(tl.int64) * num_kv_heads) * GROUP + row
            part_largest = tl.load(
                statistics_ptr + 2 * at, mask=is_split, other=float("-inf"), cache_modifier=".cg"
            )
            part_weight = tl.load(
                statistics_ptr + 2 * at + 1, mask=is_split, other=0.0, cache_modifier=".cg"
            )
            parts = tl.load(
                partial_ptr + at[:, None] * VALUE_DIM + channels[None, :],
                mask=is_split[:, None] & is_channel[None, :],
                other=0.0,
                cache_modifier=".cg",
            )  # [MERGE_BLOCK, VALUE_BLOCK]
            new_largest = tl.maximum(largest, tl.max(part_largest, axis=0))
            shares = tl.exp2(part_largest - new_largest)  # [MERGE_BLOCK]
            shrink = tl.exp2(largest - new_largest)
            weight = weight * shrink + tl.sum(part_weight * shares, axis=0)
            out = out * shrink + tl.sum(parts * shares[:, None], axis=0)
            largest = new_largest
        out = out * value_scale / weight
        tl.store(
            out_ptr + row * VALUE_DIM + channels, out.to(out_ptr.dtype.element_ty), mask=is_channel
        )


@jit
def _decode_split(
    place: tl.tuple,
    tensors: tl.tuple,
    pages: tl.tuple,
    scratch: tl.tuple,
    strides: tl.tuple,
    score: tl.tuple,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    TILES_PER_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MERGE_BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FLOAT8: tl.constexpr,
) -> None:
    """One split of one sequence for one KV head; whoever arrives last merges them all.

    place: the sequence, its first split's index in the list, this split's, the KV head.
    """
    sequence, before, index, kv_head = place
    q_ptr, sinks_ptr, out_ptr, starts_ptr, lens_ptr, tables_ptr = tensors
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr = pages
    partial_ptr, statistics_ptr, arrivals_ptr = scratch
    q_stride, table_stride, num_kv_heads = strides
    scale, window, softcap = score
    length = tl.load(lens_ptr + sequence)
    num_splits, tiles, first = count_splits(
        length, window, TILE, TILES_PER_SPLIT, MAX_SPLITS, HAS_WINDOW
    )
    first += (index - before) * tiles
    last = tl.minimum(first + tiles, (length + TILE - 1) // TILE)
    token = tl.load(starts_ptr + sequence).to(tl.int64)
    rows = tl.arange(0, GROUP_BLOCK)  # [GROUP_BLOCK]
    channels = tl.arange(0, HEAD_BLOCK)  # [HEAD_BLOCK]
    is_row = rows < GROUP
    heads = kv_head * GROUP + rows
    q = tl.load(
        q_ptr + token * q_stride + heads[:, None] * HEAD_DIM + channels[None, :],
        mask=is_row[:, None] & (channels < HEAD_DIM)[None, :],
        other=0.0,
    )  # [GROUP_BLOCK, HEAD_BLOCK]
    value_scale = 1.0
    if FLOAT8 != "none":
        scale = scale * tl.load(key_scales_ptr + kv_head)
        value_scale = tl.load(value_scales_ptr + kv_head)
    largest = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP_BLOCK], tl.float32)
    if HAS_SINKS:
        # A sink is one more logit, without a value: in one split only.
        is_first = index == before
        sinks = tl.load(sinks_ptr + heads, mask=is_row, other=0.0).to(tl.float32)
        largest = tl.where(is_first, sinks * 1.4426950408889634, float("-inf"))
        weight += tl.where(is_first, 1.0, 0.0)
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    largest, weight, values_sum = attend_range(
        *(q, rows * 0 + length - 1),
        (largest, weight, tl.zeros([GROUP_BLOCK, VALUE_BLOCK], tl.float32)),
        *((length - 1, length - 1), (first, last)),
        (keys_ptr, values_ptr, keys_ptr, values_ptr, table_ptr, length, kv_head, num_kv_heads),
        (scale, window, softcap),
        *(HEAD_DIM, HEAD_BLOCK, VALUE_DIM, VALUE_BLOCK, PAGE, TILE),
        *(HAS_WINDOW, HAS_SOFTCAP, FLOAT8, False),
    )
    value_channels = tl.arange(0, VALUE_BLOCK)  # [VALUE_BLOCK]
    at = rows[:, None] * VALUE_DIM + value_channels[None, :]
    mask = is_row[:, None] & (value_channels < VALUE_DIM)[None, :]
    own_out_ptr = out_ptr + (token * num_kv_heads + kv_head) * (GROUP * VALUE_DIM)
    if num_splits == 1:
        out = values_sum * value_scale / weight[:, None]
        tl.store(own_out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        part = (index.to(tl.int64) * num_kv_heads + kv_head) * GROUP
        tl.store(statistics_ptr + 2 * (part + rows), largest, mask=is_row)
        tl.store(statistics_ptr + 2 * (part + rows) + 1, weight, mask=is_row)
        tl.store(partial_ptr + part * VALUE_DIM + at, values_sum, mask=mask)
        # Every thread has stored before one of them counts the program as arrived.
        tl.debug_barrier()
        arrival_ptr = arrivals_ptr + sequence * num_kv_heads + kv_head
        if tl.atomic_add(arrival_ptr, 1, sem="acq_rel") == num_splits - 1:
            first_work = before.to(tl.int64) * num_kv_heads + kv_head
            _merge(
                *(partial_ptr, statistics_ptr, own_out_ptr, first_work, num_splits, num_kv_heads),
                *(value_scale, GROUP, VALUE_DIM, VALUE_BLOCK, MERGE_BLOCK),
            )
            tl.store(arrival_ptr, 0)


@jit
def decode_splits(
    program: tl.tensor,
    num_programs: tl.tensor,
    num_sequences: tl.tensor,
    tensors: tl.tuple,
    pages: tl.tuple,
    scratch: tl.tuple,
    strides: tl.tuple,
    score: tl.tuple,
    SEQUENCES_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    TILES_PER_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MERGE_BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FLOAT8: tl.constexpr,
) -> None:
    """One program's share of the splits of all sequences that have one token.

    Sequences with no context or with several tokens have no splits: graphs pad, prefills mix.
    tensors: q, sinks, out, query starts, context lengths, block tables. pages: keys, values, and
    the scales of both. strides: of q, of the tables, of a token's KV heads.
    """
    starts_ptr, lens_ptr, num_kv_heads = tensors[3], tensors[4], strides[2]
    sequences = tl.arange(0, SEQUENCES_BLOCK)  # [SEQUENCES_BLOCK]
    is_there = sequences < num_sequences
    lens = tl.load(lens_ptr + sequences, mask=is_there, other=0)
    query_lens = tl.load(starts_ptr + sequences + 1, mask=is_there, other=0)
    query_lens -= tl.load(starts_ptr + sequences, mask=is_there, other=0)
    counts, _, _ = count_splits(lens, score[1], TILE, TILES_PER_SPLIT, MAX_SPLITS, HAS_WINDOW)
    counts = tl.where(query_lens == 1, counts, 0)
    ends = tl.cumsum(counts, axis=0)
    for work in range(program, tl.sum(counts, axis=0) * num_kv_heads, num_programs):
        index = work // num_kv_heads
        sequence = tl.sum((ends <= index).to(tl.int32), axis=0)
        before = tl.sum(tl.where(sequences < sequence, counts, 0), axis=0)
        _decode_split(
            (sequence, before, index, work % num_kv_heads),
            *(tensors, pages, scratch, strides, score),
            *(GROUP, GROUP_BLOCK, HEAD_DIM, HEAD_BLOCK, VALUE_DIM, VALUE_BLOCK, PAGE, TILE),
            *(TILES_PER_SPLIT, MAX_SPLITS, MERGE_BLOCK, HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, FLOAT8),
        )
