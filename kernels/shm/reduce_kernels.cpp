// Loops over GCC's vector types, as wide as the registers of the instruction set this is compiled for.
//
// Other files must never run what is compiled here for AVX: everything but the entry point at the end
// is in an anonymous namespace, and no inline function or template of the standard library is used,
// since of their copies the linker keeps any one.

#include "shm/reduce_kernels.h"

#include <cstddef>
#include <cstdint>

#include "shm/copy.h"
#include "shm/reduce.h"
#include "shm/reduce_formats.h"

namespace {

using fsdp_tp::ReduceArguments;

// An op starts with the first source, goes on with the next ones, and finishes.
struct Sum {
  // Not 0 + value, which would turn -0 into +0.
  auto first(auto value) const { return value; }
  auto next(auto sum, auto value) const { return sum + value; }
  auto finish(auto sum) const { return sum; }
};

template <typename T>
struct SumDivided : Sum {
  T divisor;
  auto finish(auto sum) const { return sum / divisor; }
};

template <typename T>
struct SumScaled : Sum {
  T scale;
  auto finish(auto sum) const { return sum * scale; }
};

template <typename T>
struct PremulSum {
  T factor;
  auto first(auto value) const { return factor * value; }
  auto next(auto sum, auto value) const { return sum + factor * value; }
  auto finish(auto sum) const { return sum; }
};

struct Max {
  auto first(auto value) const { return value; }
  auto next(auto max, auto value) const { return (value > max) | (value != value) ? value : max; }
  auto finish(auto max) const { return max; }
};

struct Min {
  auto first(auto value) const { return value; }
  auto next(auto min, auto value) const { return (value < min) | (value != value) ? value : min; }
  auto finish(auto min) const { return min; }
};

template <typename Format>
struct Memory {
  static constexpr int kLanes = kVectorBytes / sizeof(typename Format::Computed);
  using Element = typename Format::Stored;
  using Stored = Vector<Element, kLanes>;
  using Computed = Vector<typename Format::Computed, kLanes>;

  [[gnu::always_inline]] static Computed load(const void* source, size_t begin, size_t size) {
    Stored stored{};
    __builtin_memcpy(&stored, static_cast<const char*>(source) + begin * sizeof(Element), size * sizeof(Element));
    return Format::widen(stored);
  }

  [[gnu::always_inline]] static void store(void* out, size_t begin, size_t size, Stored value) {
    __builtin_memcpy(static_cast<char*>(out) + begin * sizeof(Element), &value, size * sizeof(Element));
  }

#ifdef __AVX2__
  // Streaming bfloat16 16 bytes at a time takes up to twice as long as storing it.
  static constexpr bool kStreams = sizeof(Stored) >= 32;

