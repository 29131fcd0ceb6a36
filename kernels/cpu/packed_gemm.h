// Matrix products with packed weights: y [M, N] = x [M, K] W^T for every M from one to thousands.
//
// A packed weight is a sequence of panels of kPanelWidth outputs (dot.h gives their inside); the last
// panel is padded with zeros, and so is K up to a multiple of the pair. One task multiplies a block
// of rows by one panel:
//
//   for each kBlockSteps of K:           the panel's part stays in the first-level cache
//     for each tile of kTileRows rows:   accumulators in registers, carried over K in `sums`
//
// In the widened form of bf16 each part of a panel is turned into floats once for all tiles. With a
// single tile there is nothing to share: the pair is widened in registers on its way from memory,
// which the same order of additions makes bit-equal.
#pragma once

#include <algorithm>

#include "context.h"
#include "dot.h"
#include "simd.h"

namespace ncompass {

constexpr int kPanelWidth = kTileVectors * F32::kWidth;
constexpr int kMaxBlockRows = 256;
constexpr int kBlockSteps = 128;
constexpr int64_t kMaxBlockBytes = 1 << 20;  // of activations: half of a second-level cache
constexpr int64_t kWeightPrefetchBytes = 4096;

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

template <class Weight>
constexpr int kDepthOf = sizeof(float) / sizeof(Weight);

template <class Weight>
int64_t panel_elements(int64_t in_features) {
  return kPanelWidth * round_up(in_features, kDepthOf<Weight>);
}

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
};

// sums [kRows, kPanelWidth] (+)= activations . part of a panel. `is_first` starts from zero.
template <class Dot, int kRows>
void multiply_tile(const typename Dot::Activation* activations, int64_t row_stride,
                   const typename Dot::Weight* panel, int64_t num_steps, bool is_first,
                   float* sums) {
  F32 tile[kRows][kTileVectors];
  if (is_first) {
    clear(tile);
  } else {
    load_tile(sums, kPanelWidth, tile);
  }
  accumulate<Dot>(tile, activations, row_stride, panel, kPanelWidth * Dot::kDepth, num_steps);
  store_tile(tile, sums, kPanelWidth);
}

// [steps][width][2] bf16 -> [2 * steps][width] floats.
inline void widen_panel(const bf16* panel, int64_t num_steps, float* widened) {
  for (int64_t step = 0; step < num_steps; ++step) {
    NCOMPASS_UNROLL for (int v = 0; v < kTileVectors; ++v) {
      const Pairs pairs = load_pairs(panel + v * F32::kWidth * 2);
      _mm_prefetch(reinterpret_cast<const char*>(panel + v * F32::kWidth * 2) + kWeightPrefetchBytes,
                   _MM_HINT_T1);
      store(widened + v * F32::kWidth, low(pairs));
      store(widened + kPanelWidth + v * F32::kWidth, high(pairs));
    }
    panel += kPanelWidth * 2;
    widened += kPanelWidth * 2;
  }
}

// sums [num_rows, kPanelWidth] = rows . panel.
template <class Dot>
void multiply_block(const typename Dot::Activation* rows, int64_t row_stride, int64_t num_rows,
                    int tile_rows, const typename Dot::Weight* panel, int64_t num_steps,
                    float* sums) {
  const int64_t block_steps = num_rows > tile_rows ? kBlockSteps / Dot::kDepth : num_steps;
  constexpr bool kWidens = std::is_same_v<Dot, WidenedBf16Dot>;
  alignas(64) float widened[kWidens ? kBlockSteps * kPanelWidth : 1];
  for (int64_t step = 0; step < num_steps; step += block_steps) {
    const int64_t steps = std::min(block_steps, num_steps - step);
    const auto* part = panel + step * kPanelWidth * Dot::kDepth;
    const bool is_widened = kWidens && num_rows > tile_rows;
    if constexpr (kWidens) {
      if (is_widened) widen_panel(part, steps, widened);
    }
    for (int64_t row = 0; row < num_rows; row += tile_rows) {
      const auto* activations = rows + row * row_stride + step * Dot::kDepth;
      with_constant<kTileRows>(std::min<int64_t>(tile_rows, num_rows - row), [&](auto height) {
        if constexpr (kWidens) {
          if (is_widened) {
            return multiply_tile<FloatDot, height()>(activations, row_stride, widened, 2 * steps,
                                                     step == 0, sums + row * kPanelWidth);
          }
        }
        multiply_tile<Dot, height()>(activations, row_stride, part, steps, step == 0,
                                     sums + row * kPanelWidth);
      });
    }
  }
}

}  // namespace ncompass
