#include "shm/signal.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace fsdp_tp {

namespace {

// Long enough to cost nothing, short enough to find a dead peer soon.
constexpr std::chrono::milliseconds kSleep{20};

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::uint32_t* word(std::atomic<std::uint32_t>& value) { return reinterpret_cast<std::uint32_t*>(&value); }

}  // namespace

// Either the sleeper's count is seen here, or the kernel sees the new value there: both sides use the
// one total order of sequentially consistent operations.
void Signal::set(std::uint32_t next) {
  value.store(next, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) wake();
}

void Signal::wake() { syscall(SYS_futex, word(value), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

void Signal::sleep(std::uint32_t seen, std::chrono::milliseconds duration) {
  const timespec limit{duration.count() / 1000, duration.count() % 1000 * 1'000'000};
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, word(value), FUTEX_WAIT, seen, &limit, nullptr, 0);
  sleepers.fetch_sub(1, std::memory_order_relaxed);
}

bool Backoff::pause(Signal& signal, std::uint32_t seen) {
  if (spins_ > 0) {
    --spins_;
    relax();
    return false;
  }
  if (yields_ > 0) {
    --yields_;
    sched_yield();
    return false;
  }
  signal.sleep(seen, kSleep);
  return true;
}

}  // namespace fsdp_tp
