// Casts against the definition of the formats. On a failure look at BFloat16 and Float16 in
// kernels/shm/reduce_kernels.cpp.

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "shm/reduce.h"
#include "tests/check.h"
#include "tests/reference.h"

namespace {

template <typename D>
std::vector<uint16_t> narrowed(const std::vector<float>& in) {
  std::vector<uint16_t> out(in.size());
  CHECK(fsdp_tp_cast(out.data(), D::kDtype, in.data(), FSDP_TP_FLOAT32, in.size()) == FSDP_TP_OK);
  return out;
}

template <typename D>
std::vector<float> widened(const std::vector<uint16_t>& in) {
  std::vector<float> out(in.size());
  CHECK(fsdp_tp_cast(out.data(), FSDP_TP_FLOAT32, in.data(), D::kDtype, in.size()) == FSDP_TP_OK);
  return out;
}

std::vector<uint16_t> all_values() {
  std::vector<uint16_t> values(0x10000);
  for (size_t bits = 0; bits < values.size(); ++bits) values[bits] = static_cast<uint16_t>(bits);
  return values;
}

template <typename D>
void test_every_value_widens_and_comes_back() {
  const auto in = all_values();
  const auto wide = widened<D>(in);
  const auto back = narrowed<D>(wide);
  for (size_t i = 0; i < in.size(); ++i) {
    CHECK(same<Float32>(wide[i], D::widen(in[i])));
    CHECK(same<D>(back[i], in[i]));
  }
}

// Between every value and the next, and beyond the largest: the tie and its two neighbours.
template <typename D>
void test_every_tie() {
  std::vector<float> in;
  for (const uint16_t bits : all_values()) {
    if (!std::isfinite(D::widen(bits))) continue;
    const double value = D::widen(bits), magnitude = std::abs(value);
    const int next = (bits & 0x7fff) + 1;
    const double last_place = double{D::widen(D::kInfinity - 1)} - D::widen(D::kInfinity - 2);
    const double place = next == D::kInfinity ? last_place : D::widen(static_cast<uint16_t>(next)) - magnitude;
    const auto tie = static_cast<float>(std::copysign(magnitude + place / 2, value));
    const float infinity = std::numeric_limits<float>::infinity();
    for (const float x : {tie, std::nextafter(tie, infinity), std::nextafter(tie, -infinity)}) in.push_back(x);
  }
  const auto out = narrowed<D>(in);
  for (size_t i = 0; i < in.size(); ++i) CHECK(same<D>(out[i], D::narrow(in[i])));
}

// Any float32: NaNs whose payload is only in the bits cut off, subnormals, what overflows.
template <typename D>
void test_random_and_special_floats() {
  std::vector<float> in;
  for (const uint32_t bits : {0x00000000u, 0x00000001u, 0x007fffffu, 0x00800000u, 0x7f7fffffu, 0x7f800000u, 0x7f800001u,
                              0x7f801fffu, 0x7fbfffffu, 0x7fc00000u, 0x7fffffffu}) {
    in.push_back(std::bit_cast<float>(bits));
    in.push_back(std::bit_cast<float>(bits | 0x80000000u));
  }
  std::mt19937 generator(1);
  for (int i = 0; i < 1'000'000; ++i) in.push_back(std::bit_cast<float>(static_cast<uint32_t>(generator())));
  const auto out = narrowed<D>(in);
  for (size_t i = 0; i < in.size(); ++i) CHECK(same<D>(out[i], D::narrow(in[i])));
}

template <typename D>
void test_sizes() {
  for (size_t count = 0; count < 200; ++count) {
    std::vector<float> in(count + 1, 3.5f);
    std::vector<uint16_t> out(count + 1, 7);
    CHECK(fsdp_tp_cast(out.data(), D::kDtype, in.data(), FSDP_TP_FLOAT32, count) == FSDP_TP_OK);
    for (size_t i = 0; i < count; ++i) CHECK(out[i] == D::narrow(3.5f));
    CHECK(out[count] == 7);
    in.assign(count + 1, 0);
    CHECK(fsdp_tp_cast(in.data(), FSDP_TP_FLOAT32, out.data(), D::kDtype, count) == FSDP_TP_OK);
    for (size_t i = 0; i < count; ++i) CHECK(in[i] == 3.5f);
    CHECK(in[count] == 0);
  }
}

void test_same_type_copies() {
  for (int dtype = FSDP_TP_FLOAT32; dtype <= FSDP_TP_INT64; ++dtype) {
    const size_t bytes = 33 * fsdp_tp_dtype_size(dtype);
    std::vector<unsigned char> in(bytes), out(bytes + 1, 77);
    std::mt19937 generator(1);
    for (auto& byte : in) byte = static_cast<unsigned char>(generator());
    CHECK(fsdp_tp_cast(out.data(), dtype, in.data(), dtype, 33) == FSDP_TP_OK);
    CHECK(std::memcmp(out.data(), in.data(), bytes) == 0 && out[bytes] == 77);
    CHECK(fsdp_tp_cast(out.data(), dtype, out.data(), dtype, 33) == FSDP_TP_OK);
    CHECK(std::memcmp(out.data(), in.data(), bytes) == 0);
  }
}

void test_bad_arguments() {
  uint64_t in = 1, out = 5;
  for (int to = -1; to <= FSDP_TP_INT64 + 1; ++to) {
    for (int from = -1; from <= FSDP_TP_INT64 + 1; ++from) {
      const bool to_16_bit = to == FSDP_TP_BFLOAT16 || to == FSDP_TP_FLOAT16;
      const bool from_16_bit = from == FSDP_TP_BFLOAT16 || from == FSDP_TP_FLOAT16;
      if ((to == FSDP_TP_FLOAT32 && from_16_bit) || (from == FSDP_TP_FLOAT32 && to_16_bit)) continue;
      if (to == from && fsdp_tp_dtype_size(to) > 0) continue;
      CHECK(fsdp_tp_cast(&out, to, &in, from, 1) == FSDP_TP_BAD_DTYPE);
    }
  }
  CHECK(fsdp_tp_cast(&out, FSDP_TP_FLOAT32, nullptr, FSDP_TP_FLOAT32, 1) == FSDP_TP_NULL_POINTER);
  CHECK(fsdp_tp_cast(nullptr, FSDP_TP_FLOAT32, &in, FSDP_TP_FLOAT32, 1) == FSDP_TP_NULL_POINTER);
  CHECK(fsdp_tp_cast(nullptr, FSDP_TP_FLOAT32, nullptr, FSDP_TP_BFLOAT16, 0) == FSDP_TP_OK);
  CHECK(out == 5);
}

template <typename D>
void test_format() {
  test_every_value_widens_and_comes_back<D>();
  test_every_tie<D>();
  test_random_and_special_floats<D>();
  test_sizes<D>();
}

}  // namespace

int main() {
  skip_unless_instruction_set_is_as_asked();
  test_format<BFloat16>();
  test_format<Float16>();
  test_same_type_copies();
  test_bad_arguments();
}
