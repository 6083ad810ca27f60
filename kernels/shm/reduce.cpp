#include "shm/reduce.h"

#include <algorithm>
#include <bit>
#include <cstdint>

namespace {

struct BFloat16 {
  uint16_t bits;
};

float widen(float value) { return value; }
double widen(double value) { return value; }
float widen(BFloat16 value) { return std::bit_cast<float>(uint32_t{value.bits} << 16); }

void narrow(float value, float& out) { out = value; }
void narrow(double value, double& out) { out = value; }
void narrow(float value, BFloat16& out) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  // Just under half of the last kept place, and one more if that place is odd: ties go to even.
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  // Rounding could carry a NaN over into infinity.
  out.bits = is_nan ? 0x7fc0 : static_cast<uint16_t>(rounded >> 16);
}

// Going block by block keeps the running sums in L1, reads every source as one stream, and finishes
// reading a block before writing it, which is what lets `out` be one of the sources.
template <typename T>
void reduce_sum(T* out, const void* const* sources, int num_sources, size_t count) {
  constexpr size_t kBlock = 512;
  decltype(widen(T{})) sums[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t size = std::min(kBlock, count - begin);
    for (int rank = 0; rank < num_sources; ++rank) {
      const T* source = static_cast<const T*>(sources[rank]) + begin;
      if (rank == 0) {
        // A copy, not 0 + x, which would turn -0 into +0.
        for (size_t i = 0; i < size; ++i) sums[i] = widen(source[i]);
      } else {
        for (size_t i = 0; i < size; ++i) sums[i] += widen(source[i]);
      }
    }
    for (size_t i = 0; i < size; ++i) narrow(sums[i], out[begin + i]);
  }
}

}  // namespace

int fsdp_tp_reduce_sum(void* out, const void* const* sources, int num_sources, size_t count, int dtype) noexcept {
  if (dtype < FSDP_TP_FLOAT32 || dtype > FSDP_TP_BFLOAT16) return FSDP_TP_BAD_DTYPE;
  if (num_sources < 1) return FSDP_TP_BAD_NUM_SOURCES;
  if (count == 0) return FSDP_TP_OK;  // empty tensors have null data pointers
  if (out == nullptr || sources == nullptr) return FSDP_TP_NULL_POINTER;
  if (std::any_of(sources, sources + num_sources, [](const void* source) { return source == nullptr; })) {
    return FSDP_TP_NULL_POINTER;
  }

  switch (dtype) {
    case FSDP_TP_FLOAT32:
      reduce_sum(static_cast<float*>(out), sources, num_sources, count);
      break;
    case FSDP_TP_FLOAT64:
      reduce_sum(static_cast<double*>(out), sources, num_sources, count);
      break;
    case FSDP_TP_BFLOAT16:
      reduce_sum(static_cast<BFloat16*>(out), sources, num_sources, count);
      break;
  }
  return FSDP_TP_OK;
}
