// The C interface: looks at arguments, and picks a kernel and how many blocks it has. For whoever can launch kernels:
//
//   template <class Kernel> int launch(const Kernel& kernel, int blocks, void* stream);

#pragma once

#include "cuda/kernels.h"

namespace fsdp_tp::cuda {

constexpr int kMaxBlocks = 64;  // with kVectorsInFlight, more bytes under way than a link needs (8 MiB)

inline int blocks_at_most(const fsdp_tp_cuda_group& group) {
  const size_t of_pad = (group.signal_words - 1) / (group.world + 1);
  const int asked = group.max_blocks > 0 ? group.max_blocks : kMaxBlocks;
  return static_cast<int>(std::min<size_t>(of_pad, asked));
}

inline size_t vectors_of(size_t count, size_t lanes) { return (count + lanes - 1) / lanes; }

// As many blocks as give each thread one turn, or fewer.
inline int blocks_for(size_t vectors, size_t vectors_a_turn, int most) {
  const size_t a_block = vectors_a_turn * kThreads;
  return static_cast<int>(std::clamp<size_t>((vectors + a_block - 1) / a_block, 1, most));
}

inline int check(const fsdp_tp_cuda_group* group, const void* out) {
  if (group == nullptr || out == nullptr || group->buffers == nullptr || group->signals == nullptr) {
    return FSDP_TP_NULL_POINTER;
  }
  if (group->world < 1 || group->world > FSDP_TP_CUDA_MAX_WORLD || group->rank < 0 || group->rank >= group->world) {
    return FSDP_TP_CUDA_BAD_RANK;
  }
  if (group->signal_words < signal_words(group->world, 1)) return FSDP_TP_CUDA_BAD_SIGNALS;
  return FSDP_TP_OK;
}

inline Group group_of(const fsdp_tp_cuda_group& group) {
  const double nanoseconds = std::clamp(group.timeout * 1e9, 0.0, 1e18);
  return {group.buffers, {group.signals, group.rank, group.world, static_cast<uint64_t>(nanoseconds), group.report}};
}

inline const char* sentence(int status) {
  switch (status) {
    case FSDP_TP_OK:
      return "no error";
    case FSDP_TP_BAD_DTYPE:
      return "a dtype that does not exist, or a pair of them that is not supported";
    case FSDP_TP_NULL_POINTER:
      return "a pointer that may not be NULL is";
    case FSDP_TP_CUDA_BAD_RANK:
      return "rank or world is out of range";
    case FSDP_TP_CUDA_BAD_ALIGNMENT:
      return "an offset or a pointer is not a multiple of its element";
    case FSDP_TP_CUDA_BAD_SIGNALS:
      return "the signal pads are too small";
    default:
      return "an unknown status";
  }
}

struct Sum {
  const fsdp_tp_cuda_group* group;
  void* out;
  const void* in;
  size_t offset, start, count;
  float scale;
  void* stream;

  template <class In, class Out, int kVectors, int kPeers>
  int launch_kernel() const {
    const Range range = range_of<In>(offset, start, count);
    const Reduce<In, Out, kVectors, kPeers> kernel{group_of(*group),
                                                   static_cast<typename Out::Stored*>(out),
                                                   static_cast<const typename In::Stored*>(in),
                                                   offset,
                                                   range,
                                                   scale};
    // Of the count, not of the range: a rank's part may begin within a vector, and all ranks need as many blocks.
    return launch(kernel, blocks_for(vectors_of(count, kLanes<In>), kVectors, blocks_at_most(*group)), stream);
  }

  template <class In, class Out>
  int of() const {
    constexpr size_t kIn = sizeof(typename In::Stored), kOut = sizeof(typename Out::Stored);
    if (offset % kIn != 0 || reinterpret_cast<uintptr_t>(in) % kIn != 0 ||
        reinterpret_cast<uintptr_t>(out) % kOut != 0) {
      return FSDP_TP_CUDA_BAD_ALIGNMENT;
    }
    // The fewer peers, the more vectors of each are under way.
    if (group->world <= 2) return launch_kernel<In, Out, kVectorsInFlight / 2, 2>();
    if (group->world <= 4) return launch_kernel<In, Out, kVectorsInFlight / 4, 4>();
    return launch_kernel<In, Out, 1, kVectorsInFlight>();
  }

  int run(int dtype, int out_dtype) const {
    const bool known = dtype == FSDP_TP_FLOAT32 || dtype == FSDP_TP_BFLOAT16 || dtype == FSDP_TP_FLOAT16;
    const bool wider = out_dtype == FSDP_TP_FLOAT32 || out_dtype == dtype;
    if (!known || !(wider || (dtype == FSDP_TP_FLOAT32 && out_dtype == FSDP_TP_BFLOAT16))) return FSDP_TP_BAD_DTYPE;
    if (count == 0) return FSDP_TP_OK;
    if (const int status = check(group, out); status != FSDP_TP_OK) return status;
    if (dtype == FSDP_TP_FLOAT32) return wider ? of<Float32, Float32>() : of<Float32, BFloat16>();
    if (dtype == FSDP_TP_BFLOAT16) return out_dtype == dtype ? of<BFloat16, BFloat16>() : of<BFloat16, Float32>();
    return out_dtype == dtype ? of<Float16, Float16>() : of<Float16, Float32>();
  }
};

}  // namespace fsdp_tp::cuda

extern "C" {

size_t fsdp_tp_cuda_signal_words(int world, int blocks) { return fsdp_tp::cuda::signal_words(world, blocks); }

int fsdp_tp_cuda_all_gather(const fsdp_tp_cuda_group* group, void* out, size_t offset, size_t bytes, void* stream) {
  using namespace fsdp_tp::cuda;
  if (bytes == 0) return FSDP_TP_OK;
  if (const int status = check(group, out); status != FSDP_TP_OK) return status;
  const int most = blocks_at_most(*group);
  const int parts = blocks_for(vectors_of(bytes, sizeof(Vector)), kVectorsInFlight, std::max(most / group->world, 1));
  const AllGather kernel{group_of(*group), static_cast<char*>(out), offset, bytes, parts};
  return launch(kernel, std::min(parts * group->world, most), stream);
}

int fsdp_tp_cuda_reduce_scatter(const fsdp_tp_cuda_group* group, void* out, int out_dtype, size_t offset, size_t count,
                                int dtype, float scale, void* stream) {
  const size_t start = group == nullptr ? 0 : static_cast<size_t>(group->rank) * count;
  return fsdp_tp::cuda::Sum{group, out, nullptr, offset, start, count, scale, stream}.run(dtype, out_dtype);
}

int fsdp_tp_cuda_all_reduce(const fsdp_tp_cuda_group* group, void* out, int out_dtype, const void* in, size_t offset,
                            size_t count, int dtype, float scale, void* stream) {
  return fsdp_tp::cuda::Sum{group, out, in, offset, 0, count, scale, stream}.run(dtype, out_dtype);
}
}
