// Eight floats in a 256-bit register. Included by simd.h.
#pragma once

namespace ncompass {

struct F32 {
  static constexpr int kWidth = 8;
  __m256 lanes;
};

// Eight pairs of bf16: lane i holds members 2k (low half) and 2k + 1 (high half) of column i.
struct Pairs {
  __m256i lanes;
};

// Register tiles, as in simd_avx512.h; here there are 16 registers.
constexpr int kTileRows = 6;
constexpr int kTileVectors = 2;
constexpr int kFlatRows = 4;
constexpr int kFlatVectors = 2;
constexpr int kTallRows = 8;
constexpr int kTallVectors = 1;

// All ones in the first `count` lanes.
inline __m256i first_lanes(int count) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane);
}

inline F32 zero() { return {_mm256_setzero_ps()}; }
inline F32 broadcast(float x) { return {_mm256_set1_ps(x)}; }

inline F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline F32 load(const float* p, int count) {
  return {_mm256_maskload_ps(p, first_lanes(count))};
}
inline F32 load(const bf16* p) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16))};
}
inline F32 load(const bf16* p, int count) {
  bf16 copy[F32::kWidth] = {};
  std::memcpy(copy, p, count * sizeof(bf16));
  return load(copy);
}

inline __m128i narrow(F32 x) {
  const __m256i bits = _mm256_castps_si256(x.lanes);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x.lanes, x.lanes, _CMP_UNORD_Q));
  const __m256i chosen = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  const __m256i packed = _mm256_packus_epi32(chosen, chosen);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000));
}
inline void store(float* p, F32 x) { _mm256_storeu_ps(p, x.lanes); }
inline void store(float* p, F32 x, int count) {
  _mm256_maskstore_ps(p, first_lanes(count), x.lanes);
}
inline void store(bf16* p, F32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x));
}
inline void store(bf16* p, F32 x, int count) {
  bf16 copy[F32::kWidth];
  store(copy, x);
  std::memcpy(p, copy, count * sizeof(bf16));
}

inline F32 operator+(F32 a, F32 b) { return {_mm256_add_ps(a.lanes, b.lanes)}; }
inline F32 operator-(F32 a, F32 b) { return {_mm256_sub_ps(a.lanes, b.lanes)}; }
inline F32 operator*(F32 a, F32 b) { return {_mm256_mul_ps(a.lanes, b.lanes)}; }
inline F32 operator/(F32 a, F32 b) { return {_mm256_div_ps(a.lanes, b.lanes)}; }
inline F32 reciprocal(F32 x) { return broadcast(1.0f) / x; }
inline F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.lanes, b.lanes)}; }
inline F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.lanes, b.lanes)}; }

// a * b + c
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.lanes, b.lanes, c.lanes)}; }

// The first `count` lanes of x, `otherwise` in the rest.
inline F32 keep_first(F32 x, int count, F32 otherwise) {
  return {_mm256_blendv_ps(otherwise.lanes, x.lanes, _mm256_castsi256_ps(first_lanes(count)))};
}
inline F32 round_to_integer(F32 x) {
  return {_mm256_round_ps(x.lanes, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline F32 multiply_by_power_of_two(F32 x, F32 exponent) {
  const __m256i biased =
      _mm256_add_epi32(_mm256_cvtps_epi32(exponent.lanes), _mm256_set1_epi32(127));
  return {_mm256_mul_ps(x.lanes, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)))};
}

inline float reduce_add(F32 x) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x.lanes), _mm256_extractf128_ps(x.lanes, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}
inline float reduce_max(F32 x) {
  __m128 most = _mm_max_ps(_mm256_castps256_ps128(x.lanes), _mm256_extractf128_ps(x.lanes, 1));
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

inline bool any_nan(F32 x) {
  return _mm256_movemask_ps(_mm256_cmp_ps(x.lanes, x.lanes, _CMP_UNORD_Q)) != 0;
}

// Magnitudes of floats as the integers that their bits are: in the same order, with infinity and NaN
// above all others.
struct Magnitudes {
  __m256i lanes;
};

inline Magnitudes no_magnitudes() { return {_mm256_setzero_si256()}; }
inline Magnitudes larger(Magnitudes most, F32 x) {
  const __m256i bits = _mm256_and_si256(_mm256_castps_si256(x.lanes), _mm256_set1_epi32(0x7fffffff));
  return {_mm256_max_epi32(most.lanes, bits)};
}
inline float reduce_max(Magnitudes most) {
  int32_t lanes[F32::kWidth];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), most.lanes);
  const int32_t bits = *std::max_element(lanes, lanes + F32::kWidth);
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

inline Pairs load_pairs(const bf16* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
inline F32 low(Pairs p) { return {_mm256_castsi256_ps(_mm256_slli_epi32(p.lanes, 16))}; }
inline F32 high(Pairs p) {
  return {_mm256_castsi256_ps(
      _mm256_and_si256(p.lanes, _mm256_set1_epi32(static_cast<int>(0xffff0000))))};
}

// Eight sums of products of small integers.
struct I32 {
  __m256i lanes;
};

inline I32 load(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
inline void store(int32_t* p, I32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.lanes);
}
inline F32 to_float(I32 x) { return {_mm256_cvtepi32_ps(x.lanes)}; }

inline F32 load(const int8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))};
}

// Eight columns of two weights each, widened to 16 bits: the products of bytes would saturate.
using Int8Activation = int16_t;
constexpr int kInt8Depth = 2;
constexpr int kInt8ZeroPoint = 0;

struct Int8Columns {
  __m256i lanes;
};

inline Int8Columns load_columns(const int8_t* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Int8Columns broadcast_activations(const int16_t* p) {
  int bits;
  std::memcpy(&bits, p, sizeof(bits));
  return {_mm256_set1_epi32(bits)};
}
inline void add_dot(I32& sum, Int8Columns a, Int8Columns b) {
  sum.lanes = _mm256_add_epi32(sum.lanes, _mm256_madd_epi16(a.lanes, b.lanes));
}

template <class Integer>
inline void store_integers(Integer* p, F32 x, int count) {
  int32_t copy[F32::kWidth];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(copy), _mm256_cvtps_epi32(x.lanes));
  for (int i = 0; i < count; ++i) p[i] = static_cast<Integer>(copy[i]);
}
inline void store(int8_t* p, F32 x, int count) { store_integers(p, x, count); }
inline void store_activations(int16_t* p, F32 x, int count) { store_integers(p, x, count); }

}  // namespace ncompass
