// Activations in the form that a product wants: rows of floats, of bf16, or of small integers with
// a scale for each group of a row.
//
//   quantised: q_i = round(x_i * 127 / m),   scale = m / 127,   m = max |x_i| of the group
//
// A group that holds a NaN or an infinity gets the scale NaN: its results say so, as floats would.
#pragma once

#include <algorithm>
#include <limits>

#include "packed_weight.h"

namespace ncompass {

template <class Dot>
struct Rows {
  const typename Dot::Activation* data;
  int64_t stride;
  const float* scales;  // [rows, groups]
};

inline int64_t num_groups(int64_t length, int64_t group_length) {
  return (length + group_length - 1) / group_length;
}

// An odd number of cache lines a row: rows of a tile never meet in one set of the cache.
template <class T>
int64_t spread_stride(int64_t length) {
  const int64_t line = 64 / static_cast<int64_t>(sizeof(T));
  return round_up(round_up(length, line) + (round_up(length, line) / line % 2 ? 0 : line), line);
}

// The largest magnitude of a group; NaN if it holds a NaN or an infinity. Magnitudes are compared as
// the integers that their bits are: a step takes one cycle where a maximum of floats takes four.
template <class X>
float largest_magnitude(const X* x, int64_t length) {
  Magnitudes most = no_magnitudes();
  for_each_vector(length, [&](int64_t i, int count) { most = larger(most, load(x + i, count)); });
  const float largest = reduce_max(most);
  return std::isfinite(largest) ? largest : std::numeric_limits<float>::quiet_NaN();
}

template <class X, class Store>
float quantise_group(const X* x, int64_t length, const Store& store_integers) {
  const float largest = largest_magnitude(x, length);
  if (std::isnan(largest)) {
    for_each_vector(length, [&](int64_t i, int count) { store_integers(i, zero(), count); });
    return largest;
  }
  // Below the smallest normal number there is nothing to scale by.
  const F32 factor = broadcast(largest < 1e-36f ? 0.0f : 127.0f / largest);
  for_each_vector(length, [&](int64_t i, int count) {
    store_integers(i, load(x + i, count) * factor, count);
  });
  return largest / 127.0f;
}

// Calls store_integers(i, values, count) for a whole row, and writes a scale for each group.
template <class X, class Store>
void quantise_row(const X* x, int64_t length, int64_t group_length, float* scales,
                  const Store& store_integers) {
  for (int64_t first = 0; first < length; first += group_length) {
    *scales++ = quantise_group(
        x + first, std::min(group_length, length - first),
        [&](int64_t i, F32 values, int count) { store_integers(first + i, values, count); });
  }
}

// One row in the form of Dot, padded with zeros; `scales` are written where Dot needs them.
template <class Dot, class X>
void convert_row(const X* x, int64_t length, int64_t padded_length, typename Dot::Activation* out,
                 float* scales) {
  using Activation = typename Dot::Activation;
  if constexpr (Dot::kHasRowScales) {
    quantise_row(x, length, Dot::kGroupLength, scales, [&](int64_t i, F32 values, int count) {
      store_activations(out + i, values, count);
    });
    for (int64_t i = length; i < padded_length; ++i) out[i] = kInt8ZeroPoint;
  } else {
    (void)scales;
    for_each_vector(length, [&](int64_t i, int count) { store(out + i, load(x + i, count), count); });
    for (int64_t i = length; i < padded_length; ++i) out[i] = from_float<Activation>(0.0f);
  }
}

// Rows that are converted by each thread for itself; more are converted by all threads together.
constexpr int64_t kPrivateRows = 8;

// Memory for the converted rows of one product.
struct ConvertedRows {
  Scratch* shared;
  std::vector<Scratch>* own;  // one per thread

  template <class Dot>
  static int64_t bytes(int64_t num_rows, int64_t padded_length) {
    const int64_t row = spread_stride<typename Dot::Activation>(padded_length) *
                        static_cast<int64_t>(sizeof(typename Dot::Activation));
    const int64_t scales = Dot::kHasRowScales ? num_groups(padded_length, Dot::kGroupLength) : 0;
    return round_up(num_rows * row, 64) + num_rows * scales * static_cast<int64_t>(sizeof(float));
  }
};

// Converts x for all threads of a region. `memory` is shared, or this thread's own for few rows.
template <class Dot, class MakeRow>
Rows<Dot> make_rows(Worker& worker, int64_t num_rows, int64_t padded_length, char* memory,
                    const MakeRow& make_row) {
  using Activation = typename Dot::Activation;
  const int64_t stride = spread_stride<Activation>(padded_length);
  auto* data = reinterpret_cast<Activation*>(memory);
  auto* scales = reinterpret_cast<float*>(
      memory + round_up(num_rows * stride * static_cast<int64_t>(sizeof(Activation)), 64));
  const int64_t num_scales = Dot::kHasRowScales ? num_groups(padded_length, Dot::kGroupLength) : 0;
  const auto make = [&](int64_t row) {
    make_row(row, data + row * stride, scales + row * num_scales);
  };
  if (num_rows <= kPrivateRows) {
    for (int64_t row = 0; row < num_rows; ++row) make(row);
  } else {
    worker.take((num_rows + kPrivateRows - 1) / kPrivateRows, [&](int64_t task, int64_t) {
      const int64_t end = std::min((task + 1) * kPrivateRows, num_rows);
      for (int64_t row = task * kPrivateRows; row < end; ++row) make(row);
    });
    worker.barrier();
  }
  return {data, stride, scales};
}

}  // namespace ncompass
