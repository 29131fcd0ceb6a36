// y = x W^T (+ bias) (+ residual) on packed weights; packed_gemm.h tells how.
#include "api.h"
#include "guard.h"
#include "packed_gemm.h"

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

// Writes one panel's sums, which may end beyond the last output.
template <class Out>
void write_panel(const LinearCall& call, int64_t first_row, int64_t num_rows, int64_t first_output,
                 const float* sums) {
  const int64_t width = std::min<int64_t>(kPanelWidth, call.out_features - first_output);
  for (int64_t r = 0; r < num_rows; ++r, sums += kPanelWidth) {
    const int64_t row = first_row + r;
    Out* out = static_cast<Out*>(call.out) + row * call.out_features + first_output;
    const Out* residual = static_cast<const Out*>(call.residual);
    if (residual != nullptr) residual += row * call.residual_stride + first_output;
    for_each_vector(width, [&](int64_t i, int count) {
      F32 sum = load(sums + i);
      if (call.bias != nullptr) sum = sum + load(call.bias + first_output + i, count);
      if (residual != nullptr) sum = sum + load(residual + i, count);
      store(out + i, sum, count);
    });
  }
}

template <class X, class Activation>
void convert_row(const X* x, int64_t length, int64_t padded_length, Activation* out) {
  for_each_vector(length, [&](int64_t i, int count) { store(out + i, load(x + i, count), count); });
  for (int64_t i = length; i < padded_length; ++i) out[i] = from_float<Activation>(0.0f);
}

template <class Dot, class X, class Out>
void multiply(Context& context, const LinearCall& call) {
  using Activation = typename Dot::Activation;
  using Weight = typename Dot::Weight;
  const int num_threads = context.team.size();
  const int64_t padded_length = round_up(call.in_features, Dot::kDepth);
  const int64_t num_steps = padded_length / Dot::kDepth;
  const auto* x = static_cast<const X*>(call.x);
  const auto* packed = static_cast<const Weight*>(call.packed);

  // 1. Activations are used where they lie if they have the right form already. Otherwise they are
  //    converted: a few rows by every thread for itself, many by all threads together.
  const bool is_usable = std::is_same_v<X, Activation> && padded_length == call.in_features;
  const bool is_shared = call.num_rows > kTileRows;
  const int64_t line = 64 / static_cast<int64_t>(sizeof(Activation));
  // An odd number of cache lines a row: rows of a tile never meet in one set of the cache.
  const int64_t converted_stride = round_up(padded_length, line) | line;
  const RowTiling tiling(call.num_rows, padded_length * sizeof(Activation));
  const int64_t num_sums = tiling.block_rows * kPanelWidth;
  Activation* shared_rows = nullptr;
  if (!is_usable && is_shared) {
    shared_rows = context.shared_scratch.reserve<Activation>(call.num_rows * converted_stride);
  }
  std::vector<float*> scratch(num_threads);
  for (int thread = 0; thread < num_threads; ++thread) {
    const int64_t num_private = is_shared ? 0 : call.num_rows * converted_stride;
    scratch[thread] = context.private_scratch[thread].reserve<float>(num_sums + num_private);
  }
  const auto convert = [&](int64_t row, Activation* out) {
    convert_row(x + row * call.x_stride, call.in_features, padded_length,
                out + row * converted_stride);
  };
  constexpr int64_t kRowsPerConversion = 8;
  TaskList conversions((call.num_rows + kRowsPerConversion - 1) / kRowsPerConversion, num_threads);

  // 2. One task a panel and block of rows, blocks outermost: a block's rows stay in the cache.
  const int64_t num_panels = (call.out_features + kPanelWidth - 1) / kPanelWidth;
  const int64_t panel_size = panel_elements<Weight>(call.in_features);
  TaskList products(num_panels * tiling.num_blocks(), num_threads);
  context.team.run([&](int thread) {
    float* sums = scratch[thread];
    const Activation* rows = shared_rows;
    int64_t stride = converted_stride;
    if (is_usable) {
      rows = reinterpret_cast<const Activation*>(x);
      stride = call.x_stride;
    } else if (is_shared) {
      conversions.take(thread, [&](int64_t task, int64_t) {
        const int64_t end = std::min((task + 1) * kRowsPerConversion, call.num_rows);
        for (int64_t row = task * kRowsPerConversion; row < end; ++row) convert(row, shared_rows);
      });
      context.team.barrier();
    } else {
      auto* own = reinterpret_cast<Activation*>(sums + num_sums);
      for (int64_t row = 0; row < call.num_rows; ++row) convert(row, own);
      rows = own;
    }
    products.take(thread, [&](int64_t task, int64_t next) {
      const int64_t panel = task % num_panels;
      const int64_t first_row = task / num_panels * tiling.block_rows;
      const int64_t num_rows = std::min(tiling.block_rows, call.num_rows - first_row);
      multiply_block<Dot>(rows + first_row * stride, stride, num_rows, tiling.tile_rows,
                          packed + panel * panel_size, num_steps,
                          next < 0 ? nullptr : packed + next % num_panels * panel_size, sums);
      write_panel<Out>(call, first_row, num_rows, panel * kPanelWidth, sums);
    });
  });
}

