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
constexpr int64_t kPatienceNanoseconds = 40'000;  // then whoever is missing may have lost its core:
constexpr int64_t kLookNanoseconds = 10'000;      // does it compute meanwhile?
constexpr int64_t kCrowdedNanoseconds = 1'000'000;  // that two share a core before they part
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

// What a thread of this process has computed so far.
int64_t processor_nanoseconds(pid_t id) {
  // As Linux numbers the clocks of threads.
  const auto clock = static_cast<clockid_t>((~static_cast<unsigned>(id) << 3) | 6);
  timespec now;
  if (clock_gettime(clock, &now) != 0) return 0;
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// How many forks led from the process that loaded this library to the one that runs.
std::atomic<int> fork_generation{0};
[[maybe_unused]] const int fork_is_watched =
    pthread_atfork(nullptr, nullptr, [] { fork_generation.fetch_add(1); });

}  // namespace

// Spins, then yields; whether the value has changed in time.
bool Signal::changes_within(uint32_t seen, int64_t nanoseconds) {
  const int64_t start = now_nanoseconds();
  while (value.load(std::memory_order_acquire) == seen) {
    const int64_t waited = now_nanoseconds() - start;
    if (waited >= nanoseconds) return false;
    if (waited < kSpinNanoseconds) {
      for (int i = 0; i < kPausesPerLook && value.load(std::memory_order_relaxed) == seen; ++i) {
        _mm_pause();
      }
    } else {
      sched_yield();
    }
  }
  return true;
}

void Signal::sleep_while(uint32_t seen) {
  while (value.load(std::memory_order_acquire) == seen) {
    num_sleeping.fetch_add(1);
    futex(value, FUTEX_WAIT_PRIVATE, seen);  // returns at once if the value has changed
    num_sleeping.fetch_sub(1);
  }
}

void Signal::wait_while(uint32_t seen) {
  if (!changes_within(seen, kYieldNanoseconds)) sleep_while(seen);
}

void Signal::set(uint32_t next) {
  value.store(next);  // sequentially consistent: ordered before the look at num_sleeping
  if (num_sleeping.load() > 0) futex(value, FUTEX_WAKE_PRIVATE, INT_MAX);
}

ThreadTeam::ThreadTeam(int num_threads) : num_threads_(num_threads), members_(num_threads) {}

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
  for (Member& member : members_) member.num_arrivals = 0;
  is_moving_.clear();
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
  members_[thread].id = gettid();
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
  cpu_set_t free_ones;
  CPU_ZERO(&free_ones);
  const uint64_t taken = taken_cores_.load();
  for (int i = 0; i < 64; ++i) {
    if ((taken >> i & 1) == 0) CPU_SET(i, &free_ones);
  }
  if (!move(0, free_ones)) return;
  const int new_core = sched_getcpu();
  if (new_core >= 0 && new_core < 64) taken_cores_.fetch_or(uint64_t{1} << new_core);
}

void ThreadTeam::run_erased(ErasedBody body, const void* opaque) {
  if (num_threads_ > 1) {
    const int core = sched_getcpu();
    taken_cores_ = core >= 0 && core < 64 ? uint64_t{1} << core : 0;
    members_[0].id = gettid();
    body_ = body;
    opaque_ = opaque;
    generation_.set(generation_.value.load() + 1);
  }
  Worker caller(*this, 0);
  body(opaque, caller);
  caller.barrier();
}

// The last to arrive makes the counters ready for what follows, while all the others wait.
void ThreadTeam::barrier(int thread, int num_takes) {
  const uint32_t generation = barrier_generation_.value.load();
  members_[thread].num_arrivals.fetch_add(1, std::memory_order_relaxed);
  if (num_arrived_.fetch_add(1) == num_threads_ - 1) {
    num_arrived_.store(0, std::memory_order_relaxed);
    for (int i = 0; i < num_takes; ++i) counters_[i].num_taken.store(0, std::memory_order_relaxed);
    barrier_generation_.set(generation + 1);
  } else {
    wait_for_others(thread, generation);
  }
}

void ThreadTeam::wait_for_others(int thread, uint32_t generation) {
  // 1. two on one core take turns by sleeping, until it is time to see whether another one is free
  const int core = sched_getcpu();
  if (core >= 0 && core == crowded_core_) {
    if (now_nanoseconds() - crowded_since_ < kCrowdedNanoseconds) {
      return barrier_generation_.sleep_while(generation);
    }
    crowded_core_ = -1;
    cpu_set_t others;
    CPU_ZERO(&others);
    for (int i = 0; i < CPU_SETSIZE; ++i) {
      if (i != core) CPU_SET(i, &others);
    }
    move(0, others);
  }
  // 2. whoever is missing has a long task, or no core
  if (barrier_generation_.changes_within(generation, kPatienceNanoseconds)) return;
  for (int64_t waited = 0; waited < kYieldNanoseconds; waited += kLookNanoseconds) {
    const Member* missing = first_missing(thread);
    const int64_t before = missing == nullptr ? 0 : processor_nanoseconds(missing->id);
    if (barrier_generation_.changes_within(generation, kLookNanoseconds)) return;
    if (missing == nullptr) continue;
    if (processor_nanoseconds(missing->id) - before < kLookNanoseconds / 4) {
      bring_here(missing->id);
      break;
    }
  }
  barrier_generation_.sleep_while(generation);
}

// One that has not come to the barrier where `thread` waits; null once all are there.
const ThreadTeam::Member* ThreadTeam::first_missing(int thread) const {
  const uint32_t num_arrivals = members_[thread].num_arrivals.load(std::memory_order_relaxed);
  for (const Member& member : members_) {
    if (member.num_arrivals.load(std::memory_order_relaxed) != num_arrivals) return &member;
  }
  return nullptr;
}

// To the core of this thread, which is about to sleep.
void ThreadTeam::bring_here(pid_t id) {
  const int core = sched_getcpu();
  if (core < 0 || core >= CPU_SETSIZE) return;
  cpu_set_t here;
  CPU_ZERO(&here);
  CPU_SET(core, &here);
  if (!move(id, here)) return;
  crowded_since_ = now_nanoseconds();
  crowded_core_ = core;
}

// Moves a thread to one of `cores` at once, if it may run there. It remains as free as it was.
bool ThreadTeam::move(pid_t id, const cpu_set_t& cores) {
  if (is_moving_.test_and_set()) return false;  // else one could take the other's means for its due
  cpu_set_t allowed, wanted;
  bool has_moved = false;
  if (sched_getaffinity(id, sizeof(allowed), &allowed) == 0) {
    CPU_AND(&wanted, &allowed, &cores);
    has_moved = CPU_COUNT(&wanted) > 0 && sched_setaffinity(id, sizeof(wanted), &wanted) == 0;
    if (has_moved) sched_setaffinity(id, sizeof(allowed), &allowed);
  }
  is_moving_.clear();
  return has_moved;
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
