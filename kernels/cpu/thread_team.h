// A team of threads that runs one body at a time, and sleeps when there is none.
//
// Between two operations of a step the workers spin, so that starting one costs about a microsecond;
// after 50 us they yield their core at every turn, after 1 ms they sleep in the kernel, so that an
// idle engine burns nothing. Work is handed out by `TaskList`, never split in advance: a thread that
// lost its core to a neighbour simply takes fewer tasks.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace ncompass {

// A counter on a cache line of its own, that threads may wait on.
struct alignas(64) Signal {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> num_sleeping{0};

  void wait_while(uint32_t seen);
  void set(uint32_t next);
};

class ThreadTeam {
 public:
  explicit ThreadTeam(int num_threads);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const { return num_threads_; }

  // Calls body(thread) once on each thread, the caller being thread 0, and returns when all are
  // done. The body must not throw. Only the holder of a `Session` may call it.
  template <class Body>
  void run(const Body& body) {
    run_erased([](const void* opaque, int thread) { (*static_cast<const Body*>(opaque))(thread); },
               &body);
  }

  // Inside `run`: waits until every thread of the team has come here.
  void barrier();

 private:
  friend class Session;
  using ErasedBody = void (*)(const void*, int);

  void run_erased(ErasedBody body, const void* opaque);
  void start_workers();
  void stop_workers();
  void work(int thread, uint32_t generation);

  const int num_threads_;
  std::mutex mutex_;
  int fork_generation_ = -1;  // of the process whose threads these are; a child has none of them
  std::vector<pthread_t> workers_;
  ErasedBody body_ = nullptr;
  const void* opaque_ = nullptr;
  bool is_stopping_ = false;
  Signal generation_;
  Signal barrier_generation_;
  alignas(64) std::atomic<int> num_arrived_{0};
};

// The right to use a team: one caller at a time, in the floating-point mode of the workers.
//
// Denormals count as zero in all threads alike (vdpbf16ps knows no other mode), so a result never
// depends on which thread computed it. The caller's own mode is restored at the end.
class Session {
 public:
  explicit Session(ThreadTeam& team);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

 private:
  ThreadTeam& team_;
  unsigned caller_mode_;
};

// Tasks 0..num_tasks-1 of one parallel region, each taken once, by whoever is free.
//
// Two threads eat the list from its two ends: each then reads one contiguous stretch of memory.
class TaskList {
 public:
  TaskList(int64_t num_tasks, int num_threads) : num_tasks_(num_tasks), num_threads_(num_threads) {}

  // Calls body(task, likely_next) for the tasks that fall to this thread. The task that it will
  // probably take next is a hint for fetching memory; it is -1 at the end of the list.
  template <class Body>
  void take(int thread, const Body& body) {
    const bool from_the_end = num_threads_ == 2 && thread == 1;
    int64_t own = 0;
    while (true) {
      const int64_t ticket = num_taken_.fetch_add(1, std::memory_order_relaxed);
      if (ticket >= num_tasks_) return;
      if (num_threads_ != 2) own = ticket;
      const int64_t next = own + (num_threads_ == 2 ? 1 : num_threads_);
      const int64_t last = num_tasks_ - 1;
      body(from_the_end ? last - own : own, next > last ? -1 : from_the_end ? last - next : next);
      ++own;
    }
  }

 private:
  const int64_t num_tasks_;
  const int num_threads_;
  alignas(64) std::atomic<int64_t> num_taken_{0};
};

}  // namespace ncompass
