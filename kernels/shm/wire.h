// How fp32 values travel where bytes are dear: as bf16, or as int8 in blocks that share a scale.

#pragma once

#include <cstddef>

#include "shm/reduce.h"  // FSDP_TP_EXPORT

extern "C" {

enum fsdp_tp_wire {
  FSDP_TP_EXACT = 0,
  FSDP_TP_WIRE_BFLOAT16 = 1,  // rounded to nearest even
  // Blocks of FSDP_TP_WIRE_BLOCK values: a scale in fp32, then a signed byte a value. With scale = max |value| / 127
  // each value is off by at most max |value| / 254 of its block. A block with a value that is not finite becomes NaN.
  FSDP_TP_WIRE_INT8 = 2,
};

enum { FSDP_TP_WIRE_BLOCK = 128 };

// How many bytes `count` values take.
FSDP_TP_EXPORT size_t fsdp_tp_wire_bytes(int wire, size_t count) noexcept;
FSDP_TP_EXPORT void fsdp_tp_encode(int wire, void* out, const float* in, size_t count) noexcept;
FSDP_TP_EXPORT void fsdp_tp_decode(int wire, float* out, const void* in, size_t count) noexcept;
}
