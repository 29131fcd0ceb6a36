// Sixteen floats in a 512-bit register. Included by simd.h.
#pragma once

namespace ncompass {

struct F32 {
  static constexpr int kWidth = 16;
  __m512 lanes;
};

// Sixteen pairs of bf16: lane i holds members 2k (low half) and 2k + 1 (high half) of column i.
struct Pairs {
  __m512i lanes;
};

// Register tiles, rows x vectors of accumulators: of a matrix product, of attention with few rows
// (decode) and with many (prefill). 32 registers leave room for the weights and one activation.
constexpr int kTileRows = 8;
constexpr int kTileVectors = 3;
constexpr int kFlatRows = 6;
constexpr int kFlatVectors = 4;
constexpr int kTallRows = 12;
constexpr int kTallVectors = 2;

inline __mmask16 first_lanes(int count) { return static_cast<__mmask16>((1u << count) - 1); }

inline F32 zero() { return {_mm512_setzero_ps()}; }
inline F32 broadcast(float x) { return {_mm512_set1_ps(x)}; }

inline F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F32 load(const float* p, int count) {
  return {_mm512_maskz_loadu_ps(first_lanes(count), p)};
}
inline F32 widen(__m256i halves) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
inline F32 load(const bf16* p) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline F32 load(const bf16* p, int count) {
  return widen(_mm256_maskz_loadu_epi16(first_lanes(count), p));
}

inline __m256i narrow(F32 x) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.lanes));
#else
  const __m512i bits = _mm512_castps_si512(x.lanes);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x.lanes, x.lanes, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(
      _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, is_nan, quiet), 16));
#endif
}
inline void store(float* p, F32 x) { _mm512_storeu_ps(p, x.lanes); }
inline void store(float* p, F32 x, int count) {
  _mm512_mask_storeu_ps(p, first_lanes(count), x.lanes);
}
inline void store(bf16* p, F32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x));
}
inline void store(bf16* p, F32 x, int count) {
  _mm256_mask_storeu_epi16(p, first_lanes(count), narrow(x));
}

inline F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.lanes, b.lanes)}; }
inline F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.lanes, b.lanes)}; }
inline F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.lanes, b.lanes)}; }
inline F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.lanes, b.lanes)}; }
// 1 / x within two units of the last place: an estimate of 14 bits and a step of Newton's method, in a
// third of a division's time.
inline F32 reciprocal(F32 x) {
  const __m512 guess = _mm512_rcp14_ps(x.lanes);
  return {_mm512_fmadd_ps(guess, _mm512_fnmadd_ps(x.lanes, guess, _mm512_set1_ps(1.0f)), guess)};
}
inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.lanes, b.lanes)}; }
inline F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.lanes, b.lanes)}; }

// a * b + c
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.lanes, b.lanes, c.lanes)}; }

// The first `count` lanes of x, `otherwise` in the rest.
inline F32 keep_first(F32 x, int count, F32 otherwise) {
  return {_mm512_mask_mov_ps(otherwise.lanes, first_lanes(count), x.lanes)};
}
inline F32 round_to_integer(F32 x) { return {_mm512_roundscale_ps(x.lanes, 0)}; }
inline F32 multiply_by_power_of_two(F32 x, F32 exponent) {
  return {_mm512_scalef_ps(x.lanes, exponent.lanes)};
}

inline float reduce_add(F32 x) { return _mm512_reduce_add_ps(x.lanes); }
inline float reduce_max(F32 x) { return _mm512_reduce_max_ps(x.lanes); }

inline bool any_nan(F32 x) { return _mm512_cmp_ps_mask(x.lanes, x.lanes, _CMP_UNORD_Q) != 0; }

// Magnitudes of floats as the integers that their bits are: in the same order, with infinity and NaN
// above all others.
struct Magnitudes {
  __m512i lanes;
};

