// Sums over buffers in a fixed order: the arithmetic of all-reduce and reduce-scatter.
//
// The interface is C so that Python (ctypes) and the c10d backend can both call it.

#pragma once

#include <cstddef>

#define FSDP_TP_EXPORT __attribute__((visibility("default")))

extern "C" {

enum fsdp_tp_dtype {
  FSDP_TP_FLOAT32 = 0,
  FSDP_TP_FLOAT64 = 1,
  FSDP_TP_BFLOAT16 = 2,
};

enum fsdp_tp_status {
  FSDP_TP_OK = 0,
  FSDP_TP_BAD_DTYPE = 1,        // not a value of fsdp_tp_dtype
  FSDP_TP_BAD_NUM_SOURCES = 2,  // less than 1
  FSDP_TP_NULL_POINTER = 3,     // out, sources or one of its entries, with count > 0
};

// out[i] = ((sources[0][i] + sources[1][i]) + sources[2][i]) + ..., for i < count.
//
// The order is that of `sources`, so every rank that passes the same buffers in rank order gets the
// same bits. float32 and float64 add in their own type; bfloat16 adds in float32 and rounds once, to
// nearest even. A NaN stays a NaN; its payload is unspecified.
//
// Every buffer holds `count` elements of `dtype` (a fsdp_tp_dtype), aligned to its element. `out` may
// be one of the sources; any other overlap is undefined. Returns a fsdp_tp_status; on anything but
// FSDP_TP_OK, `out` is untouched.
FSDP_TP_EXPORT int fsdp_tp_reduce_sum(void* out, const void* const* sources, int num_sources, size_t count,
                                      int dtype) noexcept;
}
