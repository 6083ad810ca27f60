// A counter that one process advances and others wait for, in shared memory.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace fsdp_tp {

using Clock = std::chrono::steady_clock;

// Alone in its cache line, so that a writer disturbs only those who wait for it.
struct alignas(64) Signal {
  std::atomic<std::uint32_t> value;
  std::atomic<std::uint32_t> sleepers;  // how many wait in the kernel: nobody is woken at the cost of a system call

  void set(std::uint32_t next);
  // Wakes everybody without a change, to look at something else.
  void wake();
  // Sleeps while value is `seen`, but not much longer than `duration`.
  void sleep(std::uint32_t seen, std::chrono::milliseconds duration);
};
static_assert(sizeof(Signal) == 64 && std::atomic<std::uint32_t>::is_always_lock_free);

// Whether a counter has reached `target`; right across its overflow.
inline bool reached(std::uint32_t value, std::uint32_t target) {
  return static_cast<std::int32_t>(value - target) >= 0;
}

// How to wait: spin as long as a peer that is at work takes, then let others run, then sleep.
class Backoff {
 public:
  // Ranks that share cores gain nothing by spinning: who waits stands in the way of who works.
  explicit Backoff(bool shared_cores) : spins_(shared_cores ? 20 : 2000), yields_(shared_cores ? 20 : 200) {}
  // One round: true if it was time to sleep and it slept.
  bool pause(Signal& signal, std::uint32_t seen);

 private:
  int spins_;
  int yields_;
};

}  // namespace fsdp_tp
