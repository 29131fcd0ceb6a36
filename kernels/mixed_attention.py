"""Attention of a step that has prefills, and perhaps decodes: one launch for both kinds.

The first programs share the splits of the decodes, which wait for memory; the others have a tile of
queries each, which keeps the tensor cores busy. Both kinds lie on a processor side by side, so that
a mixed step takes less than one after the other would. Nothing is read back to the host: the grid
holds as many tiles as there can be, and programs without one end at once.

Source: POD-Attention, arXiv 2410.18038.
"""

from __future__ import annotations

import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.attention_tile import LOG2_E, MAX_REGISTERS, Pages, uses_boxes
from kernels.decode_splits import decode_splits
from kernels.kv_cache import PagedKVCache
from kernels.paged_decode_attention import plan_decode
from kernels.paged_prefill_attention import chosen_tile, prefill_tiles
from kernels.triton_support import kernel, major_capability, num_processors, tl
from kernels.tuning import Tile


@kernel("num_decode_programs", "num_sequences", "table_stride", "num_kv_heads", "window")
def _mixed_kernel(
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
    keys_box: tl.tensor,
    values_box: tl.tensor,
    partial_ptr: tl.tensor,
    statistics_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    num_decode_programs: tl.tensor,
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
    ROWS: tl.constexpr,
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
    USES_BOXES: tl.constexpr,
) -> None:
    """Decode programs first; see `decode_splits` and `prefill_tiles`."""
    program = tl.program_id(0)
    tensors = (q_ptr, sinks_ptr, out_ptr, starts_ptr, lens_ptr, tables_ptr)
    pages = (keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr)
    strides = (q_stride, table_stride, num_kv_heads)
    score = (scale, window, softcap)
    if program < num_decode_programs:
        decode_splits(
            *(program, num_decode_programs, num_sequences, tensors, pages),
            *((partial_ptr, statistics_ptr, arrivals_ptr), strides, score),
            *(SEQUENCES_BLOCK, GROUP, GROUP_BLOCK, HEAD_DIM, HEAD_BLOCK, VALUE_DIM, VALUE_BLOCK),
            *(PAGE, TILE, TILES_PER_SPLIT, MAX_SPLITS, MERGE_BLOCK),
            *(HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, FLOAT8),
        )
    else:
        prefill_tiles(
            *(program - num_decode_programs, num_sequences, tensors, pages),
            *((keys_box, values_box), strides, score),
            *(SEQUENCES_BLOCK, GROUP, ROWS, HEAD_DIM, HEAD_BLOCK, VALUE_DIM, VALUE_BLOCK),
            *(PAGE, TILE, HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, FLOAT8, USES_BOXES),
        )


def mixed_with_triton(
    q: torch.Tensor,
    kv_cache: PagedKVCache,
    layer: int,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Any step: q [T, num_heads, D] -> [T, num_heads, D_v]. `tile`: what `chosen_tile` says."""
    num_tokens, num_heads, head_dim = q.shape
    assert q.stride(1) == head_dim
    out = torch.empty((num_tokens, num_heads, kv_cache.value_dim), dtype=q.dtype, device=q.device)
    if metadata.num_sequences == 0:
        return out
    capability = major_capability(q.device)
    pages = Pages.of(kv_cache, layer, q.device)
    plan = plan_decode(q, kv_cache, metadata, num_processors(q.device))
    group = plan.constants["GROUP"]
    widest = max(head_dim, kv_cache.value_dim)
    tile = tile or chosen_tile(
        *(q.dtype, widest, group, metadata.max_query_len, capability),
        is_float8=pages.float8 != "none",
    )
    num_tiles = num_tokens // (tile.rows // group) + metadata.num_sequences
    has_boxes = uses_boxes(pages, capability)
    boxes = pages.boxes(plan.constants["TILE"]) if has_boxes else (pages.keys, pages.values)
    _mixed_kernel[(plan.num_programs + num_tiles * kv_cache.num_kv_heads,)](
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
        *boxes,
        *plan.scratch,
        plan.num_programs,
        metadata.num_sequences,
        q.stride(0),
        metadata.block_tables.stride(0),
        kv_cache.num_kv_heads,
        scale if softcap is not None else scale * LOG2_E,
        window or 0,
        softcap or 0.0,
        **plan.constants,
        ROWS=tile.rows,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        FLOAT8=pages.float8,
        USES_BOXES=has_boxes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=MAX_REGISTERS,
    )
    return out
