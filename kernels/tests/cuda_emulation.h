// The entry points of kernels/cuda on a CPU: a kernel is a loop over its blocks, a block a loop over its threads. A
// launch returns when the kernel has ended, so each rank needs a thread of its own.

#pragma once

#include "cuda/kernels.h"

namespace fsdp_tp::cuda {

struct Block {
  const char* sources[FSDP_TP_CUDA_MAX_WORLD];
  int index, count;

  template <class Work>
  void each(const Work& work) const {
    for (int thread = 0; thread < kThreads; ++thread) work(thread);
  }
  template <class Work>
  bool all(const Work& work) const {
    bool result = true;
    for (int thread = 0; thread < kThreads; ++thread) result = work(thread) && result;
    return result;
  }
};

template <class Kernel>
int launch(const Kernel& kernel, int blocks, void*) {
  for (int index = 0; index < blocks; ++index) {
    Block block{{}, index, blocks};
    kernel(block);
  }
  return FSDP_TP_OK;
}

}  // namespace fsdp_tp::cuda

#include "cuda/entry_points.h"

extern "C" {

int fsdp_tp_cuda_available() { return FSDP_TP_OK; }
const char* fsdp_tp_cuda_error(int status) { return fsdp_tp::cuda::sentence(status); }
}
