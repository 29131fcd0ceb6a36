// Matrix products with packed weights: y [M, N] = x [M, K] W^T for every M from one to thousands.
//
// One task multiplies a block of rows by one panel of the weight (packed_weight.h):
//
//   for each part of K:                  the panel's part stays in the first-level cache
//     for each tile of kTileRows rows:   accumulators in registers, carried over K in `sums`
//
// bf16 and int8 that are multiplied as floats are widened in registers by the first tile, between
// its multiply-adds, and the floats are kept for the tiles that follow. (A pass of its own over
// each part made a product of 64 rows 9 % longer.) The order of additions is the same for all tiles.
#pragma once

#include <algorithm>

#include "activations.h"
#include "packed_weight.h"

namespace ncompass {

constexpr int kMaxBlockRows = 256;
// Of integers: their sums fit the first-level cache beside the weights, and as each thread begins at
// its own end of the blocks, as it did of the rows when it quantised them, it finds most of them in its
// own cache. A prefill of 256 tokens in int8 takes 5 % less time than with 256. (Where weights are
// widened, more tiles share that work.)
constexpr int kMaxIntegerBlockRows = 64;
constexpr int64_t kMaxBlockBytes = 1 << 20;  // of activations: half of a second-level cache

// How the rows of x are cut: blocks (one task each, per panel) of tiles of nearly equal height.
struct RowTiling {
  int64_t num_rows;
  int tile_rows;
  int64_t block_rows;

  RowTiling(int64_t num_rows, int64_t row_bytes, int most_rows) : num_rows(num_rows) {
    const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
    tile_rows = static_cast<int>((num_rows + num_tiles - 1) / num_tiles);
    const int64_t fitting = std::clamp<int64_t>(kMaxBlockBytes / row_bytes, kTileRows, most_rows);
    const int64_t tiles_fitting = std::max<int64_t>(fitting / tile_rows, 1);
    const int64_t num_blocks = (num_tiles + tiles_fitting - 1) / tiles_fitting;
    block_rows = (num_tiles + num_blocks - 1) / num_blocks * tile_rows;
  }
  int64_t num_blocks() const { return (num_rows + block_rows - 1) / block_rows; }

  template <class Dot>
  static RowTiling of(int64_t num_rows, const PackedWeight<Dot>& weight) {
    return RowTiling(num_rows, weight.padded_length() * sizeof(typename Dot::Activation),
                     Dot::kHasRowScales ? kMaxIntegerBlockRows : kMaxBlockRows);
  }
};

// What to do with a tile's rows as soon as their sums are complete, or nothing.
struct TileDone {
  void (*call)(const void* self, int64_t row, int64_t num_rows) = nullptr;
  const void* self = nullptr;

  template <class Body>
  static TileDone of(const Body& body) {
    return {[](const void* self, int64_t row, int64_t num_rows) {
              (*static_cast<const Body*>(self))(row, num_rows);
            },
            &body};
  }
};

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
  TileDone done = {};  // of its rows, not called where the sums are integers

  void run() const;

  // Calls body(row, num_rows) for all rows, tile by tile where it can: the sums are still in the
  // first-level cache, and stores go on while the next tile is multiplied. (1.5 % of a step of 64.)
  template <class Body>
  void run_and(const Body& body) {
    if constexpr (Dot::kHasRowScales) {
      run();
      body(0, num_rows);
    } else {
      done = TileDone::of(body);
      run();
    }
  }

 private:
  template <class PartDot, int kRows>
  void multiply_tile(int64_t row, const typename PartDot::Activation* activations,
                     const typename PartDot::Weight* part, int64_t steps, bool is_first,
                     bool is_last, const char* to_come, int64_t num_lines, float* widened) const;
};

// The share of each tile in fetching so many weights.
template <class Weight>
constexpr int64_t lines_of(int64_t num_weights, int64_t num_tiles) {
  const int64_t lines = (num_weights * sizeof(Weight) + kLineBytes - 1) / kLineBytes;
  return (lines + num_tiles - 1) / num_tiles;
}

// Compiled in block_product.cpp and integer_product.cpp alone, once for all operations around them.
extern template struct BlockProduct<FloatDot>;
extern template struct BlockProduct<WidenedBf16Dot>;
extern template struct BlockProduct<WidenedInt8Dot>;
template <>
void BlockProduct<Int8Dot>::run() const;
#if NCOMPASS_HAS_BF16_DOT
extern template struct BlockProduct<NativeBf16Dot>;
#endif

// Multiplies rows by all panels of a weight, and calls write(first_row, num_rows, panel, sums) for
// each part of the results [num_rows, kPanelWidth]. Each thread's last task fetches what lies at `after`,
// if anything does. Tasks go through the blocks of rows outermost: a block's rows stay in the cache.
// `sums` has room for RowTiling::block_rows of them.
template <class Dot, class Write>
void multiply_panels(Worker& worker, const Rows<Dot>& x, int64_t num_rows,
                     const PackedWeight<Dot>& weight, const char* after, float* sums,
                     const Write& write) {
  const RowTiling tiling = RowTiling::of(num_rows, weight);
  const int64_t num_panels = weight.num_panels();
  worker.take(num_panels * tiling.num_blocks(), [&](int64_t task, int64_t next) {
    const int64_t panel = task % num_panels;
    const int64_t first_row = task / num_panels * tiling.block_rows;
    const int64_t rows = std::min(tiling.block_rows, num_rows - first_row);
    const char* next_panel =
        next < 0 ? after : reinterpret_cast<const char*>(weight.panel(next % num_panels));
    block_of(weight, x, first_row, rows, tiling.tile_rows, panel, next_panel, sums)
        .run_and([&](int64_t row, int64_t num_rows) {
          write(first_row + row, num_rows, panel, sums + row * kPanelWidth);
        });
  });
}

// The same for two weights of one shape; write(first_row, num_rows, panel, sums, other_sums).
template <class Dot, class Write>
void multiply_panel_pairs(Worker& worker, const Rows<Dot>& x, int64_t num_rows,
                          const PackedWeight<Dot>& weight, const PackedWeight<Dot>& other,
                          const char* after, float* sums, const Write& write) {
  const RowTiling tiling = RowTiling::of(num_rows, weight);
  const int64_t num_panels = weight.num_panels();
  float* other_sums = sums + tiling.block_rows * kPanelWidth;
  worker.take(num_panels * tiling.num_blocks(), [&](int64_t task, int64_t next) {
    const int64_t panel = task % num_panels;
    const int64_t first_row = task / num_panels * tiling.block_rows;
    const int64_t rows = std::min(tiling.block_rows, num_rows - first_row);
    const char* pair = reinterpret_cast<const char*>(other.panel(panel));
    const char* next_panel =
        next < 0 ? after : reinterpret_cast<const char*>(weight.panel(next % num_panels));
    block_of(weight, x, first_row, rows, tiling.tile_rows, panel, pair, sums).run();
    block_of(other, x, first_row, rows, tiling.tile_rows, panel, next_panel, other_sums)
        .run_and([&](int64_t row, int64_t num_rows) {
          write(first_row + row, num_rows, panel, sums + row * kPanelWidth,
                other_sums + row * kPanelWidth);
        });
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