inline Magnitudes no_magnitudes() { return {_mm512_setzero_si512()}; }
inline Magnitudes larger(Magnitudes most, F32 x) {
  const __m512i bits = _mm512_and_si512(_mm512_castps_si512(x.lanes), _mm512_set1_epi32(0x7fffffff));
  return {_mm512_max_epi32(most.lanes, bits)};
}
inline float reduce_max(Magnitudes most) {
  const int bits = _mm512_reduce_max_epi32(most.lanes);
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

inline Pairs load_pairs(const bf16* p) { return {_mm512_loadu_si512(p)}; }
inline F32 low(Pairs p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(p.lanes, 16))}; }
inline F32 high(Pairs p) {
  return {_mm512_castsi512_ps(
      _mm512_and_si512(p.lanes, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
}

#if defined(__AVX512BF16__)
#define NCOMPASS_HAS_BF16_DOT 1

inline Pairs broadcast_pair(const bf16* p) {
  int bits;
  std::memcpy(&bits, p, sizeof(bits));
  return {_mm512_set1_epi32(bits)};
}

inline Pairs low_only(Pairs p) {
  return {_mm512_and_si512(p.lanes, _mm512_set1_epi32(0xffff))};
}

// sum += low(a) * low(b) + high(a) * high(b), in the machine's own instruction.
// Inline assembly, because gcc 12 spills the accumulators of the intrinsic's form.
inline void add_dot(F32& sum, Pairs a, Pairs b) {
  __m512 lanes = sum.lanes;  // an operand inside an array would keep the array in memory
  asm("vdpbf16ps %2, %1, %0" : "+v"(lanes) : "v"(a.lanes), "v"(b.lanes));
  sum.lanes = lanes;
}
#endif

// Sixteen sums of products of small integers.
struct I32 {
  __m512i lanes;
};

inline I32 load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store(int32_t* p, I32 x) { _mm512_storeu_si512(p, x.lanes); }
inline F32 to_float(I32 x) { return {_mm512_cvtepi32_ps(x.lanes)}; }

inline F32 load(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
inline void store(int8_t* p, F32 x, int count) {
  _mm512_mask_cvtepi32_storeu_epi8(p, first_lanes(count), _mm512_cvtps_epi32(x.lanes));
}

#if defined(__AVX512VNNI__)
// Sixteen columns of four signed weights each, met by four activations that are shifted to 0..255.
using Int8Activation = uint8_t;
constexpr int kInt8Depth = 4;
constexpr int kInt8ZeroPoint = 128;

struct Int8Columns {
  __m512i lanes;
};

inline Int8Columns load_columns(const int8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Int8Columns broadcast_activations(const uint8_t* p) {
  int bits;
  std::memcpy(&bits, p, sizeof(bits));
  return {_mm512_set1_epi32(bits)};
}
// Inline assembly, because gcc 12 spills the accumulators of the intrinsic's form.
inline void add_dot(I32& sum, Int8Columns a, Int8Columns b) {
  __m512i lanes = sum.lanes;  // an operand inside an array would keep the array in memory
  asm("vpdpbusd %2, %1, %0" : "+v"(lanes) : "v"(a.lanes), "v"(b.lanes));
  sum.lanes = lanes;
}
inline void store_activations(uint8_t* p, F32 x, int count) {
  const __m512i shifted =
      _mm512_add_epi32(_mm512_cvtps_epi32(x.lanes), _mm512_set1_epi32(kInt8ZeroPoint));
  if (count == F32::kWidth) {  // a whole store takes a fraction of a masked one's time
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(shifted));
    return;
  }
  _mm512_mask_cvtepi32_storeu_epi8(p, first_lanes(count), shifted);
}
#else
// Sixteen columns of two weights each, widened to 16 bits: the products of bytes would saturate.
using Int8Activation = int16_t;
constexpr int kInt8Depth = 2;
constexpr int kInt8ZeroPoint = 0;

struct Int8Columns {
  __m512i lanes;
};

inline Int8Columns load_columns(const int8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Int8Columns broadcast_activations(const int16_t* p) {
  int bits;
  std::memcpy(&bits, p, sizeof(bits));
  return {_mm512_set1_epi32(bits)};
}
inline void add_dot(I32& sum, Int8Columns a, Int8Columns b) {
  sum.lanes = _mm512_add_epi32(sum.lanes, _mm512_madd_epi16(a.lanes, b.lanes));
}
inline void store_activations(int16_t* p, F32 x, int count) {
  _mm512_mask_cvtepi32_storeu_epi16(p, first_lanes(count), _mm512_cvtps_epi32(x.lanes));
}
#endif

}  // namespace ncompass
