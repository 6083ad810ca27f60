// Number formats: how an element is stored, and its conversions from and to the fp32 that sums are made in.

#pragma once

#include "cuda/device.h"

#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

namespace fsdp_tp::cuda {

struct Float32 {
  using Stored = uint32_t;
  FSDP_TP_DEVICE static float widen(Stored bits) { return as_float(bits); }
  FSDP_TP_DEVICE static Stored narrow(float value) { return as_bits(value); }
};

struct BFloat16 {
  using Stored = uint16_t;
  FSDP_TP_DEVICE static float widen(Stored bits) { return as_float(static_cast<uint32_t>(bits) << 16); }
  FSDP_TP_DEVICE static Stored narrow(float value) {
    const uint32_t bits = as_bits(value);
    // Just under half of the last kept place, and one more if that place is odd: ties go to even. A NaN could carry
    // over into infinity.
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<Stored>(value == value ? rounded : 0x7fc0);
  }
};

struct Float16 {
  using Stored = uint16_t;
#ifdef __CUDACC__
  FSDP_TP_DEVICE static float widen(Stored bits) { return __half2float(__ushort_as_half(bits)); }
  FSDP_TP_DEVICE static Stored narrow(float value) { return __half_as_ushort(__float2half_rn(value)); }
#else
  static float widen(Stored bits) {
    const uint32_t magnitude = bits & 0x7fff, sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    if (magnitude < 0x400) return as_float(sign | as_bits(static_cast<float>(magnitude) * 0x1p-24f));  // subnormal
    const uint32_t rebias = magnitude < 0x7c00 ? 127 - 15 : 255 - 31;  // an exponent of ones stays one
    return as_float(sign | ((magnitude << 13) + (rebias << 23)));
  }
  static Stored narrow(float value) {
    const uint32_t magnitude = as_bits(value) & 0x7fffffff, sign = (as_bits(value) >> 16) & 0x8000;
    uint32_t result = 0x7c00;
    if (magnitude > 0x7f800000) {
      result = 0x7e00;
    } else if (magnitude < 0x38800000) {  // below 2^-14: the last place of 0.5 is that of a subnormal fp16
      result = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
    } else if (magnitude < 0x47800000) {  // 2^16; what rounds up to it carries into infinity
      result = ((magnitude + 0xfff + ((magnitude >> 13) & 1)) >> 13) - ((127 - 15) << 10);
    }
    return static_cast<Stored>(sign | result);
  }
#endif
};

template <class Format>
inline constexpr int kLanes = static_cast<int>(sizeof(Vector) / sizeof(typename Format::Stored));

template <class Format>
FSDP_TP_DEVICE float lane(const Vector& vector, int index) {
  if constexpr (sizeof(typename Format::Stored) == 4) {
    return Format::widen(vector.words[index]);
  } else {
    return Format::widen(static_cast<uint16_t>(vector.words[index / 2] >> (index % 2 * 16)));
  }
}

}  // namespace fsdp_tp::cuda
