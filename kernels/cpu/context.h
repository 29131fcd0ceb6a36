// What an operation needs beside its tensors: the threads, their scratch memory, the chosen method.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "simd.h"
#include "thread_team.h"

namespace ncompass {

enum class DType : int32_t { kFloat32 = 0, kBfloat16 = 1 };

// A buffer on huge pages that only grows. Its content does not survive `reserve`. (On small pages
// the rows of a product meet too few entries of the TLB: prefill took 342 ms instead of 187.)
class Scratch {
 public:
  template <class T>
  T* reserve(int64_t count) {
    constexpr size_t kHugePage = 2 << 20;
    const size_t wanted = std::max<size_t>(static_cast<size_t>(count) * sizeof(T), 1);
    const size_t bytes = (wanted + kHugePage - 1) / kHugePage * kHugePage;
    if (bytes > capacity_) {
      memory_.reset();
      capacity_ = 0;
      void* memory = std::aligned_alloc(kHugePage, bytes);
      if (memory == nullptr) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
      madvise(memory, bytes, MADV_HUGEPAGE);
#endif
      memory_.reset(memory);
      capacity_ = bytes;
    }
    return static_cast<T*>(memory_.get());
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  size_t capacity_ = 0;
};

// One per engine. Every operation opens a `Session` on `team` first, which makes it the only user.
struct Context {
  explicit Context(int num_threads, bool use_native_bf16_dot)
      : team(num_threads), use_native_bf16_dot(use_native_bf16_dot), private_scratch(num_threads) {}

  ThreadTeam team;
  const bool use_native_bf16_dot;
  Scratch shared_scratch;
  std::vector<Scratch> private_scratch;  // one per thread
};

// Runs body(first, last) over the rows 0..num_rows in groups, by all threads, or by the caller alone
// if the whole is too small to be worth waking them.
template <class Body>
void for_each_row_group(Context& context, int64_t num_rows, int64_t elements_per_row,
                        const Body& body) {
  constexpr int64_t kElementsAlone = 8192;  // about 2 us of one core
  constexpr int64_t kElementsPerGroup = 4096;
  if (context.team.size() == 1 || num_rows * elements_per_row <= kElementsAlone) {
    return body(int64_t{0}, num_rows);
  }
  const int64_t rows = elements_per_row >= kElementsPerGroup ? 1 : kElementsPerGroup / elements_per_row;
  context.team.run([&](Worker& worker) {
    worker.take((num_rows + rows - 1) / rows, [&](int64_t group, int64_t) {
      const int64_t first = group * rows;
      body(first, first + rows < num_rows ? first + rows : num_rows);
    });
  });
}

// Calls body(T{}) with the element type that the code names.
template <class Body>
void with_dtype(DType dtype, const Body& body) {
  if (dtype == DType::kBfloat16) {
    body(bf16{});
  } else {
    body(float{});
  }
}

}  // namespace ncompass
