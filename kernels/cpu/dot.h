// The one inner loop: a register tile of dot products against a panel of packed values.
//
// A panel holds `width` columns of a matrix, interleaved so that one vector load gives kWidth columns
// at one step of the summed dimension: [steps][width][Dot::kDepth]. Weights are packed so, and so are
// the pages of the KV cache (keys: columns are tokens; values: columns are channels). `Dot` says how
// the products are formed:
//
//   FloatDot        float x float, one member of the sum per step
//   WidenedBf16Dot  float x bf16: the pair is widened in registers, two fused multiply-adds
//   NativeBf16Dot   bf16 x bf16 by vdpbf16ps
//   WidenedInt8Dot  float x int8, the weight widened in registers
//   Int8Dot         int8 x int8 in integers, four at once by vpdpbusd where there is VNNI
//
// Where vdpbf16ps runs at full rate (Zen 4 and later) it does twice the work of a multiply-add; on
// Intel cores since Sapphire Rapids it is microcoded to a quarter of that (measured: 86 against 176
// GFLOP/s a core) and widening wins. `measure_peak` decides on the machine.
//
// The order of every sum is the order of the panel, one accumulator per output, whatever the tile's
// shape: a row's result does not depend on the rows that share its batch.
#pragma once

#include <type_traits>

#include "simd.h"

namespace ncompass {

constexpr int64_t kLineBytes = 64;

// `Sum` is what a register of the tile holds. A product of integers is turned into floats at the
// end, with the scales that kHasRowScales and kHasColumnScales say it needs: one for each group of
// kGroupLength members of the sum, or one for all of them.
struct FloatDot {
  using Weight = float;
  using Activation = float;
  using Sum = F32;
  static constexpr bool kHasRowScales = false;
  static constexpr bool kHasColumnScales = false;
  static constexpr int kGroupLength = 0;
  static constexpr int kDepth = 1;

  template <int kRows, int kVectors>
  static inline void step(F32 (&sums)[kRows][kVectors], const float* activations,
                          int64_t row_stride, const float* weights) {
    F32 w[kVectors];
    NCOMPASS_UNROLL for (int v = 0; v < kVectors; ++v) w[v] = load(weights + v * F32::kWidth);
    add(sums, activations, row_stride, w);
  }

  // sums += activations w; what was widened on its way here is kept for the tiles to come.
  template <int kRows, int kVectors>
  static inline void add(F32 (&sums)[kRows][kVectors], const float* activations,
                         int64_t row_stride, const F32 (&w)[kVectors], float* widened = nullptr) {
    if (widened != nullptr) {
      NCOMPASS_UNROLL for (int v = 0; v < kVectors; ++v) store(widened + v * F32::kWidth, w[v]);
    }
    NCOMPASS_UNROLL for (int r = 0; r < kRows; ++r) {
      const F32 a = broadcast(activations[r * row_stride]);
      NCOMPASS_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(a, w[v], sums[r][v]);
    }
  }
};

struct WidenedBf16Dot {
  using Weight = bf16;
  using Activation = float;
  using Sum = F32;
  static constexpr bool kHasRowScales = false;
  static constexpr bool kHasColumnScales = false;
  static constexpr int kGroupLength = 0;
  static constexpr int kDepth = 2;

  template <int kRows, int kVectors>
  static inline void step(F32 (&sums)[kRows][kVectors], const float* activations,
                          int64_t row_stride, const bf16* weights, float* widened = nullptr) {
    Pairs w[kVectors];
    NCOMPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      w[v] = load_pairs(weights + v * F32::kWidth * 2);
    }
    F32 half[kVectors];
    NCOMPASS_UNROLL for (int v = 0; v < kVectors; ++v) half[v] = low(w[v]);
    FloatDot::add(sums, activations, row_stride, half, widened);
    NCOMPASS_UNROLL for (int v = 0; v < kVectors; ++v) half[v] = high(w[v]);
    if (widened != nullptr) widened += kVectors * F32::kWidth;
    FloatDot::add(sums, activations + 1, row_stride, half, widened);
  }

  // The first member of a pair alone, whatever bits the second one has.
  template <int kRows, int kVectors>
  static inline void step_low(F32 (&sums)[kRows][kVectors], const float* activations,
                              int64_t row_stride, const bf16* weights) {
    NCOMPASS_UNROLL for (int r = 0; r < kRows; ++r) {
      const F32 a = broadcast(activations[r * row_stride]);
      NCOMPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = fma(a, low(load_pairs(weights + v * F32::kWidth * 2)), sums[r][v]);
      }
    }
  }
};

#if NCOMPASS_HAS_BF16_DOT
struct NativeBf16Dot {
  using Weight = bf16;
  using Activation = bf16;
  using Sum = F32;
  static constexpr bool kHasRowScales = false;
  static constexpr bool kHasColumnScales = false;
  static constexpr int kGroupLength = 0;
  static constexpr int kDepth = 2;

  template <int kRows, int kVectors>
  static inline void step(F32 (&sums)[kRows][kVectors], const bf16* activations,
                          int64_t row_stride, const bf16* weights) {
    Pairs w[kVectors];
    NCOMPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      w[v] = load_pairs(weights + v * F32::kWidth * 2);
    }
    NCOMPASS_UNROLL for (int r = 0; r < kRows; ++r) {
      const Pairs a = broadcast_pair(activations + r * row_stride);
      NCOMPASS_UNROLL for (int v = 0; v < kVectors; ++v) add_dot(sums[r][v], a, w[v]);
    }
  }

  template <int kRows, int kVectors>
  static inline void step_low(F32 (&sums)[kRows][kVectors], const bf16* activations,
                              int64_t row_stride, const bf16* weights) {
    NCOMPASS_UNROLL for (int r = 0; r < kRows; ++r) {
      const Pairs a = low_only(broadcast_pair(activations + r * row_stride));
      NCOMPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
        add_dot(sums[r][v], a, low_only(load_pairs(weights + v * F32::kWidth * 2)));
      }
    }
  }
};
#endif

