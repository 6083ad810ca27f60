// The arithmetic of collectives: reductions over buffers in a fixed order, and casts.
//
// The interface is C so that Python (ctypes) and the c10d backend can both call it. Buffers need no
// alignment. Every status is a fsdp_tp_status; on anything but FSDP_TP_OK, `out` is untouched.

#pragma once

#include <cstddef>

#define FSDP_TP_EXPORT __attribute__((visibility("default")))

extern "C" {

enum fsdp_tp_dtype {
  FSDP_TP_FLOAT32 = 0,
  FSDP_TP_FLOAT64 = 1,
  FSDP_TP_BFLOAT16 = 2,
  FSDP_TP_FLOAT16 = 3,
  FSDP_TP_INT32 = 4,
  FSDP_TP_INT64 = 5,
};

enum fsdp_tp_op {
  FSDP_TP_SUM = 0,
  FSDP_TP_AVG = 1,
  FSDP_TP_MAX = 2,
  FSDP_TP_MIN = 3,
  FSDP_TP_PREMUL_SUM = 4,
};

enum fsdp_tp_status {
  FSDP_TP_OK = 0,
  FSDP_TP_BAD_DTYPE = 1,        // not a value of fsdp_tp_dtype, or a pair of them that is not supported
  FSDP_TP_BAD_NUM_SOURCES = 2,  // less than 1
  FSDP_TP_NULL_POINTER = 3,     // out, sources or one of its entries, with count > 0
  FSDP_TP_BAD_OP = 4,           // not a value of fsdp_tp_op, or one that integers do not have
};

// out[i] = the op over sources[0][i], sources[1][i], ..., for i < count, in that order:
//   SUM         ((s0 + s1) + s2) + ...; integers wrap around
//   AVG         SUM / num_sources; not for integers
//   MAX, MIN    NaN if any source is; of equal values (-0 and +0) the first
//   PREMUL_SUM  ((factor * s0) + (factor * s1)) + ..., `factor` and each product rounded; not for integers
//
// So every rank that passes the same buffers in rank order gets the same bits, on any instruction set.
// float32 and float64 compute in their own type; bfloat16 and float16 compute in float32 and round
// once, to nearest even, or with out_dtype FSDP_TP_FLOAT32 not at all. Otherwise out_dtype is dtype.
// A NaN stays a NaN; its payload is unspecified. Other ops ignore `factor`.
//
// `out` may be one of the sources if out_dtype is dtype; any other overlap is undefined.
FSDP_TP_EXPORT int fsdp_tp_reduce(void* out, int out_dtype, const void* const* sources, int num_sources, size_t count,
                                  int dtype, int op, double factor) noexcept;

// out[i] = in[i], from float32 to bfloat16 or float16 (to nearest even), back, or without a change of
// type. A NaN stays a NaN. `out` may be `in` if the types are the same; any other overlap is undefined.
FSDP_TP_EXPORT int fsdp_tp_cast(void* out, int out_dtype, const void* in, int dtype, size_t count) noexcept;

// Bytes an element; 0 for what is not a value of fsdp_tp_dtype.
FSDP_TP_EXPORT size_t fsdp_tp_dtype_size(int dtype) noexcept;

// "avx512", "avx2", or "scalar": what every machine of the architecture has (SSE2, NEON). The best the
// machine has, or FSDP_TP_INSTRUCTION_SET=scalar|avx2|avx512 at the first call, if that is less.
FSDP_TP_EXPORT const char* fsdp_tp_instruction_set(void) noexcept;
}

namespace fsdp_tp {

// fsdp_tp_reduce, as a part of a collective in which all ranks together write `written` bytes (copy.h).
int reduce_part(void* out, int out_dtype, const void* const* sources, int num_sources, size_t count, int dtype, int op,
                double factor, size_t written) noexcept;

}  // namespace fsdp_tp