template <class Weight>
void pack(Context& context, int64_t out_features, int64_t in_features, const Weight* weight,
          int64_t stride, Weight* packed) {
  constexpr int kDepth = kDepthOf<Weight>;
  const int64_t num_panels = (out_features + kPanelWidth - 1) / kPanelWidth;
  TaskList panels(num_panels, context.team.size());
  context.team.run([&](int thread) {
    panels.take(thread, [&](int64_t panel, int64_t) {
      Weight* out = packed + panel * panel_elements<Weight>(in_features);
      std::memset(out, 0, panel_elements<Weight>(in_features) * sizeof(Weight));
      const int64_t width = std::min<int64_t>(kPanelWidth, out_features - panel * kPanelWidth);
      for (int64_t column = 0; column < width; ++column) {
        const Weight* row = weight + (panel * kPanelWidth + column) * stride;
        for (int64_t k = 0; k < in_features; ++k) {
          out[(k / kDepth * kPanelWidth + column) * kDepth + k % kDepth] = row[k];
        }
      }
    });
  });
}

}  // namespace
}  // namespace ncompass

using namespace ncompass;

int64_t ncompass_packed_bytes(int64_t out_features, int64_t in_features, DType dtype) {
  int64_t bytes = 0;
  with_dtype(dtype, [&](auto element) {
    using Weight = decltype(element);
    const int64_t num_panels = (out_features + kPanelWidth - 1) / kPanelWidth;
    bytes = num_panels * panel_elements<Weight>(in_features) * sizeof(Weight);
  });
  return bytes;
}

const char* ncompass_pack(Context* context, int64_t out_features, int64_t in_features,
                          const void* weight, int64_t stride, DType dtype, void* packed) {
  return guarded([&] {
    const Session session(context->team);
    with_dtype(dtype, [&](auto element) {
      using Weight = decltype(element);
      pack(*context, out_features, in_features, static_cast<const Weight*>(weight), stride,
           static_cast<Weight*>(packed));
    });
  });
}

const char* ncompass_linear(Context* context, int64_t num_rows, int64_t out_features,
                            int64_t in_features, const void* x, int64_t x_stride, DType x_dtype,
                            const void* packed, DType weight_dtype, const float* bias,
                            const void* residual, int64_t residual_stride, void* out,
                            DType out_dtype) {
  return guarded([&] {
    require(num_rows >= 0 && out_features > 0 && in_features > 0, "linear: an empty shape");
    if (num_rows == 0) return;
    const LinearCall call{num_rows, out_features, in_features,     x,  x_stride,
                          packed,   bias,         residual, residual_stride, out};
    const Session session(context->team);
    with_dtype(x_dtype, [&](auto x_element) {
      with_dtype(out_dtype, [&](auto out_element) {
        using X = decltype(x_element);
        using Out = decltype(out_element);
        if (weight_dtype == DType::kFloat32) return multiply<FloatDot, X, Out>(*context, call);
#if NCOMPASS_HAS_BF16_DOT
        if (context->use_native_bf16_dot) return multiply<NativeBf16Dot, X, Out>(*context, call);
#endif
        multiply<WidenedBf16Dot, X, Out>(*context, call);
      });
    });
  });
}