struct WidenedInt8Dot {
  using Weight = int8_t;
  using Activation = float;
  using Sum = F32;
  static constexpr bool kHasRowScales = false;
  static constexpr bool kHasColumnScales = true;
  static constexpr int kGroupLength = 0;
  static constexpr int kDepth = 1;

  template <int kRows, int kVectors>
  static inline void step(F32 (&sums)[kRows][kVectors], const float* activations,
                          int64_t row_stride, const int8_t* weights, float* widened = nullptr) {
    F32 w[kVectors];
    NCOMPASS_UNROLL for (int v = 0; v < kVectors; ++v) w[v] = load(weights + v * F32::kWidth);
    FloatDot::add(sums, activations, row_stride, w, widened);
  }
};

struct Int8Dot {
  using Weight = int8_t;
  using Activation = Int8Activation;
  using Sum = I32;
  static constexpr bool kHasRowScales = true;
  static constexpr bool kHasColumnScales = true;
  static constexpr int kGroupLength = 192;  // with smoothing: half of the loss of one scale a row
  static constexpr int kDepth = kInt8Depth;

  template <int kRows, int kVectors>
  static inline void step(I32 (&sums)[kRows][kVectors], const Int8Activation* activations,
                          int64_t row_stride, const int8_t* weights) {
    Int8Columns w[kVectors];
    NCOMPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      w[v] = load_columns(weights + v * F32::kWidth * kDepth);
    }
    NCOMPASS_UNROLL for (int r = 0; r < kRows; ++r) {
      const Int8Columns a = broadcast_activations(activations + r * row_stride);
      NCOMPASS_UNROLL for (int v = 0; v < kVectors; ++v) add_dot(sums[r][v], a, w[v]);
    }
  }
};

// Brings memory that is needed soon into the second-level cache: `num_lines` of it, spread evenly over
// the `num_steps` of a loop. (Into the first level it would push out what the loop is using: 19-22
// GB/s against 27-30. In bursts it fills the buffers through which the loop itself must load.)
struct Prefetch {
  const char* next = nullptr;
  int64_t num_lines = 0;
  int64_t num_steps = 1;
  int64_t due = 0;  // in parts of a step

  Prefetch() = default;
  Prefetch(const char* memory, int64_t num_lines, int64_t num_steps)
      : next(memory), num_lines(memory == nullptr ? 0 : num_lines), num_steps(num_steps) {}

  inline void advance() {
    for (due += num_lines; due >= num_steps; due -= num_steps) {
      _mm_prefetch(next, _MM_HINT_T1);
      next += kLineBytes;
    }
  }
};

// sums[r][v] += activations row r . panel vector v, over `num_steps` steps.
template <class Dot, int kRows, int kVectors, class Ahead>
inline void accumulate(typename Dot::Sum (&sums)[kRows][kVectors],
                       const typename Dot::Activation* activations, int64_t row_stride,
                       const typename Dot::Weight* weights, int64_t weight_step,
                       int64_t num_steps, Ahead& prefetch) {
  for (int64_t step = 0; step < num_steps; ++step) {
    Dot::template step<kRows, kVectors>(sums, activations, row_stride, weights);
    prefetch.advance();
    activations += Dot::kDepth;
    weights += weight_step;
  }
}

// The same for weights that are widened on the way: `widened` [steps * depth][kVectors * kWidth]
// keeps them.
template <class Dot, int kRows, int kVectors>
inline void accumulate_and_widen(F32 (&sums)[kRows][kVectors], const float* activations,
                                 int64_t row_stride, const typename Dot::Weight* weights,
                                 int64_t num_steps, Prefetch& prefetch, float* widened) {
  constexpr int64_t kStep = kVectors * F32::kWidth * Dot::kDepth;
  for (int64_t step = 0; step < num_steps; ++step) {
    Dot::template step<kRows, kVectors>(sums, activations, row_stride, weights, widened);
    prefetch.advance();
    activations += Dot::kDepth;
    weights += kStep;
    widened += kStep;
  }
}

template <int kRows, int kVectors>
inline void clear(F32 (&sums)[kRows][kVectors]) {
  NCOMPASS_UNROLL for (int r = 0; r < kRows; ++r) {
    NCOMPASS_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = zero();
  }
}

template <class Number, class Sum, int kRows, int kVectors>
inline void load_tile(const Number* from, int64_t row_stride, Sum (&sums)[kRows][kVectors]) {
  NCOMPASS_UNROLL for (int r = 0; r < kRows; ++r) {
    NCOMPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = load(from + r * row_stride + v * F32::kWidth);
    }
  }
}

template <class Number, class Sum, int kRows, int kVectors>
inline void store_tile(const Sum (&sums)[kRows][kVectors], Number* to, int64_t row_stride) {
  NCOMPASS_UNROLL for (int r = 0; r < kRows; ++r) {
    NCOMPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      store(to + r * row_stride + v * F32::kWidth, sums[r][v]);
    }
  }
}

// Calls body(std::integral_constant<int, value>) for a value in kLeast..kMost known at run time.
template <int kMost, int kLeast = 1, class Body>
inline void with_constant(int value, const Body& body) {
  if constexpr (kMost > kLeast) {
    if (value < kMost) return with_constant<kMost - 1, kLeast>(value, body);
  }
  body(std::integral_constant<int, kMost>{});
}

}  // namespace ncompass
