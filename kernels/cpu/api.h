// The C interface that `library.py` binds: plain pointers, sizes and strides.
//
// Strides count elements. Every function returns null, or the reason why it did nothing: arguments
// that would lead outside an array are refused before any work starts. Operations on one context
// take turns; each runs on all of its threads.
#pragma once

#include <cstdint>

#include "context.h"
#include "decoder.h"
#include "packed_weight.h"

#define NCOMPASS_API __attribute__((visibility("default")))

extern "C" {

// The width of the vectors compiled in, and whether the target has the native bf16 dot product.
NCOMPASS_API int32_t ncompass_vector_width();
NCOMPASS_API int32_t ncompass_has_native_bf16_dot();

NCOMPASS_API ncompass::Context* ncompass_create(int32_t num_threads, int32_t use_native_bf16_dot);
NCOMPASS_API void ncompass_destroy(ncompass::Context* context);

// out = x / sqrt(mean(x^2) + eps) * weight; with `addend`, x + addend takes the place of x and is
// also written to `sum`, in the dtype of x.
NCOMPASS_API const char* ncompass_rms_norm(ncompass::Context* context, int64_t num_rows,
                                           int64_t hidden, const void* x, int64_t x_stride,
                                           ncompass::DType x_dtype, const void* addend,
                                           int64_t addend_stride, ncompass::DType addend_dtype,
                                           void* sum, const void* weight, ncompass::DType dtype,
                                           float eps, void* out);

// out[t] = silu(gate_up[t, :intermediate]) * gate_up[t, intermediate:]
NCOMPASS_API const char* ncompass_silu_and_mul(ncompass::Context* context, int64_t num_rows,
                                               int64_t intermediate, const void* gate_up,
                                               int64_t stride, ncompass::DType dtype, void* out);

// Members of a sum that share a scale in weights of this form; 0: all of them.
NCOMPASS_API int64_t ncompass_group_length(ncompass::WeightForm form);

// Each row of x as integers of 8 bits: out [num_rows, length], scales [num_rows, groups]
// (activations.h).
NCOMPASS_API const char* ncompass_quantise(ncompass::Context* context, int64_t num_rows,
                                           int64_t length, int64_t group_length, const void* x,
                                           int64_t stride, ncompass::DType dtype, int8_t* out,
                                           float* scales);

// Bytes of the packed form of a weight [out_features, in_features].
NCOMPASS_API int64_t ncompass_packed_bytes(ncompass::Context* context, int64_t out_features,
                                           int64_t in_features, ncompass::WeightForm form);
// The weight's elements are those of the form. Integers come with scales [out_features,
// groups].
NCOMPASS_API const char* ncompass_pack(ncompass::Context* context, int64_t out_features,
                                       int64_t in_features, const void* weight, int64_t stride,
                                       const float* scales, ncompass::WeightForm form,
                                       void* packed);
// out [num_rows, in_features] = the rows `outputs` of a packed weight of floats or bf16.
NCOMPASS_API const char* ncompass_unpack_rows(ncompass::Context* context, int64_t out_features,
                                              int64_t in_features, const void* packed,
                                              ncompass::WeightForm form, int64_t num_rows,
                                              const int64_t* outputs, float* out);

// out = x W^T + bias + residual; bias and residual may be null. The residual has the dtype of out.
NCOMPASS_API const char* ncompass_linear(ncompass::Context* context, int64_t num_rows,
                                         int64_t out_features, int64_t in_features, const void* x,
                                         int64_t x_stride, ncompass::DType x_dtype,
                                         const void* packed, ncompass::WeightForm form,
                                         const float* bias, const void* residual,
                                         int64_t residual_stride, void* out,
                                         ncompass::DType out_dtype);

// out = silu(x G^T + gate_bias) * (x U^T + up_bias): two weights of one shape and form; the biases
// may be null.
NCOMPASS_API const char* ncompass_gated_linear(ncompass::Context* context, int64_t num_rows,
                                               int64_t out_features, int64_t in_features,
                                               const void* x, int64_t x_stride,
                                               ncompass::DType x_dtype, const void* gate,
                                               const float* gate_bias, const void* up,
                                               const float* up_bias, ncompass::WeightForm form,
                                               void* out, ncompass::DType out_dtype);

// keys, values: one layer's pages, [num_blocks, num_kv_heads] of them, laid out as kv_pages.h says.

// Rotates q in place, and writes rotated k and plain v to the slots that are not negative.
NCOMPASS_API const char* ncompass_rotary_and_write_kv(
    ncompass::Context* context, void* keys, void* values, int64_t num_blocks,
    int64_t num_kv_heads, int64_t head_dim, ncompass::DType kv_dtype, int64_t num_tokens,
    int64_t num_heads, void* q, int64_t q_stride, const void* k, int64_t k_stride, const void* v,
    int64_t v_stride, ncompass::DType dtype, const float* cos_sin, int64_t max_positions,
    int64_t rotary_dim, const int64_t* positions, const int64_t* slots);

// A window or softcap of 0 means none.
NCOMPASS_API const char* ncompass_paged_attention(
    ncompass::Context* context, const void* keys, const void* values, int64_t num_blocks,
    int64_t num_kv_heads, int64_t head_dim, ncompass::DType kv_dtype, int64_t num_tokens,
    int64_t num_heads, const void* q, int64_t q_stride, ncompass::DType dtype, void* out,
    int64_t num_sequences, const int32_t* query_start, const int32_t* context_lens,
    const int32_t* block_tables, int64_t max_blocks, float scale, int64_t window, float softcap);

// One step of a whole model (decoder.h) in one parallel region.
NCOMPASS_API const char* ncompass_decode(ncompass::Context* context,
                                         const ncompass::DecoderModel* model,
                                         const ncompass::DecoderStep* step);

// tokens[row] = the token drawn from a row of logits, -1 where the largest is not finite. A null
// temperature takes the largest of every row, and the arrays after it are not read.
NCOMPASS_API const char* ncompass_sample(ncompass::Context* context, int64_t num_rows,
                                         int64_t vocabulary, const void* logits, int64_t stride,
                                         ncompass::DType dtype, const float* temperature,
                                         const int64_t* top_k, const float* top_p,
                                         const float* min_p, const int64_t* seeds,
                                         const int64_t* positions, int64_t* tokens);

// The machine's limits. unit: 0 = float multiply-add, 1 = the native bf16 dot product (0
// without), 2 = products of small integers as int8 weights meet them.
NCOMPASS_API const char* ncompass_measure_arithmetic(ncompass::Context* context, int32_t unit,
                                                     double seconds, double* operations_per_s);
NCOMPASS_API const char* ncompass_measure_read(ncompass::Context* context, const void* memory,
                                               int64_t bytes, double* bytes_per_s);

}  // extern "C"
