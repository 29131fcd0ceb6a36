// One panel of a weight with one block of rows: the loops around dot.h.
#include "packed_gemm.h"

namespace ncompass {

// Steps of a part: with four bytes for each output they fill just over half of the cache.
constexpr int kPartSteps = kPanelWidth >= 48 ? 144 : 256;
// Up to so many tiles widen the weights in registers, each for itself.
constexpr int kTilesInRegisters = 2;

template <class Dot>
constexpr bool kWidens =
    std::is_same_v<Dot, WidenedBf16Dot> || std::is_same_v<Dot, WidenedInt8Dot>;

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

// The share of each tile in fetching so many weights.
template <class Weight>
constexpr int64_t lines_of(int64_t num_weights, int64_t num_tiles) {
  const int64_t lines = (num_weights * sizeof(Weight) + kLineBytes - 1) / kLineBytes;
  return (lines + num_tiles - 1) / num_tiles;
}

inline void scale_columns(int64_t num_rows, const float* column_scales, float* results) {
  for (int64_t row = 0; row < num_rows; ++row, results += kPanelWidth) {
    for (int64_t column = 0; column < kPanelWidth; column += F32::kWidth) {
      store(results + column, load(results + column) * load(column_scales + column));
    }
  }
}

// sums (+)= activations . part of a panel. Meanwhile the weights to come are brought nearer.
// Where `widened` is given, the part is kept there as floats.
template <class Dot>
template <class PartDot, int kRows>
void BlockProduct<Dot>::multiply_tile(int64_t row, int64_t group,
                                      const typename PartDot::Activation* activations,
                                      const typename PartDot::Weight* part, int64_t steps,
                                      bool is_first, bool is_last, Prefetch prefetch,
                                      float* widened) const {
  constexpr int64_t kStep = kPanelWidth * PartDot::kDepth;
  typename Dot::Sum tile[kRows][kTileVectors];
  float* results = sums + row * kPanelWidth;
  if constexpr (Dot::kHasRowScales) {
    alignas(64) int32_t integers[kRows * kPanelWidth];
    load_tile(offsets + group * group_stride, 0, tile);
    accumulate<PartDot, kRows, kTileVectors>(tile, activations, rows.stride, part, kStep, steps,
                                             prefetch);
    store_tile(tile, integers, kPanelWidth);
    add_scaled(integers, kRows, rows.scales + row * num_groups + group, num_groups,
               column_scales + group * group_stride, is_first, results);
  } else {
    if (is_first) {
      clear(tile);
    } else {
      load_tile(results, kPanelWidth, tile);
    }
    if constexpr (kWidens<PartDot>) {
      if (widened != nullptr) {
        accumulate_and_widen<PartDot, kRows, kTileVectors>(tile, activations, rows.stride, part,
                                                           steps, prefetch, widened);
      }
    }
    if (widened == nullptr) {
      accumulate<PartDot, kRows, kTileVectors>(tile, activations, rows.stride, part, kStep, steps,
                                               prefetch);
    }
    store_tile(tile, results, kPanelWidth);
    if (Dot::kHasColumnScales && is_last) scale_columns(kRows, column_scales, results);
  }
}

// While a part of the panel meets its tiles, each of them fetches its share of the part to come. The
// last part of a panel is followed by the first one of the next panel.
template <class Dot>
void BlockProduct<Dot>::run() const {
  constexpr bool kHasGroups = Dot::kGroupLength > 0;
  constexpr int kSteps = kHasGroups      ? Dot::kGroupLength / Dot::kDepth
                         : kWidens<Dot> ? kPartSteps / Dot::kDepth
                                        : kPartSteps;
  constexpr int64_t kStepElements = kPanelWidth * Dot::kDepth;
  const bool is_widened = kWidens<Dot> && num_rows > kTilesInRegisters * tile_rows;
  const int64_t num_tiles = (num_rows + tile_rows - 1) / tile_rows;
  alignas(64) float widened[kWidens<Dot> ? kPartSteps * kPanelWidth : 1];
  for (int64_t step = 0; step < num_steps; step += kSteps) {
    const int64_t steps = std::min<int64_t>(kSteps, num_steps - step);
    const auto* part = panel + step * kStepElements;
    const int64_t group = kHasGroups ? step / kSteps : 0;
    const bool is_last = step + kSteps >= num_steps;
    const bool is_first = step == 0;
    const char* to_come =
        is_last ? next : reinterpret_cast<const char*>(part + kSteps * kStepElements);
    const int64_t steps_left = is_last ? num_steps : num_steps - step - kSteps;
    const int64_t lines = lines_of<typename Dot::Weight>(
        std::min<int64_t>(kSteps, steps_left) * kStepElements, num_tiles);
    for (int64_t row = 0; row < num_rows; row += tile_rows) {
      const auto* activations = rows.data + row * rows.stride + step * Dot::kDepth;
      with_constant<kTileRows>(std::min<int64_t>(tile_rows, num_rows - row), [&](auto height) {
        if constexpr (kWidens<Dot>) {
          if (is_widened && row > 0) {
            return multiply_tile<FloatDot, height()>(row, group, activations, widened,
                                                     steps * Dot::kDepth, is_first, is_last,
                                                     {to_come, lines, steps * Dot::kDepth}, nullptr);
          }
        }
        multiply_tile<Dot, height()>(row, group, activations, part, steps, is_first, is_last,
                                     {to_come, lines, steps}, is_widened ? widened : nullptr);
      });
      if (to_come != nullptr) to_come += lines * kLineBytes;
    }
  }
}

template struct BlockProduct<FloatDot>;
template struct BlockProduct<WidenedBf16Dot>;
template struct BlockProduct<WidenedInt8Dot>;
template struct BlockProduct<Int8Dot>;
#if NCOMPASS_HAS_BF16_DOT
template struct BlockProduct<NativeBf16Dot>;
#endif

}  // namespace ncompass
