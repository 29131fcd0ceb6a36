// The operations that touch each element once: RMSNorm and SwiGLU's gated activation.
#include "api.h"
#include "guard.h"
#include "row_operations.h"

using namespace ncompass;

const char* ncompass_rms_norm(Context* context, int64_t num_rows, int64_t hidden, const void* x,
                              int64_t x_stride, DType x_dtype, const void* addend,
                              int64_t addend_stride, DType addend_dtype, void* sum,
                              const void* weight, DType dtype, float eps, void* out) {
  return guarded([&] {
    const Session session(context->team);
    with_dtype(x_dtype, [&](auto x_element) {
      with_dtype(addend_dtype, [&](auto addend_element) {
        with_dtype(dtype, [&](auto element) {
          using X = decltype(x_element);
          using Addend = decltype(addend_element);
          using Out = decltype(element);
          for_each_row_group(*context, num_rows, hidden, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; ++row) {
              const X* input = static_cast<const X*>(x) + row * x_stride;
              if (addend != nullptr) {
                X* added = static_cast<X*>(sum) + row * hidden;
                add_row(input, static_cast<const Addend*>(addend) + row * addend_stride, hidden,
                        added);
                input = added;
              }
              normalize_row(input, static_cast<const Out*>(weight), hidden, eps,
                            static_cast<Out*>(out) + row * hidden);
            }
          });
        });
      });
    });
  });
}

const char* ncompass_silu_and_mul(Context* context, int64_t num_rows, int64_t intermediate,
                                  const void* gate_up, int64_t stride, DType dtype, void* out) {
  return guarded([&] {
    const Session session(context->team);
    with_dtype(dtype, [&](auto element) {
      using T = decltype(element);
      for_each_row_group(*context, num_rows, 4 * intermediate, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
          const T* gate = static_cast<const T*>(gate_up) + row * stride;
          silu_and_mul_row(gate, gate + intermediate, intermediate,
                           static_cast<T*>(out) + row * intermediate);
        }
      });
    });
  });
}
