// From logits to token ids, as kernels/sampling.py defines it: argmax, or a draw from
// w_i = exp((l_i - max l) / T) cut by top-k, top-p and min-p. One row is one task.
//
// The cut needs the largest weights only, so it looks among those within a factor of 2^-10 of the
// largest first, and lowers that bar where they do not suffice: some hundred of 49152 as a rule.
// Sums are doubles in the order of the row; a row's token does not depend on the batch.
#include <algorithm>
#include <functional>
#include <limits>

#include "api.h"
#include "guard.h"

namespace ncompass {
namespace {

constexpr int64_t kNoToken = -1;   // the row has no finite largest logit
constexpr int64_t kBlock = 1024;   // elements whose maximum or sum is kept
constexpr int kSumLanes = 8;       // of doubles
constexpr float kBars[] = {0x1p-10f, 0x1p-20f, 0x1p-40f, 0.0f};

struct SamplingCall {
  int64_t vocabulary;
  const void* logits;
  int64_t stride;
  const float* temperature;  // null: every row is greedy
  const int64_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seeds;
  const int64_t* positions;
  int64_t* tokens;
};

struct Largest {
  float value;
  int64_t index;  // the first of equals; kNoToken if the largest is not finite
};

// The memory of one thread: [vocabulary] weights, [vocabulary] candidates, a sum for each block.
struct RowScratch {
  float* weights;
  float* candidates;
  double* sums;

