// What reduce.h promises, by the definition of the formats and one element at a time.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>

#include "shm/reduce.h"

// One type per dtype: how it is stored, what it is computed in, and conversions between the two.
template <typename T, int kDtypeValue>
struct Plain {
  static constexpr int kDtype = kDtypeValue;
  using Stored = T;
  using Computed = T;
  static Computed widen(Stored x) { return x; }
  static Stored narrow(Computed x) { return x; }
};

using Float32 = Plain<float, FSDP_TP_FLOAT32>;
using Float64 = Plain<double, FSDP_TP_FLOAT64>;
using Int32 = Plain<int32_t, FSDP_TP_INT32>;
using Int64 = Plain<int64_t, FSDP_TP_INT64>;

// A sign bit, an exponent, and kFractionBits; the smallest normal number is 2^kMinExponent.
template <int kFractionBits, int kMinExponent, int kDtypeValue>
struct Float16Bits {
  static constexpr int kDtype = kDtypeValue;
  using Stored = uint16_t;
  using Computed = float;
  static constexpr int kInfinity = 0x8000 - (1 << kFractionBits);

  static float widen(Stored x) {
    const int magnitude = x & 0x7fff, exponent = magnitude >> kFractionBits;
    const int fraction = magnitude & ((1 << kFractionBits) - 1);
    double value = std::ldexp(fraction, kMinExponent - kFractionBits);
    if (exponent > 0) value = std::ldexp(fraction + (1 << kFractionBits), kMinExponent - kFractionBits + exponent - 1);
    if (magnitude == kInfinity) value = std::numeric_limits<double>::infinity();
    if (magnitude > kInfinity) value = std::numeric_limits<double>::quiet_NaN();
    return static_cast<float>(std::copysign(value, (x & 0x8000) != 0 ? -1 : 1));
  }

  static Stored narrow(float x) {
    const int sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return static_cast<Stored>(sign | 0x7fff);
    if (std::isinf(x)) return static_cast<Stored>(sign | kInfinity);
    if (x == 0) return static_cast<Stored>(sign);
    const int exponent = std::max(std::ilogb(x), kMinExponent);
    const double places = std::nearbyint(std::ldexp(std::abs(double{x}), kFractionBits - exponent));  // ties to even
    // Above the smallest exponent, places has the implicit bit, which counts one into the exponent.
    const int magnitude = static_cast<int>(places) + ((exponent - kMinExponent) << kFractionBits);
    return static_cast<Stored>(sign | std::min(magnitude, kInfinity));
  }
};

using BFloat16 = Float16Bits<7, -126, FSDP_TP_BFLOAT16>;
using Float16 = Float16Bits<10, -14, FSDP_TP_FLOAT16>;

template <typename T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using Unsigned = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
  } else {
    return a + b;
  }
}

template <typename T>
bool is_nan(T x) {
  return x != x;
}

// Element i of the op over `sources`, before it is rounded to a stored type.
template <typename D, typename Sources>
typename D::Computed reference(const Sources& sources, size_t i, int op, double factor) {
  using T = typename D::Computed;
  const T scale = op == FSDP_TP_PREMUL_SUM ? static_cast<T>(factor) : 1;
  T result = scale * D::widen(sources[0][i]);
  for (size_t rank = 1; rank < sources.size(); ++rank) {
    const T value = D::widen(sources[rank][i]);
    if (op == FSDP_TP_MAX || op == FSDP_TP_MIN) {
      const bool is_better = op == FSDP_TP_MAX ? value > result : value < result;
      if (!is_nan(result) && (is_nan(value) || is_better)) result = value;
    } else {
      const T product = scale * value;
      result = add<T>(result, product);
    }
  }
  return op == FSDP_TP_AVG ? result / static_cast<T>(sources.size()) : result;
}

// The same bits, but for the payload of a NaN, which is unspecified.
template <typename D>
bool same(typename D::Stored a, typename D::Stored b) {
  if (is_nan(D::widen(a))) return is_nan(D::widen(b));
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

// ctest runs every test once for each instruction set; 77 tells it that the machine lacks this one.
inline void skip_unless_instruction_set_is_as_asked() {
  const char* asked = std::getenv("FSDP_TP_INSTRUCTION_SET");
  if (asked == nullptr || std::strcmp(asked, fsdp_tp_instruction_set()) == 0) return;
  std::fprintf(stderr, "skipped: asked for %s, got %s\n", asked, fsdp_tp_instruction_set());
  std::exit(77);
}
