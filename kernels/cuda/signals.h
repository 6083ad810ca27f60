// How ranks wait for each other inside a kernel: each block for the block of the same number on every other rank.
//
// A pad has a word that is not 0 once this rank gave up, then for each block a word a rank, which that rank writes, and
// the number of meetings that the block has had. A meeting is a number, one more each time and the same on all ranks;
// it may wrap around. A rank writes it to all others and waits until all have written it here. Nothing is reset, so a
// signal is one store, and a kernel in a CUDA graph finds its number in memory.

#pragma once

#include "cuda/device.h"

namespace fsdp_tp::cuda {

constexpr size_t signal_words(int world, int blocks) { return 1 + static_cast<size_t>(blocks) * (world + 1); }

struct Signals {
  uint32_t* const* pads;
  int rank, world;
  uint64_t timeout;  // nanoseconds
  uint32_t* report;

  FSDP_TP_DEVICE uint32_t* words(int rank, int block) const {
    return pads[rank] + 1 + static_cast<size_t>(block) * (world + 1);
  }
  FSDP_TP_DEVICE uint32_t* meetings(int block) const { return words(rank, block) + world; }
  FSDP_TP_DEVICE bool gave_up() const { return load_relaxed(pads[rank]) != 0; }

  // What this rank has read and written becomes visible to `peer` once it has waited.
  FSDP_TP_DEVICE void tell(int peer, int block, uint32_t meeting) const {
    store_release(words(peer, block) + rank, meeting);
  }

  FSDP_TP_DEVICE bool wait(int peer, int block, uint32_t meeting) const {
    const uint32_t* const word = words(rank, block) + peer;
    uint64_t end = 0;
    // The difference is negative as long as the peer's number is behind, also where numbers have wrapped around.
    for (uint32_t turn = 1; static_cast<int32_t>(load_acquire(word) - meeting) < 0; ++turn) {
      pause();
      if (turn % 256 != 0) continue;  // reading the clock is slower than looking at the word
      if (end == 0) {
        end = nanoseconds() + timeout;
      } else if (nanoseconds() > end) {
        give_up(peer);
        return false;
      }
    }
    return true;
  }

  FSDP_TP_DEVICE void give_up(int peer) const {
    const auto reason = static_cast<uint32_t>(1 + peer);
    if (report == nullptr) trap();
    store_release(pads[rank], reason);
    store_release(report, reason);
  }
};

}  // namespace fsdp_tp::cuda
