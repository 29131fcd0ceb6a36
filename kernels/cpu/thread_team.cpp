#include "thread_team.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <new>
#include <system_error>

namespace ncompass {
namespace {

constexpr int64_t kSpinNanoseconds = 5'000;
constexpr int64_t kYieldNanoseconds = 1'000'000;
constexpr int kPausesPerLook = 8;
constexpr unsigned kDenormalsAreZero = 0x8040;  // FTZ and DAZ of the MXCSR register

int64_t now_nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  syscall(SYS_futex, &word, operation, value, nullptr, nullptr, 0);
}

// How many forks led from the process that loaded this library to the one that runs.
std::atomic<int> fork_generation{0};
[[maybe_unused]] const int fork_is_watched =
    pthread_atfork(nullptr, nullptr, [] { fork_generation.fetch_add(1); });

}  // namespace

void Signal::wait_while(uint32_t seen) {
  const int64_t start = now_nanoseconds();
  while (value.load(std::memory_order_acquire) == seen) {
    const int64_t waited = now_nanoseconds() - start;
    if (waited < kSpinNanoseconds) {
      for (int i = 0; i < kPausesPerLook && value.load(std::memory_order_relaxed) == seen; ++i) {
        _mm_pause();
      }
    } else if (waited < kYieldNanoseconds) {
      sched_yield();
    } else {
      num_sleeping.fetch_add(1);
      futex(value, FUTEX_WAIT_PRIVATE, seen);  // returns at once if the value has changed
      num_sleeping.fetch_sub(1);
    }
  }
}

void Signal::set(uint32_t next) {
  value.store(next);  // sequentially consistent: ordered before the look at num_sleeping
  if (num_sleeping.load() > 0) futex(value, FUTEX_WAKE_PRIVATE, INT_MAX);
}

ThreadTeam::ThreadTeam(int num_threads) : num_threads_(num_threads) {}

ThreadTeam::~ThreadTeam() {
  // Otherwise it never started, or its workers belong to a parent process.
  if (fork_generation_ == fork_generation) stop_workers();
}

void ThreadTeam::start_workers() {
  struct Start {
    ThreadTeam* team;
    int thread;
    uint32_t generation;
  };
  const auto entry = [](void* opaque) -> void* {
    const Start start = *static_cast<Start*>(opaque);
    delete static_cast<Start*>(opaque);
    start.team->work(start.thread, start.generation);
    return nullptr;
  };
  workers_.clear();
  num_arrived_ = 0;
  for (Counter& counter : counters_) counter.num_taken = 0;
  generation_.num_sleeping = 0;
  barrier_generation_.num_sleeping = 0;
  // Signals belong to the threads of the host program.
  sigset_t every_signal, caller_signals;
  sigfillset(&every_signal);
  pthread_sigmask(SIG_SETMASK, &every_signal, &caller_signals);
  int error = 0;
  for (int thread = 1; thread < num_threads_ && error == 0; ++thread) {
    auto* start = new Start{this, thread, generation_.value.load()};
    pthread_t worker;
    error = pthread_create(&worker, nullptr, entry, start);
    if (error == 0) {
      workers_.push_back(worker);
    } else {
      delete start;
    }
  }
  pthread_sigmask(SIG_SETMASK, &caller_signals, nullptr);
  if (error != 0) {
    stop_workers();
    throw std::system_error(error, std::generic_category(), "cannot start a kernel thread");
  }
  fork_generation_ = fork_generation;
}

void ThreadTeam::stop_workers() {
  is_stopping_ = true;
  generation_.set(generation_.value.load() + 1);
  for (pthread_t worker : workers_) pthread_join(worker, nullptr);
  workers_.clear();
  is_stopping_ = false;
}

void ThreadTeam::work(int thread, uint32_t generation) {
  _mm_setcsr(_mm_getcsr() | kDenormalsAreZero);
  while (true) {
    generation_.wait_while(generation);
    ++generation;
    if (is_stopping_) return;
    keep_apart();
    Worker worker(*this, thread);
    body_(opaque_, worker);
    worker.barrier();
  }
}

// Moves this thread to another core if one of the team is on this one already.
void ThreadTeam::keep_apart() {
  const int core = sched_getcpu();
  if (core < 0 || core >= 64) return;
  const uint64_t own = uint64_t{1} << core;
  if ((taken_cores_.fetch_or(own) & own) == 0) return;
  cpu_set_t allowed, free_ones;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  free_ones = allowed;
  const uint64_t taken = taken_cores_.load();
  for (int i = 0; i < 64; ++i) {
    if (taken >> i & 1) CPU_CLR(i, &free_ones);
  }
  if (CPU_COUNT(&free_ones) == 0 || sched_setaffinity(0, sizeof(free_ones), &free_ones) != 0) return;
  sched_setaffinity(0, sizeof(allowed), &allowed);  // it moves at once, and is free again
  const int new_core = sched_getcpu();
  if (new_core >= 0 && new_core < 64) taken_cores_.fetch_or(uint64_t{1} << new_core);
}

void ThreadTeam::run_erased(ErasedBody body, const void* opaque) {
  if (num_threads_ > 1) {
    const int core = sched_getcpu();
    taken_cores_ = core >= 0 && core < 64 ? uint64_t{1} << core : 0;
    body_ = body;
    opaque_ = opaque;
    generation_.set(generation_.value.load() + 1);
  }
  Worker caller(*this, 0);
  body(opaque, caller);
  caller.barrier();
}

// The last to arrive makes the counters ready for what follows, while all the others wait.
void ThreadTeam::barrier(int num_takes) {
  const uint32_t generation = barrier_generation_.value.load();
  if (num_arrived_.fetch_add(1) == num_threads_ - 1) {
    num_arrived_.store(0, std::memory_order_relaxed);
    for (int i = 0; i < num_takes; ++i) counters_[i].num_taken.store(0, std::memory_order_relaxed);
    barrier_generation_.set(generation + 1);
  } else {
    barrier_generation_.wait_while(generation);
  }
}

Session::Session(ThreadTeam& team) : team_(team) {
  if (team.fork_generation_ != fork_generation && team.fork_generation_ != -1) {
    // After a fork only this thread exists here, and another one may have held the lock.
    new (&team.mutex_) std::mutex;
    team.fork_generation_ = -1;
  }
  team_.mutex_.lock();
  try {
    if (team_.fork_generation_ == -1) team_.start_workers();
  } catch (...) {
    team_.mutex_.unlock();
    throw;
  }
  caller_mode_ = _mm_getcsr();
  _mm_setcsr(caller_mode_ | kDenormalsAreZero);
}

Session::~Session() {
  _mm_setcsr(caller_mode_);
  team_.mutex_.unlock();
}

}  // namespace ncompass
