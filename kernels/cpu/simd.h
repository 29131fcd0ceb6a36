// One vector of floats, as wide as the machine has it: the only place that knows instruction sets.
//
// The kernels are written once against `F32` (kWidth lanes), `Pairs` (kWidth pairs of bf16, the two
// members of a pair being neighbours in the summed dimension) and the few functions below. Which of
// the two implementations is compiled is decided by the compiler's target: AVX-512 or AVX2 + FMA.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace ncompass {

// A brain float: the upper half of a float. Arithmetic always happens in float.
struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// Rounds to nearest even; a NaN stays a NaN (the rounding carry would turn some into infinity).
inline bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if (std::isnan(x)) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bf16 from_float<bf16>(float x) {
  return to_bf16(x);
}

}  // namespace ncompass

// Unrolls loops whose bounds are template parameters, so that their arrays live in registers.
#define NCOMPASS_UNROLL _Pragma("GCC unroll 32")

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "simd_avx2.h"
#else
#error "The CPU kernels need AVX-512 (F, BW, VL, DQ) or AVX2 with FMA."
#endif

namespace ncompass {

// 2^x with a relative error below 2e-7; at most 2^-126 for anything smaller, masked lanes included.
// Polynomial: degree 6, fitted at Chebyshev nodes on [-1/2, 1/2].
inline F32 exp2(F32 x) {
  x = min(max(x, broadcast(-126.0f)), broadcast(127.0f));
  F32 whole = round_to_integer(x);
  F32 part = x - whole;
  F32 power = broadcast(1.546144472e-4f);
  power = fma(power, part, broadcast(1.340042818e-3f));
  power = fma(power, part, broadcast(9.618056678e-3f));
  power = fma(power, part, broadcast(5.550327227e-2f));
  power = fma(power, part, broadcast(2.402265092e-1f));
  power = fma(power, part, broadcast(6.931472067e-1f));
  power = fma(power, part, broadcast(1.0f));
  return multiply_by_power_of_two(power, whole);
}

inline F32 exp(F32 x) { return exp2(x * broadcast(1.44269504f)); }

inline F32 tanh(F32 x) {
  // 1 - 2 / (e^2x + 1); the clamp in exp2 saturates it at exactly -1 and 1.
  return broadcast(1.0f) - broadcast(2.0f) / (exp(x + x) + broadcast(1.0f));
}

// Calls body(offset, count) for each vector of a row: count is kWidth except, maybe, in the last.
template <class Body>
inline void for_each_vector(int64_t length, const Body& body) {
  int64_t offset = 0;
  for (; offset + F32::kWidth <= length; offset += F32::kWidth) body(offset, F32::kWidth);
  if (offset < length) body(offset, static_cast<int>(length - offset));
}

}  // namespace ncompass
