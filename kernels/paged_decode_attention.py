"""Attention of one new token per sequence over its paged context.

Decode reads every key and value once and does little arithmetic on them: it is bound by memory
bandwidth, so the G query heads of one KV head are packed into rows of one product. On a GPU long
contexts are split among programs (Flash-Decoding), and the program that finishes last merges:

    out = sum_s w_s 2^(m_s - m) o_s / sum_s w_s 2^(m_s - m),   m = max_s m_s

A fixed number of programs walks a list of all splits, which they count themselves: a launch depends
on the number of sequences and not on their lengths, as CUDA graphs need. How a context is split
depends on its own length alone, so a sequence's result does not depend on what shares its batch.

Sources: FlashAttention-2, arXiv 2307.08691; The Anatomy of a Triton Attention Kernel, 2511.11581.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention_metadata import AttentionMetadata, DecodeBucket
from kernels.attention_tile import (
    LOG2_E,
    MAX_REGISTERS,
    MIN_DOT_ROWS,
    NUM_STAGES,
    Pages,
    attend_range,
    tokens_at_once,
)
from kernels.kv_cache import BLOCK_SIZE, PagedKVCache
from kernels.triton_support import cdiv, jit, next_power_of_2, num_processors, tl

TOKENS_PER_SPLIT = 512  # enough work for one program, enough programs for one sequence
MAX_SPLITS = 64  # of one sequence; beyond 32768 tokens its splits grow
PROGRAMS_PER_PROCESSOR = 4
MERGE_ELEMENTS = 2048  # of the parts that are in registers at once


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


@jit
def _decode_kernel(
    q_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    key_scales_ptr: tl.tensor,
    value_scales_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    statistics_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    num_sequences: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    num_kv_heads: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
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
    """A step of decodes alone; see `decode_splits`."""
    decode_splits(
        *(tl.program_id(0), tl.num_programs(0), num_sequences),
        (q_ptr, sinks_ptr, out_ptr, starts_ptr, lens_ptr, tables_ptr),
        (keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr),
        (partial_ptr, statistics_ptr, arrivals_ptr),
        (q_stride, table_stride, num_kv_heads),
        (scale, window, softcap),
        *(SEQUENCES_BLOCK, GROUP, GROUP_BLOCK, HEAD_DIM, HEAD_BLOCK, VALUE_DIM, VALUE_BLOCK),
        *(PAGE, TILE, TILES_PER_SPLIT, MAX_SPLITS, MERGE_BLOCK),
        *(HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, FLOAT8),
    )


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What a launch over decodes needs beside the tensors of the step."""

    num_programs: int
    scratch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Values and statistics of parts, and counters of arrivals."""
    constants: dict[str, int]


def decode_constants(
    dtype: torch.dtype, group: int, head_dim: int, value_dim: int, num_sequences: int
) -> dict[str, int]:
    """The compile-time parameters of attention to pages of BLOCK_SIZE tokens."""
    tile = tokens_at_once(dtype)
    value_block = max(MIN_DOT_ROWS, next_power_of_2(value_dim))
    return {
        "SEQUENCES_BLOCK": max(MIN_DOT_ROWS, next_power_of_2(num_sequences)),
        "GROUP": group,
        "GROUP_BLOCK": max(MIN_DOT_ROWS, next_power_of_2(group)),
        "HEAD_DIM": head_dim,
        "HEAD_BLOCK": max(MIN_DOT_ROWS, next_power_of_2(head_dim)),
        "VALUE_DIM": value_dim,
        "VALUE_BLOCK": value_block,
        "PAGE": BLOCK_SIZE,
        "TILE": tile,
        "TILES_PER_SPLIT": TOKENS_PER_SPLIT // tile,
        "MAX_SPLITS": MAX_SPLITS,
        "MERGE_BLOCK": min(MAX_SPLITS, max(1, MERGE_ELEMENTS // value_block)),
    }


def decode_warps(head_dim: int) -> int:
    """How many warps share a split, so that wide heads fit their registers."""
    return 8 if head_dim > 128 else 4


def plan_decode(
    q: torch.Tensor, kv_cache: PagedKVCache, metadata: AttentionMetadata, num_processors: int
) -> DecodePlan:
    """Programs, scratch memory and compile-time parameters for the decodes of a step."""
    assert kv_cache.block_size == BLOCK_SIZE
    group = q.shape[1] // kv_cache.num_kv_heads
    constants = decode_constants(
        q.dtype, group, kv_cache.head_dim, kv_cache.value_dim, metadata.num_sequences
    )
    num_splits = min(MAX_SPLITS, cdiv(metadata.max_context_len, TOKENS_PER_SPLIT))
    num_lists = metadata.num_sequences * kv_cache.num_kv_heads
    num_works = num_lists * num_splits
    num_rows = num_works * group
    workspace = metadata.workspace
    partials = workspace.partials(num_rows * (kv_cache.value_dim + 2))
    values = num_rows * kv_cache.value_dim
    scratch = (partials[:values], partials[values:], workspace.arrivals(num_lists))
    num_programs = min(num_works, PROGRAMS_PER_PROCESSOR * num_processors)
    return DecodePlan(num_programs, scratch, constants)


def decode_with_triton(
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
    """A step in which every sequence has one token: q [B, num_heads, D] -> [B, num_heads, D_v].

    Rows of sequences with a context of no tokens, which pad a captured graph, are left as they are.
    """
    assert metadata.max_query_len <= 1
    assert q.stride(1) == kv_cache.head_dim
    out = torch.empty((*q.shape[:2], kv_cache.value_dim), dtype=q.dtype, device=q.device)
    if metadata.num_sequences == 0:
        return out
    pages = Pages.of(kv_cache, layer, q.device)
    plan = plan_decode(q, kv_cache, metadata, num_processors(q.device))
    _decode_kernel[(plan.num_programs,)](
        q,
        q if sinks is None else sinks,
        out,
        metadata.query_start,
        metadata.context_lens,
        metadata.block_tables,
        pages.keys,
        pages.values,
        pages.key_scales,
        pages.value_scales,
        *plan.scratch,
        metadata.num_sequences,
        q.stride(0),
        metadata.block_tables.stride(0),
        kv_cache.num_kv_heads,
        scale if softcap is not None else scale * LOG2_E,
        window or 0,
        softcap or 0.0,
        **plan.constants,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        FLOAT8=pages.float8,
        num_warps=decode_warps(max(kv_cache.head_dim, kv_cache.value_dim)),
        maxnreg=MAX_REGISTERS,
        num_stages=NUM_STAGES,
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
        out = attend_by_formula(
            rows, keys, values, is_visible, scale=scale, softcap=softcap, sinks=sinks
        )
    return out.reshape(batch, num_heads, -1)


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
    """Fill `out` [T, num_heads, value_dim] at the tokens of sequences that have one token."""
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
