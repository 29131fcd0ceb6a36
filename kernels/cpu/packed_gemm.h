// Matrix products with packed weights: y [M, N] = x [M, K] W^T for every M from one to thousands.
//
// One task multiplies a block of rows by one panel of the weight (packed_weight.h):
//
//   for each part of K:                  the panel's part stays in the first-level cache
//     for each tile of kTileRows rows:   accumulators in registers, carried over K in `sums`
//
// bf16 and int8 that are multiplied as floats are widened: each part of a panel once for all tiles.
// With few tiles there is little to share: the weights are widened in registers on their way from
// memory, which the same order of additions makes bit-equal.
#pragma once

#include <algorithm>

#include "activations.h"
#include "packed_weight.h"

namespace ncompass {

// Steps of a part: with four bytes for each output they fill just over half of the cache.
constexpr int kPartSteps = kPanelWidth >= 48 ? 144 : 256;
constexpr int kMaxBlockRows = 256;
constexpr int64_t kMaxBlockBytes = 1 << 20;  // of activations: half of a second-level cache
// Up to so many tiles widen the weights in registers, each for itself.
constexpr int kTilesInRegisters = 2;

// How the rows of x are cut: blocks (one task each, per panel) of tiles of nearly equal height.
struct RowTiling {
  int64_t num_rows;
  int tile_rows;
  int64_t block_rows;

  RowTiling(int64_t num_rows, int64_t row_bytes) : num_rows(num_rows) {
    const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
    tile_rows = static_cast<int>((num_rows + num_tiles - 1) / num_tiles);
    const int64_t fitting = std::clamp<int64_t>(kMaxBlockBytes / row_bytes, kTileRows, kMaxBlockRows);
    const int64_t tiles_fitting = std::max<int64_t>(fitting / tile_rows, 1);
    const int64_t num_blocks = (num_tiles + tiles_fitting - 1) / tiles_fitting;
    block_rows = (num_tiles + num_blocks - 1) / num_blocks * tile_rows;
  }
  int64_t num_blocks() const { return (num_rows + block_rows - 1) / block_rows; }

  template <class Dot>
  static RowTiling of(int64_t num_rows, const PackedWeight<Dot>& weight) {
    return RowTiling(num_rows, weight.padded_length() * sizeof(typename Dot::Activation));
  }
};

// results [num_rows, kPanelWidth] (+)= integers * the scales of their row and their column.
inline void add_scaled(const int32_t* integers, int64_t num_rows, const float* row_scales,
                       int64_t row_scale_stride, const float* column_scales, bool is_first_group,
                       float* results) {
  for (int64_t row = 0; row < num_rows; ++row, row_scales += row_scale_stride) {
    const F32 row_scale = broadcast(*row_scales);
    for (int64_t i = row * kPanelWidth, column = 0; column < kPanelWidth;
         i += F32::kWidth, column += F32::kWidth) {
      const F32 scale = row_scale * load(column_scales + column);
      const F32 before = is_first_group ? zero() : load(results + i);
      store(results + i, fma(to_float(load(integers + i)), scale, before));
    }
  }
}

inline void scale_columns(int64_t num_rows, const float* column_scales, float* results) {
  for (int64_t row = 0; row < num_rows; ++row, results += kPanelWidth) {
    for (int64_t column = 0; column < kPanelWidth; column += F32::kWidth) {
      store(results + column, load(results + column) * load(column_scales + column));
    }
  }
}

// One panel of a weight and a block of rows that meet in a task.
template <class Dot>
struct BlockProduct {
  Rows<Dot> rows;
  int64_t num_rows;
  int tile_rows;
  const typename Dot::Weight* panel;
  int64_t num_steps;
  int64_t num_groups;
  const float* column_scales;  // of the first group; those of the others lie group_stride apart
  const int32_t* offsets;
  int64_t group_stride;
  const char* next;  // what to fetch when this panel is done, or null
  float* sums;       // [num_rows, kPanelWidth]

  [[gnu::noinline]] void run() const;  // compiled once for all dtypes around it