  // A whole vector to an aligned address, past the caches.
  [[gnu::always_inline]] static void stream(void* out, size_t begin, Stored value) {
    void* address = static_cast<Element*>(out) + begin;
    if constexpr (sizeof(Stored) == 32) {
      _mm256_stream_si256(static_cast<__m256i*>(address), __builtin_bit_cast(__m256i, value));
#ifdef __AVX512F__
    } else {
      _mm512_stream_si512(static_cast<__m512i*>(address), __builtin_bit_cast(__m512i, value));
#endif
    }
  }
#endif
};

#ifdef __AVX2__
bool is_streamed(const ReduceArguments& r, size_t element_size) {
  if (r.written < fsdp_tp::kStreamedBytes || reinterpret_cast<uintptr_t>(r.out) % element_size != 0) return false;
  for (int rank = 0; rank < r.num_sources; ++rank) {
    if (r.sources[rank] == r.out) return false;  // the line is read anyway
  }
  return true;
}
#endif

// Reduces kVectors vectors of `size` elements each. All reads come before the first write, which is
// what lets `out` be one of the sources.
template <typename From, typename To, int kVectors, bool kStreamed = false>
[[gnu::always_inline]] inline void step(const ReduceArguments& r, auto op, size_t begin, size_t size) {
  constexpr int kLanes = Memory<From>::kLanes;
  typename Memory<From>::Computed result[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    result[v] = op.first(Memory<From>::load(r.sources[0], begin + v * kLanes, size));
  }
  for (int rank = 1; rank < r.num_sources; ++rank) {
    for (int v = 0; v < kVectors; ++v) {
      result[v] = op.next(result[v], Memory<From>::load(r.sources[rank], begin + v * kLanes, size));
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const auto stored = To::narrow(op.finish(result[v]));
    if constexpr (kStreamed) {
      Memory<To>::stream(r.out, begin + v * kLanes, stored);
    } else {
      Memory<To>::store(r.out, begin + v * kLanes, size, stored);
    }
  }
}

template <typename From, typename To>
void run(const ReduceArguments r, auto op) {  // a copy, which no store can alias
  constexpr size_t kLanes = Memory<From>::kLanes;
  constexpr int kVectors = 4;  // hides the latency of the additions and the loop over sources
  constexpr size_t kStep = kVectors * kLanes;
  size_t i = 0;
#ifdef __AVX2__
  if constexpr (Memory<To>::kStreams) {
    if (is_streamed(r, sizeof(typename To::Stored))) {
      i = -reinterpret_cast<uintptr_t>(r.out) % sizeof(typename Memory<To>::Stored) / sizeof(typename To::Stored);
      i = i < r.count ? i : r.count;
      step<From, To, 1>(r, op, 0, i);
      for (; r.count - i >= kStep; i += kStep) step<From, To, kVectors, true>(r, op, i, kLanes);
      _mm_sfence();  // what the caller writes next must not be seen before `out` is
    }
  }
#endif
  for (; r.count - i >= kStep; i += kStep) step<From, To, kVectors>(r, op, i, kLanes);
  for (; r.count - i >= kLanes; i += kLanes) step<From, To, 1>(r, op, i, kLanes);
  if (i < r.count) step<From, To, 1>(r, op, i, r.count - i);
}

template <typename From, typename To>
void reduce_floats(const ReduceArguments& r) {
  using T = typename From::Computed;
  const T n = static_cast<T>(r.num_sources);
  switch (r.op) {
    case FSDP_TP_SUM:
      return run<From, To>(r, Sum{});
    case FSDP_TP_AVG:
      // The inverse of a power of two is exact, so its product has the bits of the quotient, much sooner.
      if ((r.num_sources & (r.num_sources - 1)) == 0) return run<From, To>(r, SumScaled<T>{{}, 1 / n});
      return run<From, To>(r, SumDivided<T>{{}, n});
    case FSDP_TP_MAX:
      return run<From, To>(r, Max{});
    case FSDP_TP_MIN:
      return run<From, To>(r, Min{});
    case FSDP_TP_PREMUL_SUM:
      return run<From, To>(r, PremulSum<T>{static_cast<T>(r.factor)});
  }
}

// Unsigned sums wrap around, where signed ones would be undefined.
template <typename Signed, typename Unsigned>
void reduce_integers(const ReduceArguments& r) {
  switch (r.op) {
    case FSDP_TP_SUM:
      return run<Plain<Unsigned>, Plain<Unsigned>>(r, Sum{});
    case FSDP_TP_MAX:
      return run<Plain<Signed>, Plain<Signed>>(r, Max{});
    case FSDP_TP_MIN:
      return run<Plain<Signed>, Plain<Signed>>(r, Min{});
  }
}

}  // namespace

void fsdp_tp::FSDP_TP_KERNELS::reduce(const ReduceArguments& r) {
  const bool to_float32 = r.out_dtype == FSDP_TP_FLOAT32;
  switch (r.dtype) {
    case FSDP_TP_FLOAT32:
      if (r.out_dtype == FSDP_TP_BFLOAT16) return run<Plain<float>, BFloat16>(r, Sum{});
      if (r.out_dtype == FSDP_TP_FLOAT16) return run<Plain<float>, Float16>(r, Sum{});
      return reduce_floats<Plain<float>, Plain<float>>(r);
    case FSDP_TP_FLOAT64:
      return reduce_floats<Plain<double>, Plain<double>>(r);
    case FSDP_TP_BFLOAT16:
      return to_float32 ? reduce_floats<BFloat16, Plain<float>>(r) : reduce_floats<BFloat16, BFloat16>(r);
    case FSDP_TP_FLOAT16:
      return to_float32 ? reduce_floats<Float16, Plain<float>>(r) : reduce_floats<Float16, Float16>(r);
    case FSDP_TP_INT32:
      return reduce_integers<int32_t, uint32_t>(r);
    case FSDP_TP_INT64:
      return reduce_integers<int64_t, uint64_t>(r);
  }
}
