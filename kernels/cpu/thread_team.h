// A team of threads that runs one body at a time, and sleeps when there is none.
//
// Between two operations of a step the workers spin, so that starting one costs about a microsecond;
// after 5 us they yield their core at every turn, after 1 ms they sleep in the kernel, so that an
// idle engine burns nothing. Two of a team that find themselves on one core part at once: the
// kernel may leave them there for seconds, and then every meeting costs a change of context.
// Work is handed out by `Worker::take`, never split in advance: a thread that lost its core to a
// neighbour simply takes fewer tasks. The one that it holds would keep all others waiting as long as
// the neighbour computes, for the kernel moves nothing that ran a moment ago: they bring it to a core
// of theirs. (Beside a neighbour at 30 % of a core a step at batch 8 took 1.5 times as long, now 1.27.)
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cassert>
#include <cstdint>
#include <mutex>
#include <vector>

namespace ncompass {

// A counter on a cache line of its own, that threads may wait on.
struct alignas(64) Signal {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> num_sleeping{0};

  void wait_while(uint32_t seen);
  bool changes_within(uint32_t seen, int64_t nanoseconds);
  void sleep_while(uint32_t seen);
  void set(uint32_t next);
};

class Worker;

class ThreadTeam {
 public:
  explicit ThreadTeam(int num_threads);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const { return num_threads_; }

  // Calls body(worker) once on each thread, the caller being thread 0, and returns when all are
  // done. The body must not throw. Only the holder of a `Session` may call it.
  template <class Body>
  void run(const Body& body) {
    run_erased([](const void* opaque, Worker& worker) { (*static_cast<const Body*>(opaque))(worker); },
               &body);
  }

 private:
  friend class Session;
  friend class Worker;
  using ErasedBody = void (*)(const void*, Worker&);

  static constexpr int kTakes = 8;  // lists of tasks between two barriers
  struct alignas(64) Counter {
    std::atomic<int64_t> num_taken{0};
  };

  struct alignas(64) Member {
    std::atomic<pid_t> id{0};
    std::atomic<uint32_t> num_arrivals{0};  // at barriers
  };

  void run_erased(ErasedBody body, const void* opaque);
  void barrier(int thread, int num_takes);
  void start_workers();
  void stop_workers();
  void work(int thread, uint32_t generation);
  void keep_apart();
  void wait_for_others(int thread, uint32_t generation);
  const Member* first_missing(int thread) const;
  void bring_here(pid_t id);
  bool move(pid_t id, const cpu_set_t& cores);

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
  Counter counters_[kTakes];
  std::vector<Member> members_;
  alignas(64) std::atomic<uint64_t> taken_cores_{0};  // in this region, of the first 64
  std::atomic_flag is_moving_ = ATOMIC_FLAG_INIT;
  std::atomic<int> crowded_core_{-1};  // where one was brought to another
  std::atomic<int64_t> crowded_since_{0};
};

// One thread of a region. All of them must call `take` and `barrier` in the same order.
class Worker {
 public:
  Worker(ThreadTeam& team, int thread) : thread(thread), team_(team) {}
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  const int thread;

  int num_threads() const { return team_.num_threads_; }

  // Of a list of tasks the one that this thread will probably take first.
  int64_t first_of(int64_t num_tasks) const {
    if (team_.num_threads_ == 2) return thread == 1 ? num_tasks - 1 : 0;
    return thread < num_tasks ? thread : 0;
  }

  // Waits until every thread of the team has come here.
  void barrier() {
    team_.barrier(thread, num_takes_);
    num_takes_ = 0;
  }

  // Calls body(task, likely_next) for those of the tasks 0..num_tasks-1 that fall to this thread:
  // each is taken once, by whoever is free. The task that it will probably take next is a hint for
  // fetching memory; it is -1 at the end of the list.
  //
  // Two threads eat the list from its two ends: each then reads one contiguous stretch of memory.
  template <class Body>
  void take(int64_t num_tasks, const Body& body) {
    assert(num_takes_ < ThreadTeam::kTakes);
    std::atomic<int64_t>& num_taken = team_.counters_[num_takes_++].num_taken;
    const int64_t num_threads = team_.num_threads_;
    const bool from_the_end = num_threads == 2 && thread == 1;
    int64_t own = 0;
    while (true) {
      const int64_t ticket = num_taken.fetch_add(1, std::memory_order_relaxed);
      if (ticket >= num_tasks) return;
      if (num_threads != 2) own = ticket;
      const int64_t next = own + (num_threads == 2 ? 1 : num_threads);
      const int64_t last = num_tasks - 1;
      body(from_the_end ? last - own : own, next > last ? -1 : from_the_end ? last - next : next);
      ++own;
    }
  }

 private:
  ThreadTeam& team_;
  int num_takes_ = 0;
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

}  // namespace ncompass
