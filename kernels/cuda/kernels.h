// The kernels, as functions of a block: `block.each(f)` is f(t) for every thread t of it, `block.all(f)` is whether all
// were true; both end with a barrier of the block.

#pragma once

#include <algorithm>

#include "cuda/fsdp_tp_cuda.h"
#include "cuda/parts.h"
#include "cuda/signals.h"

namespace fsdp_tp::cuda {

constexpr int kThreads = 512;
static_assert(kThreads >= FSDP_TP_CUDA_MAX_WORLD, "a thread signals one rank");

struct Group {
  void* const* buffers;
  Signals signals;
};

// Waits for all ranks, calls `work` with a pointer to each rank's buffer at `offset`, and waits for all again.
template <class Block, class Work>
FSDP_TP_DEVICE void together(Block& block, const Group& group, size_t offset, const Work& work) {
  const Signals& signals = group.signals;
  const uint32_t meetings = *signals.meetings(block.index);
  const bool gave_up = signals.gave_up();
  const auto meet = [&](uint32_t meeting) {
    block.each([&](int peer) {
      if (peer < signals.world && !gave_up) signals.tell(peer, block.index, meeting);
    });
    return block.all(
        [&](int peer) { return peer >= signals.world || (!gave_up && signals.wait(peer, block.index, meeting)); });
  };
  block.each([&](int peer) {
    if (peer < signals.world) block.sources[peer] = static_cast<const char*>(group.buffers[peer]) + offset;
  });
  if (!meet(meetings + 1)) return;
  work();
  if (!meet(meetings + 2)) return;
  block.each([&](int thread) {
    if (thread == 0) *signals.meetings(block.index) = meetings + 2;
  });
}

struct AllGather {
  Group group;
  char* out;
  size_t offset, bytes;
  int parts;  // of a shard

  template <class Block>
  FSDP_TP_DEVICE void operator()(Block& block) const {
    const int world = group.signals.world;
    together(block, group, offset, [&] {
      block.each([&](int thread) {
        // Neighbouring blocks read from different peers, so that all links are busy at once.
        for (int unit = block.index; unit < parts * world; unit += block.count) {
          const int peer = (group.signals.rank + unit) % world, part = unit / world;
          copy(out + peer * bytes, block.sources[peer], bytes, static_cast<size_t>(part) * kThreads + thread,
               static_cast<size_t>(parts) * kThreads);
        }
      });
    });
  }
};

// Of a reduce-scatter: a range that starts at this rank's part. Of an all-reduce: all.
template <class In, class Out, int kVectors, int kPeers>
struct Reduce {
  Group group;
  typename Out::Stored* out;
  const typename In::Stored* in;  // or NULL
  size_t offset;
  Range range;
  float scale;

  template <class Block>
  FSDP_TP_DEVICE void operator()(Block& block) const {
    const size_t first = static_cast<size_t>(block.index) * kThreads,
                 threads = static_cast<size_t>(block.count) * kThreads;
    if (in != nullptr) {
      char* const own = static_cast<char*>(group.buffers[group.signals.rank]) + offset;
      block.each([&](int thread) { stage<In>(own, in, range, first + thread, threads); });
    }
    together(block, group, offset, [&] {
      block.each([&](int thread) {
        reduce<In, Out, kVectors, kPeers>(out, block.sources, group.signals.world, range, scale, first + thread,
                                          threads);
      });
    });
  }
};

}  // namespace fsdp_tp::cuda
