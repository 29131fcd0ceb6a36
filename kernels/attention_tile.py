"""What all attention kernels share: rows of queries against a range of tiles of one paged context.

For scores s_j of a row, taken a tile at a time (the online softmax):

    m' = max(m, max_j s_j)
    l' = l 2^(m - m') + sum_j 2^(s_j - m')
    o' = o 2^(m - m') + sum_j 2^(s_j - m') v_j,            out = o / l at the end

Scores are in units of log2, so that a power is one instruction. A tile that every row sees whole is
loaded without a mask, on GPUs that have it by the tensor memory accelerator (TMA); tiles at the
edges of what is visible are loaded by pointers and masked. What lies beyond a context may be NaN:
it is never used.

Sources: FlashAttention-2, arXiv 2307.08691; online softmax, arXiv 1805.02867.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch

from kernels.float8 import from_e4m3
from kernels.kv_cache import BLOCK_SIZE, PagedKVCache
from kernels.triton_support import (
    Float8,
    float8_form,
    jit,
    next_power_of_2,
    tl,
)

MIN_DOT_ROWS = 16  # the smallest tile of a tensor-core product
# Left to itself, the assembler spills some to make room for a second program.
MAX_REGISTERS = 255
NUM_STAGES = 2  # tiles in flight; Triton gains no buffer and spills registers with 3
LOG2_E = 1.4426950408889634
TMA_CAPABILITY = 9
MAX_GROUP_OF_FP32 = 16
"""More would spill: their products have no tensor core to go to."""


@jit
def attend_tiles(
    q: tl.tensor,
    own_positions: tl.tensor,
    sums: tl.tuple,
    tiles: tl.tuple,
    context: tl.tuple,
    score: tl.tuple,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FLOAT8: tl.constexpr,
    IS_EDGE: tl.constexpr,
    USES_BOXES: tl.constexpr,
) -> tl.tensor:
    """Fold tiles of one context into `sums` for the rows q: [ROWS, HEAD_BLOCK].

    sums: largest [ROWS], weight [ROWS], values_sum [ROWS, VALUE_BLOCK].
    tiles: first, number, and from the which-th on how many are skipped: edges enclose whole tiles.
    context: keys and values, their boxes, its block table, its length, KV head of how many.
    score: scale, which includes log2 e unless there is a softcap; window; softcap.
    """
    largest, weight, values_sum = sums
    first, num_tiles, num_low, num_skipped = tiles
    keys_ptr, values_ptr, keys_box, values_box, table_ptr, length, kv_head, num_kv_heads = context
    scale, window, softcap = score
    tokens = tl.arange(0, TILE)  # [TILE]
    channels = tl.arange(0, HEAD_BLOCK)  # [HEAD_BLOCK]
    value_channels = tl.arange(0, VALUE_BLOCK)  # [VALUE_BLOCK]
    for i in range(0, num_tiles):
        tile = first + i
        if IS_EDGE:
            tile += tl.where(i >= num_low, num_skipped, 0)
        # A page's offset may pass 2^31 elements.
        block = tl.load(table_ptr + tile * TILE // PAGE).to(tl.int64)
        row = (block * num_kv_heads + kv_head) * PAGE + tile * TILE % PAGE
        positions = tile * TILE + tokens
        if USES_BOXES:
            keys = keys_box.load([row.to(tl.int32), 0])
            values = values_box.load([row.to(tl.int32), 0])
        else:
            key_offsets = row * HEAD_DIM + tokens[:, None] * HEAD_DIM + channels[None, :]
            value_offsets = row * VALUE_DIM + tokens[:, None] * VALUE_DIM + value_channels[None, :]
            is_key, is_value = (channels < HEAD_DIM)[None, :], (value_channels < VALUE_DIM)[None, :]
            if IS_EDGE:
                is_key = is_key & (positions < length)[:, None]
                is_value = is_value & (positions < length)[:, None]
            keys = tl.load(keys_ptr + key_offsets, mask=is_key, other=0.0)
            values = tl.load(values_ptr + value_offsets, mask=is_value, other=0.0)
        keys = from_e4m3(keys, q.dtype, FLOAT8)  # [TILE, HEAD_BLOCK]
        values = from_e4m3(values, q.dtype, FLOAT8)  # [TILE, VALUE_BLOCK]
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale  # [ROWS, TILE]
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (e^2x + 1)
            power = tl.exp2(scores / softcap * (2 * 1.4426950408889634))
            scores = softcap * (1 - 2 / (power + 1)) * 1.4426950408889634
        if IS_EDGE:
            is_visible = positions[None, :] <= own_positions[:, None]
            if HAS_WINDOW:
                is_visible = is_visible & (positions[None, :] > own_positions[:, None] - window)
            scores = tl.where(is_visible, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        # A row that has seen nothing yet (its window starts in a later tile) keeps -inf.
        anchor = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink = tl.exp2(largest - anchor)
        shares = tl.exp2(scores - anchor[:, None])  # [ROWS, TILE]
        weight = weight * shrink + tl.sum(shares, axis=1)
        values_sum = values_sum * shrink[:, None]
        values_sum = tl.dot(shares.to(q.dtype), values, values_sum, input_precision="ieee")
        largest = new_largest
    return largest, weight, values_sum


@jit
def attend_range(
    q: tl.tensor,
    own_positions: tl.tensor,
    sums: tl.tuple,
    rows_seen: tl.tuple,
    tiles: tl.tuple,
    context: tl.tuple,
    score: tl.tuple,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FLOAT8: tl.constexpr,
    USES_BOXES: tl.constexpr,
) -> tl.tensor:
    """Fold a range of tiles into `sums`: those that all rows see whole, then those at the edges.

    rows_seen: the lowest and the highest position of a row. tiles: the first, and the one after the
    last. The rest as in `attend_tiles`; the order of tiles makes no difference to the sums.
    """
    lowest_row, highest_row = rows_seen
    first, last = tiles
    whole_end = tl.maximum(tl.minimum((lowest_row + 1) // TILE, last), first)
    whole_first = first
    if HAS_WINDOW:
        seen_by_all = tl.maximum(highest_row - score[1] + 1, 0)
        whole_first = tl.minimum(tl.maximum((seen_by_all + TILE - 1) // TILE, first), whole_end)
    num_low, num_whole = whole_first - first, whole_end - whole_first
    sums = attend_tiles(
        *(q, own_positions, sums, (whole_first, num_whole, num_whole, 0), context, score),
        *(HEAD_DIM, HEAD_BLOCK, VALUE_DIM, VALUE_BLOCK, PAGE, TILE),
        *(HAS_WINDOW, HAS_SOFTCAP, FLOAT8, False, USES_BOXES),
    )
    edges = (first, last - first - num_whole, num_low, num_whole)
    return attend_tiles(
        *(q, own_positions, sums, edges, context, score),
        *(HEAD_DIM, HEAD_BLOCK, VALUE_DIM, VALUE_BLOCK, PAGE, TILE),
        *(HAS_WINDOW, HAS_SOFTCAP, FLOAT8, True, False),
    )


@functools.cache
def has_registers_for(dtype: torch.dtype, group: int) -> bool:
    """Whether the query heads of one KV head fit a program's registers; says once that they do not."""
    if dtype != torch.float32 or group <= MAX_GROUP_OF_FP32:
        return True
    logging.getLogger(__name__).warning(
        "the Triton kernels have no float32 attention for %d query heads of one KV head, only for %d "
        "or fewer: plain torch operations run instead, slower",
        *(group, MAX_GROUP_OF_FP32),
    )
    return False


