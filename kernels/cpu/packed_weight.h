// How a weight [out_features, in_features] lies in memory: as panels of kPanelWidth outputs.
//
// dot.h gives the inside of a panel; the last one is padded with zeros, and so is the summed
// dimension up to a multiple of the depth. Weights of small integers are followed by a float for
// each group and output, its scale [groups][outputs], and by as many integers: what the zero point of
// the activations adds to the sums.
#pragma once

#include "context.h"
#include "dot.h"
#include "guard.h"

namespace ncompass {

constexpr int kPanelWidth = kTileVectors * F32::kWidth;

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// The forms that a weight may have; the first two are those of DType.
enum class WeightForm : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kInt8WeightOnly = 3 };

template <class Dot>
struct PackedWeight {
  using Weight = typename Dot::Weight;

  const Weight* panels;
  int64_t out_features;
  int64_t in_features;

  int64_t padded_length() const { return round_up(in_features, Dot::kDepth); }
  int64_t num_steps() const { return padded_length() / Dot::kDepth; }
  int64_t num_panels() const { return (out_features + kPanelWidth - 1) / kPanelWidth; }
  int64_t panel_elements() const { return kPanelWidth * padded_length(); }
  int64_t num_groups() const {
    const int64_t length = Dot::kGroupLength;
    return length == 0 ? 1 : (in_features + length - 1) / length;
  }
  int64_t num_scales() const { return num_groups() * num_panels() * kPanelWidth; }
  const Weight* panel(int64_t index) const { return panels + index * panel_elements(); }
  const float* scales() const {
    const int64_t bytes = round_up(num_panels() * panel_elements() * sizeof(Weight), 64);
    return reinterpret_cast<const float*>(reinterpret_cast<const char*>(panels) + bytes);
  }
  const int32_t* offsets() const {
    return reinterpret_cast<const int32_t*>(scales() + num_scales());
  }
  int64_t bytes() const {
    const int64_t elements = num_panels() * panel_elements() * static_cast<int64_t>(sizeof(Weight));
    return Dot::kHasColumnScales ? round_up(elements, 64) + num_scales() * 8 : elements;
  }
};

// Calls body(Dot{}) with the way in which weights of this form are multiplied here.
template <class Body>
void with_dot(const Context& context, WeightForm form, const Body& body) {
  switch (form) {
    case WeightForm::kFloat32:
      return body(FloatDot{});
    case WeightForm::kInt8:
      return body(Int8Dot{});
    case WeightForm::kInt8WeightOnly:
      return body(WidenedInt8Dot{});
    case WeightForm::kBfloat16:
#if NCOMPASS_HAS_BF16_DOT
      if (context.use_native_bf16_dot) return body(NativeBf16Dot{});
#endif
      (void)context;
      return body(WidenedBf16Dot{});
  }
  require(false, "linear: an unknown form of weights");
}

}  // namespace ncompass
