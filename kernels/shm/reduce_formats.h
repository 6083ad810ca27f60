// Number formats as GCC's vector types, as wide as the registers of the instruction set this is compiled
// for. Only for reduce_kernels.cpp, which says why there is nothing inline here that has a name elsewhere.

#pragma once

#include <cstdint>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;  // SSE2, NEON; anywhere else the compiler splits it
#endif

template <typename T, int kLanes>
struct VectorOf {
  using type __attribute__((vector_size(kLanes * sizeof(T)))) = T;
};
template <typename T, int kLanes>
using Vector = typename VectorOf<T, kLanes>::type;

constexpr int kFloats = kVectorBytes / sizeof(float);
using Floats = Vector<float, kFloats>;
using Words = Vector<uint32_t, kFloats>;
using Integers = Vector<int32_t, kFloats>;
using Halves = Vector<uint16_t, kFloats>;

// __builtin_convertvector would do for all of these, but GCC 12 makes many instructions of one. The
// masks are all ones: the functions without a mask warn of their own undefined values in GCC 12.
#if defined(__AVX512F__)
Words extend(Halves value) {
  return __builtin_bit_cast(Words, _mm512_maskz_cvtepu16_epi32(0xffff, __builtin_bit_cast(__m256i, value)));
}
Halves truncate(Words value) {
  return __builtin_bit_cast(Halves, _mm512_maskz_cvtepi32_epi16(0xffff, __builtin_bit_cast(__m512i, value)));
}
#elif defined(__AVX2__)
Words extend(Halves value) {
  return __builtin_bit_cast(Words, _mm256_cvtepu16_epi32(__builtin_bit_cast(__m128i, value)));
}
// Of values that fit: larger ones saturate.
Halves truncate(Words value) {
  const auto words = __builtin_bit_cast(__m256i, value);
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
  return __builtin_bit_cast(Halves, _mm256_castsi256_si128(halves));
}
#else
Words extend(Halves value) { return __builtin_convertvector(value, Words); }
Halves truncate(Words value) { return __builtin_convertvector(value, Halves); }
#endif

// A format has a stored type, a type to compute in, and conversions between vectors of the two.
template <typename T>
struct Plain {
  using Stored = T;
  using Computed = T;
  static Vector<T, kVectorBytes / sizeof(T)> widen(Vector<T, kVectorBytes / sizeof(T)> value) { return value; }
  static Vector<T, kVectorBytes / sizeof(T)> narrow(Vector<T, kVectorBytes / sizeof(T)> value) { return value; }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Computed = float;

  static Floats widen(Halves value) { return __builtin_bit_cast(Floats, extend(value) << 16); }

  static Halves narrow(Floats value) {
    const auto bits = __builtin_bit_cast(Words, value);
    // Just under half of the last kept place, and one more if that place is odd: ties go to even.
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    // Rounding could carry a NaN over into infinity.
    return truncate(value == value ? rounded : Words{} + 0x7fc0);
  }
};

struct Float16 {
  using Stored = uint16_t;
  using Computed = float;

#if defined(__AVX512F__)
  static Floats widen(Halves value) { return _mm512_maskz_cvtph_ps(0xffff, __builtin_bit_cast(__m256i, value)); }
  static Halves narrow(Floats value) {
    const int rounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return __builtin_bit_cast(Halves, _mm512_maskz_cvtps_ph(0xffff, value, rounding));
  }
#elif defined(__F16C__)
  static Floats widen(Halves value) { return _mm256_cvtph_ps(__builtin_bit_cast(__m128i, value)); }
  static Halves narrow(Floats value) {
    return __builtin_bit_cast(Halves, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
#else
  static constexpr int kRebias = 127 - 15;  // between the exponent biases of float32 and float16

  static Floats widen(Halves value) {
    const auto half = __builtin_bit_cast(Integers, extend(value));
    const Integers magnitude = half & 0x7fff;
    const Integers normal = (magnitude << 13) + (kRebias << 23);
    // No step of this is a subnormal float32, so it is right even where the processor flushes those.
    const Floats subnormal = __builtin_convertvector(magnitude, Floats) * 0x1p-24f;
    Integers bits = magnitude < 0x400 ? __builtin_bit_cast(Integers, subnormal) : normal;
    bits += (magnitude > 0x7bff) & (kRebias << 23);
    bits |= (magnitude > 0x7c00) & 0x400000;  // NaNs are quiet, as the instruction has it
    return __builtin_bit_cast(Floats, bits | ((half & 0x8000) << 16));
  }

  static Halves narrow(Floats value) {
    const auto bits = __builtin_bit_cast(Integers, value);
    const Integers magnitude = bits & 0x7fffffff;
    // As for bfloat16; what rounds up from the largest float16 carries into infinity.
    // Unsigned, since it overflows for a NaN, whose result is another.
    const auto words = __builtin_bit_cast(Words, magnitude);
    const Words normal = ((words + 0xfff + ((words >> 13) & 1)) >> 13) - (kRebias << 10);
    // The last place of 0.5 is that of a subnormal float16, so the addition rounds to it.
    const Floats shifted = __builtin_bit_cast(Floats, magnitude) + 0.5f;
    const Integers subnormal = __builtin_bit_cast(Integers, shifted) - __builtin_bit_cast(int32_t, 0.5f);
    const Integers nan = ((magnitude >> 13) & 0x3ff) | 0x7e00;
    Integers half = magnitude < ((kRebias + 1) << 23) ? subnormal : __builtin_bit_cast(Integers, normal);
    half = magnitude > ((kRebias + 31) << 23) - 1 ? Integers{} + 0x7c00 : half;
    half = magnitude > 0x7f800000 ? nan : half;
    return truncate(__builtin_bit_cast(Words, half | ((bits >> 16) & 0x8000)));
  }
#endif
};

}  // namespace