def tokens_at_once(dtype: torch.dtype) -> int:
    """Context tokens of one tile: a page, or less in fp32, whose registers would overflow."""
    return MIN_DOT_ROWS if dtype == torch.float32 else BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Pages:
    """How the kernels see one layer of a cache."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor
    """[num_kv_heads] fp32; any tensor where the cache is not 8-bit."""
    value_scales: torch.Tensor
    float8: Float8

    @classmethod
    def of(cls, kv_cache: PagedKVCache, layer: int, device: torch.device) -> Pages:
        """The layer's pages, in a type that kernels on `device` read."""
        keys, values = kv_cache.keys[layer], kv_cache.values[layer]
        float8 = float8_form(kv_cache.dtype, device)
        if float8 == "none":
            return cls(keys, values, keys, values, float8)
        if float8 == "bits":
            keys, values = keys.view(torch.uint8), values.view(torch.uint8)
        return cls(keys, values, kv_cache.key_scales[layer], kv_cache.value_scales[layer], float8)

    def boxes(self, tile: int) -> tuple[Any, Any]:
        """Descriptors by which the copy engine of an sm_90 fetches a tile of rows of one head."""
        return _box(self.keys, tile), _box(self.values, tile)


def _box(pages: torch.Tensor, tile: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: PLC0415 - needs Triton

    width = pages.shape[-1]
    return TensorDescriptor.from_tensor(
        pages.reshape(-1, width), [tile, max(MIN_DOT_ROWS, next_power_of_2(width))]
    )


def uses_boxes(pages: Pages, capability: int) -> bool:
    """Whether tiles come through the copy engine, which wants rows of a multiple of 16 bytes.

    fp32 has no tensor core to go to: tiles of it would take more registers than there are.
    """
    widths = (pages.keys.shape[-1], pages.values.shape[-1])
    itemsize = pages.keys.element_size()
    fits = itemsize <= 2 and all(width * itemsize % 16 == 0 for width in widths)
    return fits and capability >= TMA_CAPABILITY
