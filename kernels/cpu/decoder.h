// A whole decoder and one step of it, as `decoder.py` describes them: plain pointers and sizes.
//
//   h = h + O attention(rope(norm(h) [Q K V]));   h = h + D (silu(norm(h) G) * (norm(h) U))
//   logits = norm(h[rows]) head
//
// The residual stream h is in floats. What lies between two products of a layer has the precision in
// which the KV cache is multiplied: floats, or bf16 where the machine has a dot product for it.
#pragma once

#include <cstdint>

#include "context.h"
#include "packed_weight.h"

namespace ncompass {

struct DecoderLinear {
  const void* packed;
  const float* bias;  // null = none
  WeightForm form;
};

// Norm weights are floats. The query and key norms may be null, a window of 0 means none.
struct DecoderLayer {
  const float* input_norm;
  DecoderLinear qkv;
  const float* query_norm;
  const float* key_norm;
  DecoderLinear output;
  const float* mlp_norm;
  DecoderLinear gate;
  DecoderLinear up;
  DecoderLinear down;
  int64_t window;
};

struct DecoderModel {
  int64_t num_layers;
  int64_t hidden;
  int64_t intermediate;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t vocabulary;
  int64_t max_positions;
  int64_t rotary_dim;
  const float* cos_sin;
  const DecoderLayer* layers;
  const float* final_norm;
  DecoderLinear head;
  float eps;
  DType kv_dtype;
};

struct DecoderStep {
  float* hidden;  // [num_tokens, hidden]; destroyed
  int64_t num_tokens;
  const int64_t* positions;
  const int64_t* slots;
  int64_t num_sequences;
  const int32_t* query_start;
  const int32_t* context_lens;
  const int32_t* block_tables;
  int64_t max_blocks;
  void* const* keys;    // by layer
  void* const* values;
  int64_t num_blocks;
  const int64_t* rows;  // [num_rows] of the tokens whose logits are wanted
  int64_t num_rows;
  float* logits;        // [num_rows, vocabulary]
};

}  // namespace ncompass
