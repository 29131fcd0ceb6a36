// The operation on one layer; paged_attention.h tells how.
#include "paged_attention.h"

using namespace ncompass;

const char* ncompass_paged_attention(
    Context* context, const void* keys, const void* values, int64_t num_blocks,
    int64_t num_kv_heads, int64_t head_dim, DType kv_dtype, int64_t num_tokens, int64_t num_heads,
    const void* q, int64_t q_stride, DType dtype, void* out, int64_t num_sequences,
    const int32_t* query_start, const int32_t* context_lens, const int32_t* block_tables,
    int64_t max_blocks, float scale, int64_t window, float softcap) {
  return guarded([&] {
    check_pages(num_blocks, num_kv_heads, head_dim);
    if (num_sequences == 0) return;
    const AttentionCall call{num_heads,    q,            q_stride,     out,
                             num_heads * head_dim, num_sequences, query_start, context_lens, block_tables,
                             max_blocks,   scale,        window,       softcap};
    check(call, num_blocks, num_kv_heads, num_tokens);
    const Session session(context->team);
    const AttentionPlan plan(call, num_kv_heads, head_dim, context->team.size());
    with_dtype(dtype, [&](auto element) {
      using T = decltype(element);
      const auto run = [&](auto dot) {
        using Dot = decltype(dot);
        using Element = const typename Dot::Weight;
        const Pages<Element> pages{static_cast<Element*>(keys), static_cast<Element*>(values),
                                   num_kv_heads, head_dim};
        const Attention<Dot> attention(call, pages);
        const int64_t bytes = TileScratch<Dot>::bytes(plan.max_rows, head_dim);
        for (Scratch& memory : context->private_scratch) memory.reserve<char>(bytes);
        auto* shared = context->shared_scratch.reserve<float>(plan.shared_bytes() / sizeof(float));
        context->team.run([&](Worker& worker) {
          char* own = context->private_scratch[worker.thread].reserve<char>(bytes);
          attend<Dot, T>(worker, attention, plan, own, shared, [](const Tile&) {});
        });
      };
      if (kv_dtype == DType::kFloat32) return run(FloatDot{});
#if NCOMPASS_HAS_BF16_DOT
      if (context->use_native_bf16_dot) return run(NativeBf16Dot{});
#endif
      run(WidenedBf16Dot{});
    });
  });
}
