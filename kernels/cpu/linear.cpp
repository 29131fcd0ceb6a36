// y = x W^T (+ bias) (+ residual) on packed weights; packed_gemm.h tells how.
#include "linear.h"

#include "api.h"
#include "guard.h"

namespace ncompass {
namespace {

struct LinearCall {
  int64_t num_rows;
  int64_t out_features;
  int64_t in_features;
  const void* x;
  int64_t x_stride;
  const void* packed;
  const float* bias;
  const void* residual;
  int64_t residual_stride;
  void* out;
};

template <class Dot, class X, class Out>
void multiply(Context& context, const LinearCall& call) {
  const PackedWeight<Dot> weight{static_cast<const typename Dot::Weight*>(call.packed),
                                 call.out_features, call.in_features};
  const auto* x = static_cast<const X*>(call.x);
  const Results<Out> results{call.bias, static_cast<const Out*>(call.residual),
                             call.residual_stride, static_cast<Out*>(call.out), call.out_features,
                             call.out_features};
  const LinearScratch scratch(context, num_sums(call.num_rows, weight),
                              rows_bytes(call.num_rows, weight), call.num_rows);
  context.team.run([&](Worker& worker) {
    const Rows<Dot> rows =
        rows_of<Dot>(worker, x, call.x_stride, call.num_rows, weight, scratch.rows(worker.thread));
    multiply_panels(worker, rows, call.num_rows, weight, nullptr, scratch.sums(worker.thread),
                    [&](int64_t first_row, int64_t num_rows, int64_t panel, const float* sums) {
                      results.write(first_row, num_rows, panel, sums);
                    });
  });
}

template <class Dot, class X, class Out>
void multiply_gated(Context& context, const LinearCall& call, const void* packed_up,
                    const float* up_bias) {
  using Weight = typename Dot::Weight;
  const PackedWeight<Dot> gate{static_cast<const Weight*>(call.packed), call.out_features,
                               call.in_features};
  const PackedWeight<Dot> up{static_cast<const Weight*>(packed_up), call.out_features,
                             call.in_features};
  const auto* x = static_cast<const X*>(call.x);
  const GatedResults<Out> results{call.bias, up_bias, static_cast<Out*>(call.out),
                                  call.out_features, call.out_features};
  const LinearScratch scratch(context, 2 * num_sums(call.num_rows, gate),
                              rows_bytes(call.num_rows, gate), call.num_rows);
  context.team.run([&](Worker& worker) {
    const Rows<Dot> rows =
        rows_of<Dot>(worker, x, call.x_stride, call.num_rows, gate, scratch.rows(worker.thread));
    multiply_panel_pairs(worker, rows, call.num_rows, gate, up, nullptr,
                         scratch.sums(worker.thread),
                         [&](int64_t first_row, int64_t num_rows, int64_t panel,
                             const float* gates, const float* ups) {
                           results.write(first_row, num_rows, panel, gates, ups);
                         });
  });
}

// Every combination of the dtypes of a call.
template <class Body>
void with_types(const Context& context, DType x_dtype, WeightForm form, DType out_dtype,
                const Body& body) {
  with_dtype(x_dtype, [&](auto x) {
    with_dtype(out_dtype, [&](auto out) {
      with_dot(context, form, [&](auto dot) { body(dot, x, out); });
    });
  });
}

}  // namespace
}  // namespace ncompass

using namespace ncompass;

const char* ncompass_linear(Context* context, int64_t num_rows, int64_t out_features,
                            int64_t in_features, const void* x, int64_t x_stride, DType x_dtype,
                            const void* packed, WeightForm form, const float* bias,
                            const void* residual, int64_t residual_stride, void* out,
                            DType out_dtype) {
  return guarded([&] {
    require(num_rows >= 0 && out_features > 0 && in_features > 0, "linear: an empty shape");
    if (num_rows == 0) return;
    const LinearCall call{num_rows, out_features, in_features,     x,  x_stride,
                          packed,   bias,         residual, residual_stride, out};
    const Session session(context->team);
    with_types(*context, x_dtype, form, out_dtype, [&](auto dot, auto x_element, auto out_element) {
      multiply<decltype(dot), decltype(x_element), decltype(out_element)>(*context, call);
    });
  });
}

const char* ncompass_gated_linear(Context* context, int64_t num_rows, int64_t out_features,
                                  int64_t in_features, const void* x, int64_t x_stride,
                                  DType x_dtype, const void* gate, const float* gate_bias,
                                  const void* up, const float* up_bias, WeightForm form, void* out,
                                  DType out_dtype) {
  return guarded([&] {
    require(num_rows >= 0 && out_features > 0 && in_features > 0, "gated linear: an empty shape");
    if (num_rows == 0) return;
    const LinearCall call{num_rows, out_features, in_features, x,  x_stride,
                          gate,     gate_bias,    nullptr,     0, out};
    const Session session(context->team);
    with_types(*context, x_dtype, form, out_dtype, [&](auto dot, auto x_element, auto out_element) {
      using Dot = decltype(dot);
      multiply_gated<Dot, decltype(x_element), decltype(out_element)>(*context, call, up, up_bias);
    });
  });
}
