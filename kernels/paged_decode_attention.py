"""Attention of one new token per sequence over its paged context.

Decode reads every key and value once and does little arithmetic on them: it is bound by memory
bandwidth, so the G query heads of one KV head are packed into rows of one product. On a GPU long
contexts are split among programs: see `decode_splits`. A fixed number of them walks the list of all
splits: a launch depends on the number of sequences and not on their lengths, as CUDA graphs need.

Source: The Anatomy of a Triton Attention Kernel, arXiv 2511.11581.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.attention_tile import (
    LOG2_E,
    MAX_REGISTERS,
    MIN_DOT_ROWS,
    NUM_STAGES,
    Pages,
    tokens_at_once,
)
from kernels.decode_splits import decode_splits
from kernels.kv_cache import BLOCK_SIZE, PagedKVCache
from kernels.triton_support import cdiv, kernel, next_power_of_2, num_processors, tl

TOKENS_PER_SPLIT = 512  # enough work for one program, enough programs for one sequence
MAX_SPLITS = 64  # of one sequence; beyond 32768 tokens its splits grow
PROGRAMS_PER_PROCESSOR = 4
MERGE_ELEMENTS = 2048  # of the parts that are in registers at once


@kernel("num_sequences", "table_stride", "num_kv_heads", "window")
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
        "SEQUENCES_BLOCK": sequences_block(num_sequences),
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


def sequences_block(num_sequences: int) -> int:
    """16, 64, 256, …: few sizes, as each of them is a kernel to compile."""
    block = MIN_DOT_ROWS
    while block < num_sequences:
        block *= 4
    return block


def decode_warps(head_dim: int, group: int) -> int:
    """How many warps share a split, so that wide heads or many of them fit their registers."""
    return 8 if head_dim > 128 or group > MIN_DOT_ROWS else 4


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
        num_warps=decode_warps(max(kv_cache.head_dim, kv_cache.value_dim), plan.constants["GROUP"]),
        maxnreg=MAX_REGISTERS,
        num_stages=NUM_STAGES,
    )
    return out