  static int64_t bytes(int64_t vocabulary) {
    const int64_t num_blocks = (vocabulary + kBlock - 1) / kBlock;
    return num_blocks * (2 * kBlock * sizeof(float) + sizeof(double));
  }
  static RowScratch at(char* memory, int64_t vocabulary) {
    const int64_t padded = (vocabulary + kBlock - 1) / kBlock * kBlock;
    float* weights = reinterpret_cast<float*>(memory);
    return {weights, weights + padded, reinterpret_cast<double*>(weights + 2 * padded)};
  }
};

uint64_t mix64(uint64_t x) {  // the finaliser of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// In [0, 1), with 24 random bits: a function of the seed and the position alone.
float uniform(int64_t seed, int64_t position) {
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;
  const uint64_t state = mix64(static_cast<uint64_t>(seed) + kGolden) +
                         static_cast<uint64_t>(position) * kGolden;
  return static_cast<float>(mix64(state) >> 40) * 0x1p-24f;
}

template <class T>
Largest find_largest(const T* logits, int64_t vocabulary) {
  Largest largest{-std::numeric_limits<float>::infinity(), kNoToken};
  int64_t best_block = 0;
  for (int64_t first = 0; first < vocabulary; first += kBlock) {
    F32 most = broadcast(-std::numeric_limits<float>::infinity());
    bool has_nan = false;
    for_each_vector(std::min(kBlock, vocabulary - first), [&](int64_t i, int count) {
      const F32 x = keep_first(load(logits + first + i, count), count, most);
      has_nan |= any_nan(x);
      most = max(x, most);
    });
    if (has_nan) return {std::numeric_limits<float>::quiet_NaN(), kNoToken};
    const float value = reduce_max(most);
    if (value > largest.value) {
      largest.value = value;
      best_block = first;
    }
  }
  if (!std::isfinite(largest.value)) return largest;
  largest.index = best_block;
  while (to_float(logits[largest.index]) != largest.value) ++largest.index;
  return largest;
}

// The sum of value(i) for first <= i < end, by lanes and then the lanes.
template <class Value>
double sum_of(int64_t first, int64_t end, const Value& value) {
  double lanes[kSumLanes] = {};
  int64_t i = first;
  for (; i + kSumLanes <= end; i += kSumLanes) {
    for (int lane = 0; lane < kSumLanes; ++lane) lanes[lane] += value(i + lane);
  }
  for (; i < end; ++i) lanes[0] += value(i);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

// weights = exp((logits - largest) / temperature), at least 2^-126 or 0; returns their sum.
template <class T>
double weigh(const T* logits, int64_t vocabulary, float largest, float temperature,
             float* weights) {
  const F32 most = broadcast(largest), divisor = broadcast(temperature);
  const F32 nothing = broadcast(0x1p-126f);  // what exp makes of minus infinity
  for_each_vector(vocabulary, [&](int64_t i, int count) {
    const F32 weight = exp((load(logits + i, count) - most) / divisor);
    store(weights + i, max(weight - nothing, zero()), count);
  });
  return sum_of(0, vocabulary, [&](int64_t i) { return static_cast<double>(weights[i]); });
}

// The weights of at least `bar`; returns how many there are.
int64_t collect(const float* weights, int64_t vocabulary, float bar, float* candidates) {
  int64_t num_candidates = 0;
  for_each_vector(vocabulary, [&](int64_t i, int count) {
    if (reduce_max(load(weights + i, count)) < bar) return;
    for (int lane = 0; lane < count; ++lane) {
      candidates[num_candidates] = weights[i + lane];
      num_candidates += weights[i + lane] >= bar;
    }
  });
  return num_candidates;
}

// max(t_k, t_p): the smallest weight that top-k and top-p keep.
float cut_threshold(const RowScratch& row, int64_t vocabulary, double total, int64_t top_k,
                    float top_p) {
  const bool has_k = top_k > 0 && top_k < vocabulary;
  const bool has_p = top_p < 1.0f;
  if (!has_k && !has_p) return 0.0f;
  for (const float bar : kBars) {
    float* first = row.candidates;
    const int64_t num_candidates = collect(row.weights, vocabulary, bar, first);
    float* last = first + num_candidates;
    if (has_k && num_candidates < top_k) continue;
    std::sort(first, last, std::greater<float>());
    float threshold = 0.0f;
    if (has_k) {
      threshold = first[top_k - 1];
      last = std::upper_bound(first, last, threshold, std::greater<float>());
      total = 0;
      for (const float* weight = first; weight < last; ++weight) total += *weight;
    }
    if (!has_p) return threshold;
    double mass = 0;
    for (const float* weight = first; weight < last; ++weight) {
      mass += *weight;
      if (mass >= static_cast<double>(top_p) * total) return *weight;
    }
    if (has_k) return threshold;  // the sum of all of them, but for its rounding
  }
  return 0.0f;
}

// The first index whose running sum of the weights >= threshold exceeds share * their sum.
int64_t draw(const RowScratch& row, int64_t vocabulary, float threshold, float share) {
  const auto kept = [&](int64_t i) {
    return row.weights[i] >= threshold ? static_cast<double>(row.weights[i]) : 0.0;
  };
  double total = 0;
  for (int64_t first = 0; first < vocabulary; first += kBlock) {
    const double sum = sum_of(first, std::min(first + kBlock, vocabulary), kept);
    row.sums[first / kBlock] = sum;
    total += sum;
  }
  const double target = static_cast<double>(share) * total;
  double running = 0;
  int64_t last_kept = 0;
  for (int64_t first = 0; first < vocabulary; first += kBlock) {
    const double block_sum = row.sums[first / kBlock];
    if (running + block_sum > target) {
      double inside = running;
      for (int64_t i = first; i < std::min(first + kBlock, vocabulary); ++i) {
        const double weight = kept(i);
        if (weight == 0) continue;
        last_kept = i;
        inside += weight;
        if (inside > target) return i;
      }
    }
    running += block_sum;
  }
  return last_kept;  // only a rounding of the last sums comes here
}

template <class T>
int64_t sample_row(const SamplingCall& call, int64_t row, const RowScratch& scratch) {
  const T* logits = static_cast<const T*>(call.logits) + row * call.stride;
  const Largest largest = find_largest(logits, call.vocabulary);
  if (largest.index == kNoToken || call.temperature == nullptr) return largest.index;
  const float temperature = call.temperature[row];
  if (!(temperature > 0) || call.top_k[row] == 1) return largest.index;
  const double total =
      weigh(logits, call.vocabulary, largest.value, temperature, scratch.weights);
  const float cut =
      cut_threshold(scratch, call.vocabulary, total, call.top_k[row], call.top_p[row]);
  const float share = uniform(call.seeds[row], call.positions[row]);
  return draw(scratch, call.vocabulary, std::max(cut, call.min_p[row]), share);
}

}  // namespace
}  // namespace ncompass

using namespace ncompass;

const char* ncompass_sample(Context* context, int64_t num_rows, int64_t vocabulary,
                            const void* logits, int64_t stride, DType dtype,
                            const float* temperature, const int64_t* top_k, const float* top_p,
                            const float* min_p, const int64_t* seeds, const int64_t* positions,
                            int64_t* tokens) {
  return guarded([&] {
    require(vocabulary > 0, "sample: an empty vocabulary");
    const SamplingCall call{vocabulary, logits, stride, temperature, top_k,
                            top_p,      min_p,  seeds,  positions,   tokens};
    const Session session(context->team);
    std::vector<RowScratch> scratch;
    for (Scratch& memory : context->private_scratch) {
      scratch.push_back(
          RowScratch::at(memory.reserve<char>(RowScratch::bytes(vocabulary)), vocabulary));
    }
    const auto sample = [&](int64_t row, int thread) {
      with_dtype(dtype, [&](auto element) {
        call.tokens[row] = sample_row<decltype(element)>(call, row, scratch[thread]);
      });
    };
    if (num_rows == 1) return sample(0, 0);
    context->team.run([&](Worker& worker) {
      worker.take(num_rows, [&](int64_t row, int64_t) { sample(row, worker.thread); });
    });
  });
}
