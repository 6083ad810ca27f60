// Sums against brute force. On a failure look in kernels/shm/reduce.cpp: block edges, the order of
// the sources, or bfloat16 rounding.

#include "shm/reduce.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tests/check.h"

namespace {

constexpr int kMaxSources = 8;

// One type per dtype: how it is stored, and what a stored value means as a double.
struct Float32 {
  static constexpr int kDtype = FSDP_TP_FLOAT32;
  using Stored = float;
  static double value(Stored x) { return x; }
  // Adding two floats in double and rounding to float is exactly float addition: 53 >= 2 * 24 + 2.
  static double add(double a, double b) { return static_cast<float>(a + b); }
  static Stored round(double x) { return static_cast<float>(x); }
};

struct Float64 {
  static constexpr int kDtype = FSDP_TP_FLOAT64;
  using Stored = double;
  static double value(Stored x) { return x; }
  static double add(double a, double b) { return a + b; }
  static Stored round(double x) { return x; }
};

struct BFloat16 {
  static constexpr int kDtype = FSDP_TP_BFLOAT16;
  using Stored = uint16_t;
  static double value(Stored x) { return std::bit_cast<float>(uint32_t{x} << 16); }
  static double add(double a, double b) { return Float32::add(a, b); }
  // By the definition of the format, not by bit tricks: 8 significant bits, exponents down to -126.
  static Stored round(double x) {
    if (std::isnan(x)) return 0x7fc0;
    if (std::isfinite(x) && x != 0) {
      const int last_place = std::max(std::ilogb(x), -126) - 7;
      x = std::ldexp(std::nearbyint(std::ldexp(x, -last_place)), last_place);  // ties to even
    }
    // From 2^128 on the float conversion would be undefined; what lies below is exact.
    const float rounded =
        std::abs(x) < 0x1p128 ? static_cast<float>(x) : std::copysign(std::numeric_limits<float>::infinity(), x);
    return static_cast<uint16_t>(std::bit_cast<uint32_t>(rounded) >> 16);
  }
};

template <typename D>
using Buffers = std::vector<std::vector<typename D::Stored>>;

template <typename D>
int reduce_sum(typename D::Stored* out, const Buffers<D>& sources, size_t begin, size_t count) {
  const void* pointers[kMaxSources];
  for (size_t rank = 0; rank < sources.size(); ++rank) pointers[rank] = sources[rank].data() + begin;
  return fsdp_tp_reduce_sum(out, pointers, static_cast<int>(sources.size()), count, D::kDtype);
}

template <typename D>
std::vector<typename D::Stored> reduce_sum(const Buffers<D>& sources) {
  std::vector<typename D::Stored> out(sources[0].size());
  CHECK(reduce_sum<D>(out.data(), sources, 0, out.size()) == FSDP_TP_OK);
  return out;
}

template <typename D>
typename D::Stored expected(const Buffers<D>& sources, size_t i) {
  double sum = D::value(sources[0][i]);
  for (size_t rank = 1; rank < sources.size(); ++rank) sum = D::add(sum, D::value(sources[rank][i]));
  return D::round(sum);
}

template <typename D>
bool same(typename D::Stored a, typename D::Stored b) {
  if (std::isnan(D::value(a))) return std::isnan(D::value(b));
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

// Magnitudes over many binades, so that additions round and bfloat16 sees every kind of remainder.
template <typename D>
Buffers<D> random_buffers(int num_sources, size_t count) {
  std::mt19937 generator(static_cast<unsigned>(num_sources));
  std::normal_distribution<double> mantissa;
  std::uniform_int_distribution<int> exponent(-12, 12);
  Buffers<D> buffers(num_sources);
  for (auto& buffer : buffers) {
    for (size_t i = 0; i < count; ++i) {
      buffer.push_back(D::round(std::ldexp(mantissa(generator), exponent(generator))));
    }
  }
  return buffers;
}

template <typename D>
void test_sizes_and_sources() {
  for (const size_t count : {0, 1, 2, 7, 511, 512, 513, 1025, 100'003}) {
    for (int num_sources = 1; num_sources <= kMaxSources; ++num_sources) {
      const Buffers<D> sources = random_buffers<D>(num_sources, count);
      const typename D::Stored canary = D::round(-77);
      std::vector<typename D::Stored> out(count + 1, canary);
      CHECK(reduce_sum<D>(out.data(), sources, 0, count) == FSDP_TP_OK);
      for (size_t i = 0; i < count; ++i) CHECK(same<D>(out[i], expected<D>(sources, i)));
      CHECK(same<D>(out[count], canary));
    }
  }
}

// The bits of an element may not depend on where it lies in the buffer: ranks reduce different slices.
template <typename D>
void test_slices_have_the_same_bits() {
  const Buffers<D> sources = random_buffers<D>(5, 2000);
  const auto whole = reduce_sum<D>(sources);
  for (size_t begin = 0; begin < 40; ++begin) {
    std::vector<typename D::Stored> slice(1111);
    CHECK(reduce_sum<D>(slice.data(), sources, begin, slice.size()) == FSDP_TP_OK);
    CHECK(std::memcmp(slice.data(), whole.data() + begin, slice.size() * sizeof(slice[0])) == 0);
  }
}

template <typename D>
void test_out_may_be_a_source() {
  const Buffers<D> sources = random_buffers<D>(4, 1500);
  const auto whole = reduce_sum<D>(sources);
  for (size_t rank = 0; rank < sources.size(); ++rank) {
    Buffers<D> in_place = sources;
    CHECK(reduce_sum<D>(in_place[rank].data(), in_place, 0, whole.size()) == FSDP_TP_OK);
    CHECK(in_place[rank] == whole);
  }
}

template <typename D>
void test_order_is_that_of_the_sources() {
  const auto big = D::round(0x1p60), minus_big = D::round(-0x1p60), one = D::round(1);
  CHECK(D::value(reduce_sum<D>({{big}, {one}, {minus_big}})[0]) == 0);
  CHECK(D::value(reduce_sum<D>({{big}, {minus_big}, {one}})[0]) == 1);
}

template <typename D>
void test_special_values() {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Buffers<D> sources = {
      {D::round(inf), D::round(-inf), D::round(inf), D::round(nan), D::round(1), D::round(-0.0)},
      {D::round(1), D::round(-1), D::round(-inf), D::round(1), D::round(nan), D::round(-0.0)},
  };
  const auto out = reduce_sum<D>(sources);
  CHECK(D::value(out[0]) == inf);
  CHECK(D::value(out[1]) == -inf);
  for (int i = 2; i <= 4; ++i) CHECK(std::isnan(D::value(out[i])));
  CHECK(D::value(out[5]) == 0 && std::signbit(D::value(out[5])));
}

template <typename D>
void test_bad_arguments() {
  typename D::Stored out = D::round(5);
  const typename D::Stored one = D::round(1);
  const void* sources[] = {&one, &one};
  const void* with_null[] = {&one, nullptr};
  const int dtype = D::kDtype;
  CHECK(fsdp_tp_reduce_sum(&out, sources, 2, 1, -1) == FSDP_TP_BAD_DTYPE);
  CHECK(fsdp_tp_reduce_sum(&out, sources, 2, 1, 3) == FSDP_TP_BAD_DTYPE);
  CHECK(fsdp_tp_reduce_sum(&out, sources, 0, 1, dtype) == FSDP_TP_BAD_NUM_SOURCES);
  CHECK(fsdp_tp_reduce_sum(&out, sources, -1, 1, dtype) == FSDP_TP_BAD_NUM_SOURCES);
  CHECK(fsdp_tp_reduce_sum(nullptr, sources, 2, 1, dtype) == FSDP_TP_NULL_POINTER);
  CHECK(fsdp_tp_reduce_sum(&out, nullptr, 2, 1, dtype) == FSDP_TP_NULL_POINTER);
  CHECK(fsdp_tp_reduce_sum(&out, with_null, 2, 1, dtype) == FSDP_TP_NULL_POINTER);
  CHECK(same<D>(out, D::round(5)));
  CHECK(fsdp_tp_reduce_sum(nullptr, nullptr, 1, 0, dtype) == FSDP_TP_OK);
}

// Every finite bfloat16 x, plus k eighths of its last place: below, on and above every tie, and
// over the top into infinity.
void test_bfloat16_rounding() {
  Buffers<BFloat16> sources(2);
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto x = static_cast<uint16_t>(bits);
    const double value = BFloat16::value(x);
    if (!std::isfinite(value) || value == 0) continue;
    for (int eighths = -8; eighths <= 8; ++eighths) {
      sources[0].push_back(x);
      sources[1].push_back(BFloat16::round(std::ldexp(eighths, std::ilogb(value) - 7 - 3)));
    }
  }
  const auto out = reduce_sum<BFloat16>(sources);
  for (size_t i = 0; i < out.size(); ++i) CHECK(out[i] == expected<BFloat16>(sources, i));
}

// Every bfloat16, NaNs included, comes back from a sum over one source.
void test_bfloat16_round_trip() {
  Buffers<BFloat16> source(1);
  for (uint32_t bits = 0; bits < 0x10000; ++bits) source[0].push_back(static_cast<uint16_t>(bits));
  const auto out = reduce_sum<BFloat16>(source);
  for (size_t i = 0; i < out.size(); ++i) CHECK(same<BFloat16>(out[i], source[0][i]));
}

void test_bfloat16_rounds_once() {
  // Rounding after every addition would give 256: 257 is a tie, and 256 the even neighbour.
  const auto big = BFloat16::round(256), one = BFloat16::round(1);
  CHECK(BFloat16::value(reduce_sum<BFloat16>({{big}, {one}, {one}})[0]) == 258);
}

template <typename D>
void test_dtype() {
  test_sizes_and_sources<D>();
  test_slices_have_the_same_bits<D>();
  test_out_may_be_a_source<D>();
  test_order_is_that_of_the_sources<D>();
  test_special_values<D>();
  test_bad_arguments<D>();
}

}  // namespace

int main() {
  test_dtype<Float32>();
  test_dtype<Float64>();
  test_dtype<BFloat16>();
  test_bfloat16_rounding();
  test_bfloat16_round_trip();
  test_bfloat16_rounds_once();
}
