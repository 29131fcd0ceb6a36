// One panel of a weight with one block of rows, multiplied as floats: the loops around dot.h.
#include "packed_gemm.h"

namespace ncompass {

// Steps of a part: with four bytes for each output they fill just over half of the cache.
constexpr int kPartSteps = kPanelWidth >= 48 ? 144 : 256;
// Up to so many tiles widen the weights in registers, each for itself.
constexpr int kTilesInRegisters = 2;

template <class Dot>
constexpr bool kWidens =
    std::is_same_v<Dot, WidenedBf16Dot> || std::is_same_v<Dot, WidenedInt8Dot>;

inline void scale_columns(int64_t num_rows, const float* column_scales, float* results) {
  for (int64_t row = 0; row < num_rows; ++row, results += kPanelWidth) {
    for (int64_t column = 0; column < kPanelWidth; column += F32::kWidth) {
      store(results + column, load(results + column) * load(column_scales + column));
    }
  }
}

// sums (+)= activations . part of a panel. Where `widened` is given, the part is kept there as floats.
template <class Dot>
template <class PartDot, int kRows>
void BlockProduct<Dot>::multiply_tile(int64_t row,
                                      const typename PartDot::Activation* activations,
                                      const typename PartDot::Weight* part, int64_t steps,
                                      bool is_first, bool is_last, const char* to_come,
                                      int64_t num_lines, float* widened) const {
  constexpr int64_t kStep = kPanelWidth * PartDot::kDepth;
  Prefetch prefetch(to_come, num_lines, steps);
  F32 tile[kRows][kTileVectors];
  float* results = sums + row * kPanelWidth;
  if (is_first) {
    clear(tile);
  } else {
    load_tile(results, kPanelWidth, tile);
  }
  if constexpr (kWidens<PartDot>) {
    if (widened != nullptr) {
      accumulate_and_widen<PartDot>(tile, activations, rows.stride, part, steps, prefetch,
                                    widened);
    }
  }
  if (widened == nullptr) {
    accumulate<PartDot>(tile, activations, rows.stride, part, kStep, steps, prefetch);
  }
  store_tile(tile, results, kPanelWidth);
  if (Dot::kHasColumnScales && is_last) scale_columns(kRows, column_scales, results);
}

// While a part of the panel meets its tiles, each of them fetches its share of the part to come. The
// last part of a panel is followed by the first one of the next panel.
template <class Dot>
void BlockProduct<Dot>::run() const {
  constexpr int kSteps = kWidens<Dot> ? kPartSteps / Dot::kDepth : kPartSteps;
  constexpr int64_t kStepElements = kPanelWidth * Dot::kDepth;
  const bool is_widened = kWidens<Dot> && num_rows > kTilesInRegisters * tile_rows;
  const int64_t num_tiles = (num_rows + tile_rows - 1) / tile_rows;
  alignas(64) float widened[kWidens<Dot> ? kPartSteps * kPanelWidth : 1];
  for (int64_t step = 0; step < num_steps; step += kSteps) {
    const int64_t steps = std::min<int64_t>(kSteps, num_steps - step);
    const auto* part = panel + step * kStepElements;
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
            return multiply_tile<FloatDot, height()>(row, activations, widened,
                                                     steps * Dot::kDepth, is_first, is_last,
                                                     to_come, lines, nullptr);
          }
        }
        multiply_tile<Dot, height()>(row, activations, part, steps, is_first, is_last, to_come,
                                     lines, is_widened ? widened : nullptr);
      });
      if (to_come != nullptr) to_come += lines * kLineBytes;
      if (is_last && done.call != nullptr) {
        done.call(done.self, row, std::min<int64_t>(tile_rows, num_rows - row));
      }
    }
  }
}

template struct BlockProduct<FloatDot>;
template struct BlockProduct<WidenedBf16Dot>;
template struct BlockProduct<WidenedInt8Dot>;
#if NCOMPASS_HAS_BF16_DOT
template struct BlockProduct<NativeBf16Dot>;
#endif

}  // namespace ncompass
