// Rotary position embedding of q and k, fused with writing k and v into the paged cache.
//
// For the pair (x[i], x[i + R / 2]) of a head at position p, with (c, s) = cos_sin[p, :, i]:
//
//   x1' = x1 c - x2 s,   x2' = x2 c + x1 s
//
// Channels from R on are kept. The formula is computed in floats and rounded once.
#pragma once

#include <algorithm>

#include "kv_pages.h"

namespace ncompass {

struct RotaryCall {
  int64_t num_heads;
  void* q;
  int64_t q_stride;
  const void* k;
  int64_t k_stride;
  const void* v;
  int64_t v_stride;
  const float* cos_sin;
  int64_t rotary_dim;
  const int64_t* positions;
  const int64_t* slots;
};

// out may be x itself.
template <class T, class Out>
void rotate(const T* x, const float* cos_sin, int64_t rotary_dim, int64_t head_dim, Out* out) {
  const int64_t half = rotary_dim / 2;
  for_each_vector(half, [&](int64_t i, int count) {
    const F32 x1 = load(x + i, count);
    const F32 x2 = load(x + half + i, count);
    const F32 cosine = load(cos_sin + i, count);
    const F32 sine = load(cos_sin + half + i, count);
    store(out + i, x1 * cosine - x2 * sine, count);
    store(out + half + i, x2 * cosine + x1 * sine, count);
  });
  for_each_vector(head_dim - rotary_dim, [&](int64_t i, int count) {
    store(out + rotary_dim + i, load(x + rotary_dim + i, count), count);
  });
}

// Scatters one head of one token over its column of the key panel, a pair at a time.
template <class Element>
void write_key(const Element* key, int64_t token, int64_t head_dim, Element* panel) {
  constexpr int kDepth = Pages<Element>::kDepth;
  Element* column = panel + Pages<Element>::key_offset(token, 0);
  for (int64_t channel = 0; channel < head_dim; channel += kDepth) {
    std::memcpy(column, key + channel, kDepth * sizeof(Element));
    column += kPageTokens * kDepth;
  }
}

// The query heads [first, first + count) of one token.
template <class T>
void rotate_queries(const RotaryCall& call, int64_t head_dim, int64_t token, int64_t first,
                    int64_t count) {
  const float* cos_sin = call.cos_sin + call.positions[token] * call.rotary_dim;
  T* q = static_cast<T*>(call.q) + token * call.q_stride + first * head_dim;
  for (int64_t head = 0; head < count; ++head, q += head_dim) {
    rotate(q, cos_sin, call.rotary_dim, head_dim, q);
  }
}

// One KV head of one token, if it has a slot. `scratch` holds kMaxHeadDim elements.
template <class T, class Element>
void rotate_and_write_head(const RotaryCall& call, const Pages<Element>& pages, int64_t token,
                           int64_t head, Element* scratch) {
  if (call.slots[token] < 0) return;
  const int64_t head_dim = pages.head_dim;
  const int64_t block = call.slots[token] / kPageTokens;
  const int64_t place = call.slots[token] % kPageTokens;
  const float* cos_sin = call.cos_sin + call.positions[token] * call.rotary_dim;
  const T* k = static_cast<const T*>(call.k) + token * call.k_stride + head * head_dim;
  const T* v = static_cast<const T*>(call.v) + token * call.v_stride + head * head_dim;
  rotate(k, cos_sin, call.rotary_dim, head_dim, scratch);
  write_key(scratch, place, head_dim, pages.key_panel(block, head));
  for_each_vector(head_dim, [&](int64_t i, int count) {
    store(scratch + i, load(v + i, count), count);
  });
  Element* values = pages.value_panel(block, head) + pages.value_offset(place, 0);
  for (int64_t channel = 0; channel < head_dim; ++channel) {
    values[channel * Pages<Element>::kDepth] = scratch[channel];
  }
}

template <class T, class Element>
void rotate_and_write_token(const RotaryCall& call, const Pages<Element>& pages, int64_t token,
                            Element* scratch) {
  rotate_queries<T>(call, pages.head_dim, token, 0, call.num_heads);
  for (int64_t head = 0; head < pages.num_kv_heads; ++head) {
    rotate_and_write_head<T>(call, pages, token, head, scratch);
  }
}

// Everything that would lead outside an array.
inline void check(const RotaryCall& call, int64_t num_tokens, int64_t head_dim,
                  int64_t max_positions, int64_t num_blocks) {
  require(call.rotary_dim > 0 && call.rotary_dim % 2 == 0 && call.rotary_dim <= head_dim,
          "rotary: the rotated part is odd or larger than a head");
  const int64_t num_slots = num_blocks * kPageTokens;
  for (int64_t token = 0; token < num_tokens; ++token) {
    require(call.positions[token] >= 0 && call.positions[token] < max_positions,
            "rotary: a position is beyond the table");
    require(call.slots[token] < num_slots, "rotary: a slot is beyond the cache");
  }
}

}  // namespace ncompass
