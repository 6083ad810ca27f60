// What values look like after a journey as bf16 or int8, against arithmetic in fp64.

#include "shm/wire.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "check.h"

namespace {

std::vector<float> travel(int wire, const std::vector<float>& values) {
  // One byte more, to see that no more is written than was said.
  std::vector<unsigned char> encoded(fsdp_tp_wire_bytes(wire, values.size()) + 1, 0xa5);
  std::vector<float> decoded(values.size() + 1, 12345.0f);
  fsdp_tp_encode(wire, encoded.data(), values.data(), values.size());
  CHECK(encoded.back() == 0xa5);
  fsdp_tp_decode(wire, decoded.data(), encoded.data(), values.size());
  CHECK(decoded.back() == 12345.0f);
  decoded.pop_back();
  return decoded;
}

void within_the_bound(std::size_t count, float size) {
  std::mt19937 random(static_cast<unsigned>(count));
  std::normal_distribution<float> normal(0, size);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  CHECK(travel(FSDP_TP_EXACT, values) == values);
  const std::vector<float> halved = travel(FSDP_TP_WIRE_BFLOAT16, values);
  for (std::size_t i = 0; i < count; ++i) CHECK(std::abs(double{halved[i]} - values[i]) <= std::abs(values[i]) / 256.0);
  const std::vector<float> quantised = travel(FSDP_TP_WIRE_INT8, values);
  for (std::size_t start = 0; start < count; start += FSDP_TP_WIRE_BLOCK) {
    const std::size_t end = std::min(count, start + FSDP_TP_WIRE_BLOCK);
    double largest = 0, error = 0;
    for (std::size_t i = start; i < end; ++i) {
      largest = std::max(largest, std::abs(double{values[i]}));
      error = std::max(error, std::abs(double{quantised[i]} - values[i]));
    }
    // Half a step, and the rounding of the scale, its reciprocal and two products in fp32.
    CHECK(error <= largest / 254 * (1 + 1e-4));
    // And it does lose something, or nothing was encoded.
    CHECK(error > 0 || largest == 0 || end - start == 1);
  }
}

}  // namespace

int main() {
  for (const std::size_t count : {0, 1, 2, 127, 128, 129, 1000, 4096}) {
    for (const float size : {1e-30f, 1e-3f, 1.0f, 1e30f}) within_the_bound(count, size);
  }
  CHECK(fsdp_tp_wire_bytes(FSDP_TP_WIRE_INT8, 129) == 129 + 8);
  const std::vector<float> zeros(130, 0.0f);
  CHECK(travel(FSDP_TP_WIRE_INT8, zeros) == zeros);
  // One bad value must not pass for a good one, and spoils only its block.
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> values(300, 1.0f);
    values[130] = bad;
    const std::vector<float> result = travel(FSDP_TP_WIRE_INT8, values);
    for (std::size_t i = 0; i < 300; ++i) CHECK(i / 128 == 1 ? std::isnan(result[i]) : result[i] == 1.0f);
  }
  return 0;
}
