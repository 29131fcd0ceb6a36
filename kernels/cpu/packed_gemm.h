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
constexpr int kBlockSteps = 128;
constexpr int kMaxBlockRows = 256;
constexpr int64_t kMaxBlockBytes = 1 << 20;  // of activations: half of a second-level cache
// Up to so many tiles widen the weights in registers, each for itself.
constexpr int kTilesInRegisters = 4;

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
// Meanwhile the weights at `next` come nearer, kPrefetchLines with each step, if it is not null.
template <class Dot, int kRows, int kPrefetchLines>
void multiply_tile(const typename Dot::Activation* activations, int64_t row_stride,
                   const typename Dot::Weight* panel, int64_t num_steps, bool is_first,
                   float* sums, Prefetch next) {
  F32 tile[kRows][kTileVectors];
  if (is_first) {
    clear(tile);
  } else {
    load_tile(sums, kPanelWidth, tile);
  }
  accumulate<Dot, kRows, kTileVectors, kPrefetchLines>(
      tile, activations, row_stride, panel, kPanelWidth * Dot::kDepth, num_steps, next);
  store_tile(tile, sums, kPanelWidth);
}

// [steps][width][2] bf16 -> [2 * steps][width] floats.
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

// sums [num_rows, kPanelWidth] = rows . panel. The first tile of each part of the panel fetches the
// next part, the last one fetches the start of `next_panel`.
template <class Dot>
void multiply_block(const typename Dot::Activation* rows, int64_t row_stride, int64_t num_rows,
                    int tile_rows, const typename Dot::Weight* panel, int64_t num_steps,
                    const typename Dot::Weight* next_panel, float* sums) {
  constexpr bool kWidens = std::is_same_v<Dot, WidenedBf16Dot>;
  constexpr int kPartSteps = kBlockSteps / Dot::kDepth;
  constexpr int kLines = kPanelWidth / 16;  // that a step reads: 4 bytes for each output
  const bool is_widened = kWidens && num_rows > kTilesInRegisters * tile_rows;
  alignas(64) float widened[kWidens ? kBlockSteps * kPanelWidth : 1];
  for (int64_t step = 0; step < num_steps; step += kPartSteps) {
    const int64_t steps = std::min<int64_t>(kPartSteps, num_steps - step);
    const auto* part = panel + step * kPanelWidth * Dot::kDepth;
    const bool is_last = step + kPartSteps >= num_steps;
    Prefetch next{reinterpret_cast<const char*>(
        is_last ? next_panel : part + kPartSteps * kPanelWidth * Dot::kDepth)};
    if constexpr (kWidens) {
      if (is_widened) widen_panel(part, steps, widened);
    }
    for (int64_t row = 0; row < num_rows; row += tile_rows) {
      const auto* activations = rows + row * row_stride + step * Dot::kDepth;
      float* tile_sums = sums + row * kPanelWidth;
      with_constant<kTileRows>(std::min<int64_t>(tile_rows, num_rows - row), [&](auto height) {
        if constexpr (kWidens) {
          if (is_widened) {
            return multiply_tile<FloatDot, height(), (kLines + 1) / 2>(
                activations, row_stride, widened, 2 * steps, step == 0, tile_sums, next);
          }
        }
        multiply_tile<Dot, height(), kLines>(activations, row_stride, part, steps, step == 0,
                                             tile_sums, next);
      });
      next.next = nullptr;
    }
  }
}

}  // namespace ncompass