 private:
  template <class PartDot, int kRows, int kPrefetchLines>
  void multiply_tile(int64_t row, int64_t group, const typename PartDot::Activation* activations,
                     const typename PartDot::Weight* part, int64_t steps, bool is_first,
                     bool is_last, Prefetch prefetch) const;
};

// sums (+)= activations . part of a panel. Meanwhile the weights to come are brought nearer.
template <class Dot>
template <class PartDot, int kRows, int kPrefetchLines>
void BlockProduct<Dot>::multiply_tile(int64_t row, int64_t group,
                                      const typename PartDot::Activation* activations,
                                      const typename PartDot::Weight* part, int64_t steps,
                                      bool is_first, bool is_last, Prefetch prefetch) const {
  constexpr int64_t kStep = kPanelWidth * PartDot::kDepth;
  typename Dot::Sum tile[kRows][kTileVectors];
  float* results = sums + row * kPanelWidth;
  if constexpr (Dot::kHasRowScales) {
    alignas(64) int32_t integers[kRows * kPanelWidth];
    load_tile(offsets + group * group_stride, 0, tile);
    accumulate<PartDot, kRows, kTileVectors, kPrefetchLines>(tile, activations, rows.stride, part,
                                                             kStep, steps, prefetch);
    store_tile(tile, integers, kPanelWidth);
    add_scaled(integers, kRows, rows.scales + row * num_groups + group, num_groups,
               column_scales + group * group_stride, is_first, results);
  } else {
    if (is_first) {
      clear(tile);
    } else {
      load_tile(results, kPanelWidth, tile);
    }
    accumulate<PartDot, kRows, kTileVectors, kPrefetchLines>(tile, activations, rows.stride, part,
                                                             kStep, steps, prefetch);
    store_tile(tile, results, kPanelWidth);
    if (Dot::kHasColumnScales && is_last) scale_columns(kRows, column_scales, results);
  }
}

// [steps][width][depth] weights -> [steps * depth][width] floats.
inline void widen_panel(const bf16* panel, int64_t num_steps, float* widened) {
  for (int64_t step = 0; step < num_steps; ++step) {
    NCOMPASS_UNROLL for (int v = 0; v < kTileVectors; ++v) {
      const Pairs pairs = load_pairs(panel + v * F32::kWidth * 2);
      store(widened + v * F32::kWidth, low(pairs));
      store(widened + kPanelWidth + v * F32::kWidth, high(pairs));
    }
    panel += kPanelWidth * 2;
    widened += kPanelWidth * 2;
  }
}
inline void widen_panel(const int8_t* panel, int64_t num_steps, float* widened) {
  for (int64_t i = 0; i < num_steps * kPanelWidth; i += F32::kWidth) {
    store(widened + i, load(panel + i));
  }
}

// The first tile of each part of the panel fetches the next part, in the last one what comes next.
template <class Dot>
void BlockProduct<Dot>::run() const {
  constexpr bool kWidens =
      std::is_same_v<Dot, WidenedBf16Dot> || std::is_same_v<Dot, WidenedInt8Dot>;
  constexpr bool kHasGroups = Dot::kGroupLength > 0;
  constexpr int kSteps = kHasGroups ? Dot::kGroupLength / Dot::kDepth
                         : kWidens  ? kPartSteps / Dot::kDepth
                                    : kPartSteps;
  constexpr int kLines = std::max<int>(kPanelWidth * Dot::kDepth * sizeof(*panel) / 64, 1);
  const bool is_widened = kWidens && num_rows > kTilesInRegisters * tile_rows;
  alignas(64) float widened[kWidens ? kPartSteps * kPanelWidth : 1];
  for (int64_t step = 0; step < num_steps; step += kSteps) {
    const int64_t steps = std::min<int64_t>(kSteps, num_steps - step);
    const auto* part = panel + step * kPanelWidth * Dot::kDepth;
    const int64_t group = kHasGroups ? step / kSteps : 0;
    const bool is_last = step + kSteps >= num_steps;
    const bool is_first = step == 0;
    const auto* next_part = part + kSteps * kPanelWidth * Dot::kDepth;
    Prefetch prefetch{is_last ? next : reinterpret_cast<const char*>(next_part)};
    if constexpr (kWidens) {
      if (is_widened) widen_panel(part, steps, widened);
    }
    for (int64_t row = 0; row < num_rows; row += tile_rows) {
      const auto* activations = rows.data + row * rows.stride + step * Dot::kDepth;
      with_constant<kTileRows>(std::min<int64_t>(tile_rows, num_rows - row), [&](auto height) {
        if constexpr (kWidens) {
          if (is_widened) {
            return multiply_tile<FloatDot, height(), (kLines + Dot::kDepth - 1) / Dot::kDepth>(
                row, group, activations, widened, steps * Dot::kDepth, is_first, is_last, prefetch);
          }
        }
        multiply_tile<Dot, height(), kLines>(row, group, activations, part, steps, is_first,
                                             is_last, prefetch);
      });
      prefetch.next = nullptr;
    }
  }
}

// Multiplies rows by all panels of a weight, and calls write(first_row, num_rows, panel, sums) for
// each block of results [num_rows, kPanelWidth]. Tasks go through the blocks of rows outermost: a
// block's rows stay in the cache. `sums` has room for RowTiling::block_rows of them.
template <class Dot, class Write>
void multiply_panels(Worker& worker, const Rows<Dot>& x, int64_t num_rows,
                     const PackedWeight<Dot>& weight, float* sums, const Write& write) {
  const RowTiling tiling = RowTiling::of(num_rows, weight);
  const int64_t num_panels = weight.num_panels();
  worker.take(num_panels * tiling.num_blocks(), [&](int64_t task, int64_t next) {
    const int64_t panel = task % num_panels;
    const int64_t first_row = task / num_panels * tiling.block_rows;
    const int64_t rows = std::min(tiling.block_rows, num_rows - first_row);
    const char* next_panel =
        next < 0 ? nullptr : reinterpret_cast<const char*>(weight.panel(next % num_panels));
    block_of(weight, x, first_row, rows, tiling.tile_rows, panel, next_panel, sums).run();
    write(first_row, rows, panel, sums);
  });
}

// The same for two weights of one shape; write(first_row, num_rows, panel, sums, other_sums).
template <class Dot, class Write>
void multiply_panel_pairs(Worker& worker, const Rows<Dot>& x, int64_t num_rows,
                          const PackedWeight<Dot>& weight, const PackedWeight<Dot>& other,
                          float* sums, const Write& write) {
  const RowTiling tiling = RowTiling::of(num_rows, weight);
  const int64_t num_panels = weight.num_panels();
  float* other_sums = sums + tiling.block_rows * kPanelWidth;
  worker.take(num_panels * tiling.num_blocks(), [&](int64_t task, int64_t next) {
    const int64_t panel = task % num_panels;
    const int64_t first_row = task / num_panels * tiling.block_rows;
    const int64_t rows = std::min(tiling.block_rows, num_rows - first_row);
    const char* pair = reinterpret_cast<const char*>(other.panel(panel));
    const char* next_panel =
        next < 0 ? nullptr : reinterpret_cast<const char*>(weight.panel(next % num_panels));
    block_of(weight, x, first_row, rows, tiling.tile_rows, panel, pair, sums).run();
    block_of(other, x, first_row, rows, tiling.tile_rows, panel, next_panel, other_sums).run();
    write(first_row, rows, panel, sums, other_sums);
  });
}

template <class Dot>
BlockProduct<Dot> block_of(const PackedWeight<Dot>& weight, const Rows<Dot>& x, int64_t first_row,
                           int64_t num_rows, int tile_rows, int64_t panel, const char* next,
                           float* sums) {
  Rows<Dot> rows{x.data + first_row * x.stride, x.stride, nullptr};
  if (Dot::kHasRowScales) rows.scales = x.scales + first_row * weight.num_groups();
  const bool has_scales = Dot::kHasColumnScales;
  return {rows,
          num_rows,
          tile_rows,
          weight.panel(panel),
          weight.num_steps(),
          weight.num_groups(),
          has_scales ? weight.scales() + panel * kPanelWidth : nullptr,
          has_scales ? weight.offsets() + panel * kPanelWidth : nullptr,
          weight.num_panels() * kPanelWidth,
          next,
          sums};
}

}  // namespace ncompass
