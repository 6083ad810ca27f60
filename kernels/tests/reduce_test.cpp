// Reductions against brute force, bit by bit. On a failure look in kernels/shm/reduce_kernels.cpp: the
// ends of the loops in run, the order of the sources, the ops; roundings have their own test, cast_test.

#include "shm/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <type_traits>
#include <vector>

#include "tests/check.h"
#include "tests/reference.h"

namespace {

constexpr int kMaxSources = 8;
constexpr size_t kLargeBytes = 48 << 20;  // kStreamedBytes
constexpr double kFactor = 0.3;           // no float type has it
constexpr int kOps[] = {FSDP_TP_SUM, FSDP_TP_AVG, FSDP_TP_MAX, FSDP_TP_MIN, FSDP_TP_PREMUL_SUM};

template <typename D>
using Buffers = std::vector<std::vector<typename D::Stored>>;

template <typename D>
bool has_op(int op) {
  return !std::is_integral_v<typename D::Computed> || (op != FSDP_TP_AVG && op != FSDP_TP_PREMUL_SUM);
}

template <typename D, typename Out = D>
std::vector<typename Out::Stored> reduced(const Buffers<D>& sources, int op, size_t begin = 0,
                                          size_t count = SIZE_MAX) {
  std::vector<typename Out::Stored> out(std::min(count, sources[0].size() - begin));
  std::vector<const void*> pointers;
  for (const auto& source : sources) pointers.push_back(source.data() + begin);
  CHECK(fsdp_tp_reduce(out.data(), Out::kDtype, pointers.data(), static_cast<int>(sources.size()), out.size(),
                       D::kDtype, op, kFactor) == FSDP_TP_OK);
  return out;
}

// In turn any bits (subnormals, infinities, NaNs), magnitudes over many binades, so that additions
// round and a 16-bit type sees every kind of remainder, and equal values of either sign.
template <typename D>
typename D::Stored random_value(std::mt19937_64& generator, bool any_bits) {
  const uint64_t bits = generator();
  typename D::Stored value;
  std::memcpy(&value, &bits, sizeof(value));
  if (std::is_integral_v<typename D::Computed> || (any_bits && bits >> 62 == 0)) return value;
  const double mantissa = std::normal_distribution<double>()(generator);
  const int exponent = std::uniform_int_distribution<int>(-12, 12)(generator);
  const double x = any_bits && bits >> 62 == 1 ? std::copysign(0, mantissa) : std::ldexp(mantissa, exponent);
  return D::narrow(static_cast<typename D::Computed>(x));
}

template <typename D>
Buffers<D> random_buffers(int num_sources, size_t count, bool any_bits = false) {
  std::mt19937_64 generator(static_cast<unsigned>(num_sources));
  Buffers<D> buffers(num_sources);
  for (auto& buffer : buffers) {
    for (size_t i = 0; i < count; ++i) buffer.push_back(random_value<D>(generator, any_bits));
  }
  return buffers;
}

// Buffers start at bytes of every alignment, and nothing around `out` is written.
template <typename D, typename Out = D>
void test_ops_sources_counts_and_alignments() {
  constexpr size_t kMargin = 64;
  for (const size_t count : {0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 1000, 4097}) {
    for (int num_sources = 1; num_sources <= kMaxSources; ++num_sources) {
      const auto sources = random_buffers<D>(num_sources, count, true);
      for (const int op : kOps) {
        if (!has_op<D>(op)) continue;
        std::vector<typename Out::Stored> expected;
        for (size_t i = 0; i < count; ++i) expected.push_back(Out::narrow(reference<D>(sources, i, op, kFactor)));

        for (const size_t offset : {size_t{0}, sizeof(typename D::Stored), size_t{13}}) {
          const size_t bytes = count * sizeof(typename D::Stored);
          std::vector<std::vector<char>> memory;
          std::vector<const void*> pointers;
          for (const auto& source : sources) {
            const size_t begin = offset * (1 + memory.size());
            memory.emplace_back(bytes + begin + 1);
            if (bytes > 0) std::memcpy(memory.back().data() + begin, source.data(), bytes);
            pointers.push_back(memory.back().data() + begin);
          }
          std::vector<char> out(kMargin + offset + count * sizeof(typename Out::Stored) + kMargin, 77);
          char* begin = out.data() + kMargin + offset;
          CHECK(fsdp_tp_reduce(begin, Out::kDtype, pointers.data(), num_sources, count, D::kDtype, op, kFactor) ==
                FSDP_TP_OK);
          for (size_t i = 0; i < count; ++i) {
            typename Out::Stored value;
            std::memcpy(&value, begin + i * sizeof(value), sizeof(value));
            CHECK(same<Out>(value, expected[i]));
          }
          for (char* byte = out.data(); byte < begin; ++byte) CHECK(*byte == 77);
          for (size_t i = out.size() - kMargin; i < out.size(); ++i) CHECK(out[i] == 77);
        }
      }
    }
  }
}

// The bits of an element may not depend on where it lies in the buffer: ranks reduce different slices.
template <typename D>
void test_slices_have_the_same_bits() {
  const auto sources = random_buffers<D>(5, 2000);
  const auto whole = reduced<D>(sources, FSDP_TP_SUM);
  for (size_t begin = 0; begin < 70; ++begin) {
    const auto slice = reduced<D>(sources, FSDP_TP_SUM, begin, 1111);
    CHECK(std::memcmp(slice.data(), whole.data() + begin, slice.size() * sizeof(slice[0])) == 0);
  }
}

constexpr size_t kPeriod = 4096;

template <typename T>
std::vector<T> repeated(const std::vector<T>& period, size_t count) {
  std::vector<T> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = period[i % period.size()];
  return values;
}

// Large outputs are streamed past the caches, whether or not they are aligned.
template <typename D, typename Out = D>
void test_large_has_the_bits_of_its_slices() {
  using T = typename Out::Stored;
  constexpr size_t kCount = kLargeBytes / sizeof(T) + 1013;
  const auto sources = random_buffers<D>(2, kPeriod);
  const auto whole = repeated(reduced<D, Out>(sources, FSDP_TP_SUM), kCount);
  const auto first = repeated(sources[0], kCount), second = repeated(sources[1], kCount);
  const void* pointers[] = {first.data(), second.data()};
  std::vector<char> out((kCount + 2) * sizeof(T));
  for (const size_t offset : {size_t{0}, sizeof(T), size_t{1}}) {
    std::fill(out.begin(), out.end(), 77);
    char* begin = out.data() + offset;
    CHECK(fsdp_tp_reduce(begin, Out::kDtype, pointers, 2, kCount, D::kDtype, FSDP_TP_SUM, 0) == FSDP_TP_OK);
    CHECK(std::memcmp(begin, whole.data(), kCount * sizeof(T)) == 0);
    CHECK(begin[kCount * sizeof(T)] == 77 && (offset == 0 || begin[-1] == 77));
  }
}

template <typename D>
void test_out_may_be_a_source() {
  const auto sources = random_buffers<D>(4, kPeriod);
  const auto expected = reduced<D>(sources, FSDP_TP_SUM);
  for (const size_t count : {size_t{1500}, kLargeBytes / sizeof(typename D::Stored)}) {
    const auto whole = repeated(expected, count);
    for (size_t rank = 0; rank < sources.size(); ++rank) {
      Buffers<D> in_place;
      std::vector<const void*> pointers;
      for (const auto& source : sources) in_place.push_back(repeated(source, count));
      for (const auto& source : in_place) pointers.push_back(source.data());
      CHECK(fsdp_tp_reduce(in_place[rank].data(), D::kDtype, pointers.data(), static_cast<int>(sources.size()), count,
                           D::kDtype, FSDP_TP_SUM, 0) == FSDP_TP_OK);
      CHECK(in_place[rank] == whole);
      if (count > kPeriod) break;  // one rank will do
    }
  }
}

// Not for float16, whose range is narrower than the precision it is summed in.
template <typename D>
void test_order_is_that_of_the_sources() {
  const auto large = static_cast<typename D::Computed>(0x1p60);
  const auto big = D::narrow(large), minus_big = D::narrow(-large), one = D::narrow(1);
  CHECK(D::widen(reduced<D>({{big}, {one}, {minus_big}}, FSDP_TP_SUM)[0]) == 0);
  CHECK(D::widen(reduced<D>({{big}, {minus_big}, {one}}, FSDP_TP_SUM)[0]) == 1);
}

template <typename D>
void test_16_bit_sums_round_once() {
  // Rounding after every addition would stay: half a last place is a tie, and the start is even.
  const double start = D::kDtype == FSDP_TP_FLOAT16 ? 2048 : 256;
  const auto big = D::narrow(static_cast<float>(start)), one = D::narrow(1);
  CHECK(D::widen(reduced<D>({{big}, {one}, {one}}, FSDP_TP_SUM)[0]) == start + 2);
  CHECK((reduced<D, Float32>({{big}, {one}}, FSDP_TP_SUM)[0]) == start + 1);
}

template <typename D>
void test_bad_arguments() {
  typename D::Stored out = 5;
  const typename D::Stored one = 1;
  const void* sources[] = {&one, &one};
  const void* with_null[] = {&one, nullptr};
  const int dtype = D::kDtype;
  const auto reduce = [](void* out, int out_dtype, const void* const* sources, int num_sources, int dtype, int op) {
    return fsdp_tp_reduce(out, out_dtype, sources, num_sources, 1, dtype, op, 1);
  };
  CHECK(reduce(&out, -1, sources, 2, -1, FSDP_TP_SUM) == FSDP_TP_BAD_DTYPE);
  CHECK(reduce(&out, 6, sources, 2, 6, FSDP_TP_SUM) == FSDP_TP_BAD_DTYPE);
  for (int out_dtype = -1; out_dtype <= 6; ++out_dtype) {
    if (out_dtype == dtype || (sizeof(out) == 2 && out_dtype == FSDP_TP_FLOAT32)) continue;
    CHECK(reduce(&out, out_dtype, sources, 2, dtype, FSDP_TP_SUM) == FSDP_TP_BAD_DTYPE);
  }
  for (const int op : {-1, 5}) CHECK(reduce(&out, dtype, sources, 2, dtype, op) == FSDP_TP_BAD_OP);
  for (const int op : kOps) {
    if (!has_op<D>(op)) CHECK(reduce(&out, dtype, sources, 2, dtype, op) == FSDP_TP_BAD_OP);
  }
  for (const int n : {0, -1}) CHECK(reduce(&out, dtype, sources, n, dtype, FSDP_TP_SUM) == FSDP_TP_BAD_NUM_SOURCES);
  CHECK(reduce(nullptr, dtype, sources, 2, dtype, FSDP_TP_SUM) == FSDP_TP_NULL_POINTER);
  CHECK(reduce(&out, dtype, nullptr, 2, dtype, FSDP_TP_SUM) == FSDP_TP_NULL_POINTER);
  CHECK(reduce(&out, dtype, with_null, 2, dtype, FSDP_TP_SUM) == FSDP_TP_NULL_POINTER);
  CHECK(out == 5);
  CHECK(fsdp_tp_reduce(nullptr, dtype, nullptr, 1, 0, dtype, FSDP_TP_SUM, 1) == FSDP_TP_OK);
  CHECK(fsdp_tp_dtype_size(dtype) == sizeof(out));
}

template <typename D>
void test_dtype() {
  test_ops_sources_counts_and_alignments<D>();
  test_slices_have_the_same_bits<D>();
  test_large_has_the_bits_of_its_slices<D>();
  test_out_may_be_a_source<D>();
  test_bad_arguments<D>();
}

template <typename D>
void test_16_bit() {
  test_dtype<D>();
  test_ops_sources_counts_and_alignments<D, Float32>();
  test_large_has_the_bits_of_its_slices<D, Float32>();
  test_16_bit_sums_round_once<D>();
}

}  // namespace

int main() {
  skip_unless_instruction_set_is_as_asked();
  for (const int unknown : {-1, 6}) CHECK(fsdp_tp_dtype_size(unknown) == 0);
  test_dtype<Float32>();
  test_dtype<Float64>();
  test_dtype<Int32>();
  test_dtype<Int64>();
  test_16_bit<BFloat16>();
  test_16_bit<Float16>();
  test_order_is_that_of_the_sources<Float32>();
  test_order_is_that_of_the_sources<Float64>();
  test_order_is_that_of_the_sources<BFloat16>();
}
