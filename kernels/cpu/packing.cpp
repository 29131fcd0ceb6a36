// Small integers for weights: each row in 8 bits with a scale (activations.h), and all of them in
// panels (packed_weight.h), from which rows that are floats can be read again.
#include "activations.h"
#include "api.h"
#include "guard.h"

namespace ncompass {
namespace {

template <class X>
void quantise(Context& context, int64_t num_rows, int64_t length, int64_t group_length, const X* x,
              int64_t stride, int8_t* out, float* scales) {
  const int64_t num_scales = num_groups(length, group_length);
  for_each_row_group(context, num_rows, length, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      quantise_row(x + row * stride, length, group_length, scales + row * num_scales,
                   [&](int64_t i, F32 values, int count) {
                     store(out + row * length + i, values, count);
                   });
    }
  });
}

// The scales and the offsets of one output; `row` is null beyond the last.
template <class Dot>
void write_scales(const PackedWeight<Dot>& weight, int64_t output, const int8_t* row,
                  const float* scales, float* column_scales, int32_t* offsets) {
  const int64_t length = Dot::kGroupLength == 0 ? weight.in_features : Dot::kGroupLength;
  for (int64_t group = 0; group < weight.num_groups(); ++group) {
    const int64_t place = group * weight.num_panels() * kPanelWidth + output;
    const int64_t end = std::min((group + 1) * length, weight.in_features);
    int32_t sum = 0;
    for (int64_t k = group * length; row != nullptr && k < end; ++k) sum += row[k];
    column_scales[place] = row == nullptr ? 0.0f : scales[output * weight.num_groups() + group];
    offsets[place] = -kInt8ZeroPoint * sum;
  }
}

// Panels of a weight whose elements are Source: as they are, in the order of dot.h.
template <class Dot>
void pack(Context& context, const PackedWeight<Dot>& weight, const typename Dot::Weight* source,
          int64_t stride, const float* scales) {
  using Weight = typename Dot::Weight;
  constexpr int kDepth = Dot::kDepth;
  [[maybe_unused]] auto* column_scales = const_cast<float*>(weight.scales());
  [[maybe_unused]] auto* offsets = const_cast<int32_t*>(weight.offsets());
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
          write_scales(weight, first + column, row, scales, column_scales, offsets);
        }
      }
    });
  });
}

// Rows of a packed weight as floats. Neighbours of a row lie a panel's width apart, at a stride that
// the processor's prefetcher follows.
template <class Dot>
void unpack_rows(Context& context, const PackedWeight<Dot>& weight, int64_t num_rows,
                 const int64_t* outputs, float* out) {
  constexpr int kDepth = Dot::kDepth;
  const int64_t length = weight.in_features;
  for_each_row_group(context, num_rows, length, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const int64_t output = outputs[row];
      const auto* member =
          weight.panel(output / kPanelWidth) + output % kPanelWidth * kDepth;
      for (int64_t k = 0; k < length; ++k) {
        out[row * length + k] = to_float(member[k / kDepth * kPanelWidth * kDepth + k % kDepth]);
      }
    }
  });
}

}  // namespace
}  // namespace ncompass

using namespace ncompass;

int64_t ncompass_group_length(WeightForm form) {
  return form == WeightForm::kInt8 ? Int8Dot::kGroupLength : 0;
}

const char* ncompass_quantise(Context* context, int64_t num_rows, int64_t length,
                              int64_t group_length, const void* x, int64_t stride, DType dtype, int8_t* out, float* scales) {
  return guarded([&] {
    require(num_rows >= 0 && length > 0 && group_length > 0, "quantise: empty rows or groups");
    const Session session(context->team);
    with_dtype(dtype, [&](auto element) {
      quantise(*context, num_rows, length, group_length, static_cast<const decltype(element)*>(x), stride, out,
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

const char* ncompass_unpack_rows(Context* context, int64_t out_features, int64_t in_features,
                                 const void* packed, WeightForm form, int64_t num_rows,
                                 const int64_t* outputs, float* out) {
  return guarded([&] {
    require(out_features > 0 && in_features > 0, "unpack: an empty weight");
    for (int64_t row = 0; row < num_rows; ++row) {
      require(outputs[row] >= 0 && outputs[row] < out_features, "unpack: a row is beyond the weight");
    }
    const Session session(context->team);
    with_dot(*context, form, [&](auto dot) {
      using Dot = decltype(dot);
      using Weight = typename Dot::Weight;
      if constexpr (Dot::kHasColumnScales) {
        require(false, "unpack: integers have lost what they were");
      } else {
        const PackedWeight<Dot> weight{static_cast<const Weight*>(packed), out_features,
                                       in_features};
        unpack_rows(*context, weight, num_rows, outputs, out);
      }
    });
  });
}
