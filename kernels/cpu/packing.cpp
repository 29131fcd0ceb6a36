// Small integers for weights: each row in 8 bits with a scale (activations.h), and all of them in
// panels (packed_weight.h).
#include "activations.h"
#include "api.h"
#include "guard.h"

namespace ncompass {
namespace {

template <class X>
void quantise(Context& context, int64_t num_rows, int64_t length, const X* x, int64_t stride,
              int8_t* out, float* scales) {
  for_each_row_group(context, num_rows, length, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      scales[row] = quantise_row(x + row * stride, length, [&](int64_t i, F32 value, int count) {
        store(out + row * length + i, value, count);
      });
    }
  });
}

// Panels of a weight whose elements are Source: as they are, in the order of dot.h.
template <class Dot>
void pack(Context& context, const PackedWeight<Dot>& weight, const typename Dot::Weight* source,
          int64_t stride, const float* scales) {
  using Weight = typename Dot::Weight;
  constexpr int kDepth = Dot::kDepth;
  auto* column_scales = const_cast<float*>(weight.scales());
  auto* offsets = const_cast<int32_t*>(weight.offsets());
  context.team.run([&](Worker& worker) {
    worker.take(weight.num_panels(), [&](int64_t panel, int64_t) {
      auto* out = const_cast<Weight*>(weight.panel(panel));
      std::memset(out, 0, weight.panel_elements() * sizeof(Weight));
      const int64_t first = panel * kPanelWidth;
      for (int64_t column = 0; column < kPanelWidth; ++column) {
        const bool is_there = first + column < weight.out_features;
        const Weight* row = is_there ? source + (first + column) * stride : nullptr;
        for (int64_t k = 0; is_there && k < weight.in_features; ++k) {
          out[(k / kDepth * kPanelWidth + column) * kDepth + k % kDepth] = row[k];
        }
        if constexpr (Dot::kHasColumnScales) {
          int32_t sum = 0;
          for (int64_t k = 0; is_there && k < weight.in_features; ++k) sum += row[k];
          column_scales[first + column] = is_there ? scales[first + column] : 0.0f;
          offsets[first + column] = -kInt8ZeroPoint * sum;
        }
      }
    });
  });
}

}  // namespace
}  // namespace ncompass

using namespace ncompass;

const char* ncompass_quantise(Context* context, int64_t num_rows, int64_t length, const void* x,
                              int64_t stride, DType dtype, int8_t* out, float* scales) {
  return guarded([&] {
    require(num_rows >= 0 && length > 0, "quantise: empty rows");
    const Session session(context->team);
    with_dtype(dtype, [&](auto element) {
      quantise(*context, num_rows, length, static_cast<const decltype(element)*>(x), stride, out,
               scales);
    });
  });
}

int64_t ncompass_packed_bytes(Context* context, int64_t out_features, int64_t in_features,
                              WeightForm form) {
  int64_t bytes = 0;
  guarded([&] {
    with_dot(*context, form, [&](auto dot) {
      bytes = PackedWeight<decltype(dot)>{nullptr, out_features, in_features}.bytes();
    });
  });
  return bytes;
}

const char* ncompass_pack(Context* context, int64_t out_features, int64_t in_features,
                          const void* weight, int64_t stride, const float* scales,
                          WeightForm form, void* packed) {
  return guarded([&] {
    require(out_features > 0 && in_features > 0, "pack: an empty weight");
    const Session session(context->team);
    with_dot(*context, form, [&](auto dot) {
      using Dot = decltype(dot);
      using Weight = typename Dot::Weight;
      require(!Dot::kHasColumnScales || scales != nullptr, "pack: integers need their scales");
      const PackedWeight<Dot> form_of{static_cast<Weight*>(packed), out_features, in_features};
      pack(*context, form_of, static_cast<const Weight*>(weight), stride, scales);
    });
  });
}
