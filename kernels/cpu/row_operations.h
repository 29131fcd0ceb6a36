// What is done to one row at a time: RMSNorm, the addition before it, and SwiGLU's activation.
#pragma once

#include "simd.h"

namespace ncompass {

// x / sqrt(mean(x^2) + eps) * weight. Each lane sums its own column of vectors, then the lanes.
template <class X, class Weight, class Out>
void normalize_row(const X* x, const Weight* weight, int64_t hidden, float eps, Out* out) {
  F32 squares = zero();
  for_each_vector(hidden, [&](int64_t i, int count) {
    const F32 value = load(x + i, count);
    squares = fma(value, value, squares);
  });
  const float mean = reduce_add(squares) / static_cast<float>(hidden);
  const F32 inverse = broadcast(1.0f / std::sqrt(mean + eps));
  for_each_vector(hidden, [&](int64_t i, int count) {
    store(out + i, load(x + i, count) * inverse * load(weight + i, count), count);
  });
}

template <class X, class Addend>
void add_row(const X* x, const Addend* addend, int64_t hidden, X* sum) {
  for_each_vector(hidden, [&](int64_t i, int count) {
    store(sum + i, load(x + i, count) + load(addend + i, count), count);
  });
}

inline F32 silu(F32 x) { return x * reciprocal(broadcast(1.0f) + exp(zero() - x)); }

template <class T>
void silu_and_mul_row(const T* gate, const T* up, int64_t intermediate, T* out) {
  for_each_vector(intermediate, [&](int64_t i, int count) {
    store(out + i, silu(load(gate + i, count)) * load(up + i, count), count);
  });
}

}  // namespace ncompass
