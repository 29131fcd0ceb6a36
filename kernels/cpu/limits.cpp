// The machine's limits, measured the way the kernels use it: arithmetic in registers alone, and a
// stream read from memory. Benchmarks divide by these, in the same run.
#include <time.h>

#include <chrono>

#include "api.h"
#include "dot.h"
#include "guard.h"

namespace ncompass {
namespace {

constexpr int kSums = F32::kWidth == 16 ? 24 : 12;  // enough to hide the latency of two units

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Of this thread's own time, so that a neighbour on its core does not count.
double own_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Operations per second of step(sums), which counts as `operations`, on all threads together.
inline void start(F32& sum) { sum = zero(); }
inline void start(I32& sum) {
  const int32_t zeros[F32::kWidth] = {};
  sum = load(zeros);
}

template <class Sum, class Step>
double measure_rate(Context& context, double seconds, double operations, const Step& step) {
  std::vector<double> rates(context.team.size());
  context.team.run([&](Worker& worker) {
    Sum sums[kSums];
    NCOMPASS_UNROLL for (int i = 0; i < kSums; ++i) start(sums[i]);
    const double start_s = own_seconds();
    double elapsed = 0;
    int64_t num_steps = 0;
    while (elapsed < seconds) {
      for (int i = 0; i < 10000; ++i) {
        step(sums);
        // Keeps the sums in registers, and the loop from being computed at compile time.
        NCOMPASS_UNROLL for (int j = 0; j < kSums; ++j) asm volatile("" : "+v"(sums[j].lanes));
      }
      num_steps += 10000;
      elapsed = own_seconds() - start_s;
    }
    rates[worker.thread] = num_steps * operations / elapsed;
  });
  double total = 0;
  for (double rate : rates) total += rate;
  return total;
}

double measure_multiply_add(Context& context, double seconds) {
  return measure_rate<F32>(context, seconds, 2.0 * F32::kWidth * kSums, [](F32(&sums)[kSums]) {
    const F32 one = broadcast(1.0f);
    NCOMPASS_UNROLL for (int i = 0; i < kSums; ++i) sums[i] = fma(one, one, sums[i]);
  });
}

double measure_bf16_dot(Context& context, double seconds) {
#if NCOMPASS_HAS_BF16_DOT
  return measure_rate<F32>(context, seconds, 4.0 * F32::kWidth * kSums, [](F32(&sums)[kSums]) {
    const Pairs ones{_mm512_set1_epi32(0x3f803f80)};
    NCOMPASS_UNROLL for (int i = 0; i < kSums; ++i) add_dot(sums[i], ones, ones);
  });
#else
  (void)context, (void)seconds;
  return 0;
#endif
}

double measure_int8_dot(Context& context, double seconds) {
  const Int8Activation ones[64 / sizeof(Int8Activation)] = {1, 1, 1, 1};
  const Int8Columns column = broadcast_activations(ones);
  return measure_rate<I32>(context, seconds, 2.0 * kInt8Depth * F32::kWidth * kSums,
                           [column](I32(&sums)[kSums]) {
                             Int8Columns other = column;
                             NCOMPASS_UNROLL for (int i = 0; i < kSums; ++i) {
                               // Without VNNI a product would be computed once for all sums.
                               asm volatile("" : "+v"(other.lanes));
                               add_dot(sums[i], column, other);
                             }
                           });
}

// Bytes per second of reading `bytes` once, each thread its own share.
double measure_read(Context& context, const char* memory, int64_t bytes) {
  constexpr int64_t kGroup = 256;
  constexpr int64_t kAhead = 8192;
  const int64_t share = bytes / context.team.size() / kGroup * kGroup;
  const auto start = std::chrono::steady_clock::now();
  context.team.run([&](Worker& worker) {
    const char* from = memory + worker.thread * share;
    F32 sum = zero();
    for (int64_t i = 0; i < share; i += kGroup) {
      NCOMPASS_UNROLL for (int64_t line = 0; line < kGroup; line += 64) {
        _mm_prefetch(from + i + kAhead + line, _MM_HINT_T1);
        sum = sum + load(reinterpret_cast<const float*>(from + i + line));
      }
    }
    asm volatile("" : : "v"(sum.lanes));
  });
  return static_cast<double>(share * context.team.size()) / seconds_since(start);
}

}  // namespace
}  // namespace ncompass

using namespace ncompass;

const char* ncompass_measure_arithmetic(Context* context, int32_t unit, double seconds,
                                        double* rate) {
  return guarded([&] {
    const Session session(context->team);
    *rate = unit == 0   ? measure_multiply_add(*context, seconds)
            : unit == 1 ? measure_bf16_dot(*context, seconds)
                        : measure_int8_dot(*context, seconds);
  });
}

const char* ncompass_measure_read(Context* context, const void* memory, int64_t bytes,
                                  double* rate) {
  return guarded([&] {
    const Session session(context->team);
    *rate = measure_read(*context, static_cast<const char*>(memory), bytes);
  });
}
