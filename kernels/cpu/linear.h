// What a product with a packed weight needs around packed_gemm.h: its rows, its memory, its results.
#pragma once

#include "packed_gemm.h"
#include "row_operations.h"

namespace ncompass {

// Whether x can be multiplied where it lies.
template <class Dot, class X>
bool is_usable(const PackedWeight<Dot>& weight) {
  return std::is_same_v<X, typename Dot::Activation> && !Dot::kHasRowScales &&
         weight.padded_length() == weight.in_features;
}

// x in the form that Dot multiplies; `memory` is that of LinearScratch::rows.
template <class Dot, class X>
Rows<Dot> rows_of(Worker& worker, const X* x, int64_t x_stride, int64_t num_rows,
                  const PackedWeight<Dot>& weight, char* memory) {
  using Activation = typename Dot::Activation;
  if (is_usable<Dot, X>(weight)) return {reinterpret_cast<const Activation*>(x), x_stride, nullptr};
  return make_rows<Dot>(worker, num_rows, weight.padded_length(), memory,
                        [&](int64_t row, Activation* out, float* scale) {
                          convert_row<Dot>(x + row * x_stride, weight.in_features,
                                           weight.padded_length(), out, scale);
                        });
}

template <class Dot>
int64_t num_sums(int64_t num_rows, const PackedWeight<Dot>& weight) {
  return RowTiling::of(num_rows, weight).block_rows * kPanelWidth;
}

template <class Dot>
int64_t rows_bytes(int64_t num_rows, const PackedWeight<Dot>& weight) {
  return ConvertedRows::bytes<Dot>(num_rows, weight.padded_length());
}

// The memory of a product: sums for each thread; converted rows for each thread, or for all.
class LinearScratch {
 public:
  LinearScratch(Context& context, int64_t num_sums, int64_t rows_bytes, int64_t num_rows)
      : is_shared_(num_rows > kPrivateRows) {
    const int64_t sums_bytes = round_up(num_sums * static_cast<int64_t>(sizeof(float)), 64);
    if (is_shared_) shared_ = context.shared_scratch.reserve<char>(rows_bytes);
    for (Scratch& memory : context.private_scratch) {
      char* own = memory.reserve<char>(sums_bytes + (is_shared_ ? 0 : rows_bytes));
      sums_.push_back(reinterpret_cast<float*>(own));
      rows_.push_back(own + sums_bytes);
    }
  }
  float* sums(int thread) const { return sums_[thread]; }
  char* rows(int thread) const { return is_shared_ ? shared_ : rows_[thread]; }

 private:
  const bool is_shared_;
  char* shared_ = nullptr;
  std::vector<float*> sums_;
  std::vector<char*> rows_;
};

// Where the results of a linear layer go: out = sums + bias + residual.
template <class Out>
struct Results {
  const float* bias;
  const Out* residual;
  int64_t residual_stride;
  Out* out;
  int64_t out_stride;
  int64_t out_features;

  // Writes one panel's sums, which may end beyond the last output.
  void write(int64_t first_row, int64_t num_rows, int64_t panel, const float* sums) const {
    const int64_t first_output = panel * kPanelWidth;
    const int64_t width = std::min<int64_t>(kPanelWidth, out_features - first_output);
    for (int64_t row = first_row; row < first_row + num_rows; ++row, sums += kPanelWidth) {
      Out* results = out + row * out_stride + first_output;
      const Out* addends =
          residual == nullptr ? nullptr : residual + row * residual_stride + first_output;
      for_each_vector(width, [&](int64_t i, int count) {
        F32 sum = load(sums + i);
        if (bias != nullptr) sum = sum + load(bias + first_output + i, count);
        if (addends != nullptr) sum = sum + load(addends + i, count);
        store(results + i, sum, count);
      });
    }
  }
};

// out = silu(gate sums + gate bias) * (up sums + up bias)
template <class Out>
struct GatedResults {
  const float* gate_bias;
  const float* up_bias;
  Out* out;
  int64_t out_stride;
  int64_t out_features;

  void write(int64_t first_row, int64_t num_rows, int64_t panel, const float* gates,
             const float* ups) const {
    const int64_t first_output = panel * kPanelWidth;
    const int64_t width = std::min<int64_t>(kPanelWidth, out_features - first_output);
    for (int64_t row = 0; row < num_rows; ++row) {
      Out* results = out + (first_row + row) * out_stride + first_output;
      for_each_vector(width, [&](int64_t i, int count) {
        F32 gate = load(gates + row * kPanelWidth + i), up = load(ups + row * kPanelWidth + i);
        if (gate_bias != nullptr) gate = gate + load(gate_bias + first_output + i, count);
        if (up_bias != nullptr) up = up + load(up_bias + first_output + i, count);
        store(results + i, silu(gate) * up, count);
      });
    }
  }
};

}  // namespace ncompass
