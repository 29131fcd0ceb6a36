// One panel of a weight with one block of rows, multiplied in integers: each group of a sum has scales
// of its own, so its integers become floats as soon as they are summed.
//
//   for each part of K:               some groups of the panel stay in the first-level cache
//     for each tile of rows:
//       for each group of the part:   integers in registers, then scaled into `sums`
//
// What surrounds the inner loop matters: it alone runs at the machine's rate for any shape of tile
// (4x6 to 14x2 within 3 %, on a Xeon with 48 KB of L1), yet a product of 256 rows reached 78 % of that
// while each group's integers went through memory, and each call copied what it was told. Now 88 %;
// scaling them takes another 6 % of the multiply units.
#include "packed_gemm.h"

namespace ncompass {
namespace {

constexpr int kGroupSteps = Int8Dot::kGroupLength / Int8Dot::kDepth;
constexpr int64_t kGroupElements = int64_t{kPanelWidth} * Int8Dot::kGroupLength;
constexpr int kPartGroups = 3;  // 27 KB with 48 columns

// results [kRows, kPanelWidth] (+)= integers * the scales of their row and their column.
template <bool kIsFirst, int kRows>
inline void add_scaled(const I32 (&integers)[kRows][kTileVectors], const float* row_scales,
                       int64_t row_scale_stride, const float* column_scales, float* results) {
  F32 scales[kTileVectors];
  NCOMPASS_UNROLL for (int v = 0; v < kTileVectors; ++v) {
    scales[v] = load(column_scales + v * F32::kWidth);
  }
  NCOMPASS_UNROLL for (int r = 0; r < kRows; ++r) {
    const F32 row_scale = broadcast(row_scales[r * row_scale_stride]);
    NCOMPASS_UNROLL for (int v = 0; v < kTileVectors; ++v) {
      float* result = results + r * kPanelWidth + v * F32::kWidth;
      const F32 before = kIsFirst ? zero() : load(result);
      store(result, fma(to_float(integers[r][v]), row_scale * scales[v], before));
    }
  }
}

// The groups [group, end_group) of a tile of rows; meanwhile `num_lines` at `to_come` come nearer.
template <int kRows>
void multiply_groups(const BlockProduct<Int8Dot>& block, int64_t row, int64_t group,
                     int64_t end_group, const char* to_come, int64_t num_lines) {
  constexpr int64_t kStep = int64_t{kPanelWidth} * Int8Dot::kDepth;
  const int64_t row_stride = block.rows.stride, num_groups = block.num_groups;
  const auto* activations = block.rows.data + row * row_stride + group * Int8Dot::kGroupLength;
  const int8_t* weights = block.panel + group * kGroupElements;
  const float* row_scales = block.rows.scales + row * num_groups;
  float* results = block.sums + row * kPanelWidth;
  const int64_t num_steps = block.num_steps;
  Prefetch prefetch(to_come, num_lines,
                    std::min(end_group * kGroupSteps, num_steps) - group * kGroupSteps);
  for (; group < end_group; ++group) {
    const int64_t steps = std::min<int64_t>(kGroupSteps, num_steps - group * kGroupSteps);
    const float* column_scales = block.column_scales + group * block.group_stride;
    I32 integers[kRows][kTileVectors];
    load_tile(block.offsets + group * block.group_stride, 0, integers);
    accumulate<Int8Dot>(integers, activations, row_stride, weights, kStep, steps, prefetch);
    if (group == 0) {
      add_scaled<true>(integers, row_scales, num_groups, column_scales, results);
    } else {
      add_scaled<false>(integers, row_scales + group, num_groups, column_scales, results);
    }
    activations += Int8Dot::kGroupLength;
    weights += kGroupElements;
  }
}

}  // namespace

template <>
void BlockProduct<Int8Dot>::run() const {
  const int64_t num_tiles = (num_rows + tile_rows - 1) / tile_rows;
  for (int64_t group = 0; group < num_groups; group += kPartGroups) {
    const int64_t end_group = std::min(group + kPartGroups, num_groups);
    const bool is_last = end_group == num_groups;
    const int8_t* part_to_come = panel + end_group * kGroupElements;
    const char* to_come = is_last ? next : reinterpret_cast<const char*>(part_to_come);
    const int64_t steps_left = num_steps - (is_last ? 0 : end_group * kGroupSteps);
    const int64_t steps_to_come = std::min<int64_t>(kPartGroups * kGroupSteps, steps_left);
    const int64_t lines =
        lines_of<int8_t>(steps_to_come * kPanelWidth * Int8Dot::kDepth, num_tiles);
    for (int64_t row = 0; row < num_rows; row += tile_rows) {
      with_constant<kTileRows>(std::min<int64_t>(tile_rows, num_rows - row), [&](auto height) {
        multiply_groups<height()>(*this, row, group, end_group, to_come, lines);
      });
      if (to_come != nullptr) to_come += lines * kLineBytes;
    }
  }
}

}  // namespace ncompass
