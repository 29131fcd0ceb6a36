// The operation on one layer; rotary.h tells how.
#include "rotary.h"

using namespace ncompass;

const char* ncompass_rotary_and_write_kv(
    Context* context, void* keys, void* values, int64_t num_blocks, int64_t num_kv_heads,
    int64_t head_dim, DType kv_dtype, int64_t num_tokens, int64_t num_heads, void* q,
    int64_t q_stride, const void* k, int64_t k_stride, const void* v, int64_t v_stride,
    DType dtype, const float* cos_sin, int64_t max_positions, int64_t rotary_dim,
    const int64_t* positions, const int64_t* slots) {
  return guarded([&] {
    check_pages(num_blocks, num_kv_heads, head_dim);
    const RotaryCall call{num_heads, q,       q_stride,   k,         k_stride, v,
                          v_stride,  cos_sin, rotary_dim, positions, slots};
    check(call, num_tokens, head_dim, max_positions, num_blocks);
    const Session session(context->team);
    with_dtype(dtype, [&](auto element) {
      with_dtype(kv_dtype, [&](auto page_element) {
        using Element = decltype(page_element);
        const Pages<Element> pages{static_cast<Element*>(keys), static_cast<Element*>(values),
                                   num_kv_heads, head_dim};
        const int64_t per_token = (num_heads + 4 * num_kv_heads) * head_dim;
        for_each_row_group(*context, num_tokens, per_token, [&](int64_t first, int64_t last) {
          alignas(64) Element scratch[kMaxHeadDim];
          for (int64_t token = first; token < last; ++token) {
            rotate_and_write_token<decltype(element)>(call, pages, token, scratch);
          }
        });
      });
    });
  });
}
