// Making and ending a context, and what this build was compiled for.
#include "api.h"
#include "guard.h"

using namespace ncompass;

int32_t ncompass_vector_width() { return F32::kWidth; }

int32_t ncompass_has_native_bf16_dot() {
#if NCOMPASS_HAS_BF16_DOT
  return 1;
#else
  return 0;
#endif
}

Context* ncompass_create(int32_t num_threads, int32_t use_native_bf16_dot) {
  Context* context = nullptr;
  guarded([&] {
    require(num_threads > 0, "a team needs at least one thread");
    context = new Context(num_threads, use_native_bf16_dot != 0);
  });
  return context;
}

void ncompass_destroy(Context* context) { delete context; }
