// Collectives between GPUs that can read each other's memory (NVLink, or PCIe with peer access). Knows nothing of
// torch.
//
// The interface is C; ctypes calls it. Functions launch one kernel on a stream and return a status: FSDP_TP_OK, another
// fsdp_tp_status (shm/reduce.h) or fsdp_tp_cuda_status, or FSDP_TP_CUDA_FAILED + a cudaError_t; on anything but
// FSDP_TP_OK nothing was launched. fsdp_tp_cuda_error() makes a sentence of it.
//
// Every rank has a *buffer* and a *signal pad* that all others read, and write, at the addresses which it passes. All
// ranks call the same functions in the same order with the same sizes, dtypes, offset, timeout, max_blocks and
// signal_words. A kernel begins when all ranks have come, so what earlier work of a rank's stream wrote into its buffer
// is seen; it ends when all have read, so later work may overwrite it. "Ranks" may be several streams of one GPU, if
// all their blocks fit on it at once (max_blocks).
//
// Sums are of fp32, in the order of ranks: every run and every rank gets the same bits.

#pragma once

#include <stddef.h>
#include <stdint.h>

#include "shm/reduce.h"  // fsdp_tp_dtype, fsdp_tp_status, FSDP_TP_EXPORT

#ifdef __cplusplus
extern "C" {
#endif

enum fsdp_tp_cuda_status {
  FSDP_TP_CUDA_BAD_RANK = 32,       // not 0 <= rank < world <= FSDP_TP_CUDA_MAX_WORLD
  FSDP_TP_CUDA_BAD_ALIGNMENT = 33,  // an offset or pointer is not a multiple of its element
  FSDP_TP_CUDA_BAD_SIGNALS = 34,    // signal_words is less than fsdp_tp_cuda_signal_words(world, 1)
  FSDP_TP_CUDA_FAILED = 1000,       // and more: a cudaError_t
};

enum { FSDP_TP_CUDA_MAX_WORLD = 128 };

typedef struct fsdp_tp_cuda_group {
  void* const* buffers;      // in device memory: a pointer to each rank's buffer, aligned to 16 bytes
  uint32_t* const* signals;  // in device memory: a pointer to each rank's signal pad, zero before the first call
  size_t signal_words;       // of each pad
  int rank, world;
  int max_blocks;  // of a launch; 0: as many as are of use
  double timeout;  // seconds a kernel waits for the others
  // Takes 1 + r if rank r did not come within the timeout: the address, for the device, of pinned memory of the host.
  // The result is undefined then, and later calls of this rank do nothing. NULL: a kernel that waits in vain traps,
  // which ends the use of the GPU in this process.
  uint32_t* report;
} fsdp_tp_cuda_group;

// How long a signal pad must be for launches of that many blocks. A shorter one makes launches smaller.
FSDP_TP_EXPORT size_t fsdp_tp_cuda_signal_words(int world, int blocks);

// out[r * bytes : (r + 1) * bytes] = the `bytes` at `offset` of rank r's buffer. `out` needs no alignment; it may hold
// this rank's input in its place (buffer + offset == out + rank * bytes), and overlaps no buffer otherwise.
FSDP_TP_EXPORT int fsdp_tp_cuda_all_gather(const fsdp_tp_cuda_group* group, void* out, size_t offset, size_t bytes,
                                           void* stream);

// out[i] = scale * (sum over ranks r of element rank * count + i, after `offset`, of rank r's buffer), for i < count.
// dtype: FSDP_TP_FLOAT32, FSDP_TP_BFLOAT16, FSDP_TP_FLOAT16. out_dtype: FSDP_TP_FLOAT32 or dtype, and FSDP_TP_BFLOAT16
// of FSDP_TP_FLOAT32. The sum and the product are each rounded to fp32, and the result to out_dtype, to nearest even.
// `out` overlaps no buffer.
FSDP_TP_EXPORT int fsdp_tp_cuda_reduce_scatter(const fsdp_tp_cuda_group* group, void* out, int out_dtype, size_t offset,
                                               size_t count, int dtype, float scale, void* stream);

// out[i] = scale * (sum over ranks r of element i, after `offset`, of rank r's buffer), for i < count; dtypes as above.
// Each rank reads the inputs of all, so it is for messages that are small. `in`, if not NULL, is this rank's input,
// which the kernel copies to its place in the buffer first; it may be `out`. `out` overlaps no buffer.
FSDP_TP_EXPORT int fsdp_tp_cuda_all_reduce(const fsdp_tp_cuda_group* group, void* out, int out_dtype, const void* in,
                                           size_t offset, size_t count, int dtype, float scale, void* stream);

// FSDP_TP_OK if these kernels run on the current device.
FSDP_TP_EXPORT int fsdp_tp_cuda_available(void);

// A sentence about a status.
FSDP_TP_EXPORT const char* fsdp_tp_cuda_error(int status);

#ifdef __cplusplus
}
#endif
