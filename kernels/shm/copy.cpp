#include "shm/copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace fsdp_tp {

namespace {

#ifdef __SSE2__
constexpr std::size_t kLine = 64;

// Whole lines, to an aligned address.
void stream_lines(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += kLine) {
    const auto* const source = reinterpret_cast<const __m128i*>(from + at);
    auto* const target = reinterpret_cast<__m128i*>(to + at);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  _mm_sfence();  // what the caller writes next must not be seen before this is
}
#endif

}  // namespace

void copy_part(void* to, const void* from, std::size_t bytes, std::size_t written) {
  if (to == from || bytes == 0) return;
#ifdef __SSE2__
  if (written >= kStreamedBytes) {
    auto* const target = static_cast<std::byte*>(to);
    const auto* const source = static_cast<const std::byte*>(from);
    const std::size_t head = std::min(bytes, -reinterpret_cast<std::uintptr_t>(to) % kLine);
    const std::size_t lines = (bytes - head) / kLine * kLine;
    std::memcpy(target, source, head);
    stream_lines(target + head, source + head, lines);
    std::memcpy(target + head + lines, source + head + lines, bytes - head - lines);
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace fsdp_tp
