#include "shm/wire.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr float kLargest = 127;
// 1.5 * 2^23: what is added to it has no bits left after the point, and was rounded to nearest even.
constexpr float kRounds = 12582912;
constexpr std::size_t kBlock = FSDP_TP_WIRE_BLOCK;

void quantize(std::byte* out, const float* in, std::size_t count) {
  // The bits of floats without their sign are in the order of their sizes, then infinity, then NaNs.
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) largest = std::max(largest, std::bit_cast<std::uint32_t>(in[i]) << 1 >> 1);
  const float scale = largest >= std::bit_cast<std::uint32_t>(std::numeric_limits<float>::infinity())
                          ? std::numeric_limits<float>::quiet_NaN()
                          : std::bit_cast<float>(largest) / kLargest;
  std::memcpy(out, &scale, sizeof scale);
  auto* const values = reinterpret_cast<std::int8_t*>(out + sizeof scale);
  // The reciprocal of a smaller scale might not be finite; such values become zero.
  const float inverse = scale >= std::numeric_limits<float>::min() ? 1 / scale : 0;
  if (inverse == 0) {
    std::memset(values, 0, count);
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = static_cast<std::int8_t>(static_cast<std::int32_t>((in[i] * inverse + kRounds) - kRounds));
  }
}

void dequantize(float* out, const std::byte* in, std::size_t count) {
  float scale;
  std::memcpy(&scale, in, sizeof scale);
  const auto* const values = reinterpret_cast<const std::int8_t*>(in + sizeof scale);
  for (std::size_t i = 0; i < count; ++i) out[i] = scale * static_cast<float>(values[i]);
}

template <class Body>
void for_each_block(std::size_t count, Body body) {
  for (std::size_t start = 0; start < count; start += kBlock) {
    body(start, start / kBlock * (sizeof(float) + kBlock), std::min(kBlock, count - start));
  }
}

int dtype_of(int wire) { return wire == FSDP_TP_WIRE_BFLOAT16 ? FSDP_TP_BFLOAT16 : FSDP_TP_FLOAT32; }

}  // namespace

size_t fsdp_tp_wire_bytes(int wire, size_t count) noexcept {
  if (wire == FSDP_TP_WIRE_INT8) return count + (count + kBlock - 1) / kBlock * sizeof(float);
  return count * fsdp_tp_dtype_size(dtype_of(wire));
}

void fsdp_tp_encode(int wire, void* out, const float* in, size_t count) noexcept {
  if (wire != FSDP_TP_WIRE_INT8) {
    fsdp_tp_cast(out, dtype_of(wire), in, FSDP_TP_FLOAT32, count);
    return;
  }
  for_each_block(count, [&](std::size_t start, std::size_t offset, std::size_t length) {
    quantize(static_cast<std::byte*>(out) + offset, in + start, length);
  });
}

void fsdp_tp_decode(int wire, float* out, const void* in, size_t count) noexcept {
  if (wire != FSDP_TP_WIRE_INT8) {
    fsdp_tp_cast(out, FSDP_TP_FLOAT32, in, dtype_of(wire), count);
    return;
  }
  for_each_block(count, [&](std::size_t start, std::size_t offset, std::size_t length) {
    dequantize(out + start, static_cast<const std::byte*>(in) + offset, length);
  });
}
