// How keys and values lie in a page: as the packed panels that dot.h multiplies.
//
// A page holds kPageTokens tokens of every KV head of one layer. For one head
//
//   keys:   [head_dim / depth][kPageTokens][depth]   columns are tokens, summed over channels
//   values: [kPageTokens / depth][head_dim][depth]   columns are channels, summed over tokens
//
// with depth 2 for bf16 and 1 for float. Both attention products then stream through a page in
// order. `page_layout.py` reads and writes the same layout from Python.
#pragma once

#include "api.h"
#include "guard.h"

namespace ncompass {

constexpr int kPageTokens = 64;
constexpr int kMaxHeadDim = 512;

// Element is float or bf16, or const for readers.
template <class Element>
struct Pages {
  static constexpr int kDepth = static_cast<int>(sizeof(float) / sizeof(Element));

  Element* keys;
  Element* values;
  int64_t num_kv_heads;
  int64_t head_dim;

  int64_t panel(int64_t block, int64_t head) const {
    return (block * num_kv_heads + head) * kPageTokens * head_dim;
  }
  Element* key_panel(int64_t block, int64_t head) const { return keys + panel(block, head); }
  Element* value_panel(int64_t block, int64_t head) const { return values + panel(block, head); }

  // Element of one channel of one token inside a panel; head_dim is a multiple of the depth.
  static int64_t key_offset(int64_t token, int64_t channel) {
    return (channel / kDepth * kPageTokens + token) * kDepth + channel % kDepth;
  }
  int64_t value_offset(int64_t token, int64_t channel) const {
    return (token / kDepth * head_dim + channel) * kDepth + token % kDepth;
  }
};

inline void check_pages(int64_t num_blocks, int64_t num_kv_heads, int64_t head_dim) {
  require(num_blocks > 0 && num_kv_heads > 0, "kv cache: no pages");
  require(head_dim > 0 && head_dim % 16 == 0 && head_dim <= kMaxHeadDim,
          "kv cache: the head dimension is not a multiple of 16 up to 512");
}

}  // namespace ncompass
