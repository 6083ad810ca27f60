// What one thread of a kernel moves and sums: `thread` of `threads` that share a range.

#pragma once

#include "cuda/formats.h"

namespace fsdp_tp::cuda {

constexpr int kVectorsInFlight = 8;  // loads that a thread has under way, to hide the way to a peer

// --- Copies -------------------------------------------------------------------------------------

template <class Word>
FSDP_TP_DEVICE void copy_words(char* to, const char* from, size_t bytes, size_t thread, size_t threads) {
  // To where the words are aligned, in both; then words; then what is left.
  const size_t unaligned = (sizeof(Word) - reinterpret_cast<uintptr_t>(to) % sizeof(Word)) % sizeof(Word);
  const size_t head = unaligned < bytes ? unaligned : bytes;
  const size_t words = (bytes - head) / sizeof(Word), tail = bytes - head - words * sizeof(Word);
  const auto* const source = reinterpret_cast<const Word*>(from + head);
  auto* const target = reinterpret_cast<Word*>(to + head);
  for (size_t first = thread; first < words; first += kVectorsInFlight * threads) {
    Word values[kVectorsInFlight];
    FSDP_TP_UNROLL for (int i = 0; i < kVectorsInFlight; ++i) {
      if (first + i * threads < words) values[i] = load_peer(source + first + i * threads);
    }
    FSDP_TP_UNROLL for (int i = 0; i < kVectorsInFlight; ++i) {
      if (first + i * threads < words) target[first + i * threads] = values[i];
    }
  }
  for (size_t i = thread; i < head; i += threads) to[i] = load_peer(from + i);
  for (size_t i = bytes - tail + thread; i < bytes; i += threads) to[i] = load_peer(from + i);
}

FSDP_TP_DEVICE void copy(char* to, const char* from, size_t bytes, size_t thread, size_t threads) {
  if (to == from) return;
  const auto apart = reinterpret_cast<uintptr_t>(to) ^ reinterpret_cast<uintptr_t>(from);
  if (apart % 16 == 0) {
    copy_words<Vector>(to, from, bytes, thread, threads);
  } else if (apart % 4 == 0) {
    copy_words<uint32_t>(to, from, bytes, thread, threads);
  } else if (apart % 2 == 0) {
    copy_words<uint16_t>(to, from, bytes, thread, threads);
  } else {
    copy_words<uint8_t>(to, from, bytes, thread, threads);
  }
}

// --- Sums ---------------------------------------------------------------------------------------

// Elements of every source from `start` on: `head` of them up to where vectors are aligned, vectors, and `tail`.
struct Range {
  size_t start, head, vectors, tail;
};

// `offset` is that of the sources in memory which is aligned to a vector.
template <class Format>
Range range_of(size_t offset, size_t start, size_t count) {
  constexpr size_t kSize = sizeof(typename Format::Stored);
  const size_t before = (offset + start * kSize) % sizeof(Vector) / kSize;
  const size_t unaligned = (kLanes<Format> - before) % kLanes<Format>, head = unaligned < count ? unaligned : count;
  const size_t vectors = (count - head) / kLanes<Format>;
  return {start, head, vectors, count - head - vectors * kLanes<Format>};
}

// One vector's sums, to `to`; `aligned` says whether that is so to 16 bytes.
template <class In, class Out>
FSDP_TP_DEVICE void store_sums(typename Out::Stored* to, const float (&sums)[kLanes<In>], float scale, bool aligned) {
  using Stored = typename Out::Stored;
  constexpr int kPerWord = 4 / sizeof(Stored), kWords = kLanes<In> / kPerWord;
  if (!aligned) {
    FSDP_TP_UNROLL for (int i = 0; i < kLanes<In>; ++i) to[i] = Out::narrow(sums[i] * scale);
    return;
  }
  uint32_t words[kWords];
  FSDP_TP_UNROLL for (int i = 0; i < kWords; ++i) {
    words[i] = Out::narrow(sums[i * kPerWord] * scale);
    if constexpr (kPerWord == 2) {
      words[i] |= static_cast<uint32_t>(Out::narrow(sums[i * kPerWord + 1] * scale)) << 16;
    }
  }
  if constexpr (kWords == 2) {
    *reinterpret_cast<uint64_t*>(to) = words[0] | static_cast<uint64_t>(words[1]) << 32;
  } else {
    FSDP_TP_UNROLL for (int i = 0; i < kWords; i += 4) {
      reinterpret_cast<Vector*>(to)[i / 4] = {words[i], words[i + 1], words[i + 2], words[i + 3]};
    }
  }
}

constexpr float kNothing = -0.0f;  // x + -0 is x for every x; -0 + 0 would be 0

// out[i] = scale * the sum of sources[0][start + i], sources[1][start + i], ..., in that order. kVectors vectors of
// kPeers sources are under way at once.
template <class In, class Out, int kVectors, int kPeers>
FSDP_TP_DEVICE void reduce(typename Out::Stored* out, const char* const* sources, int world, const Range& range,
                           float scale, size_t thread, size_t threads) {
  using Stored = typename In::Stored;
  const size_t first_byte = (range.start + range.head) * sizeof(Stored);
  const bool aligned = reinterpret_cast<uintptr_t>(out + range.head) % sizeof(Vector) == 0;
  for (size_t first = thread; first < range.vectors; first += kVectors * threads) {
    float sums[kVectors][kLanes<In>];
    FSDP_TP_UNROLL for (int v = 0; v < kVectors; ++v) {
      FSDP_TP_UNROLL for (int i = 0; i < kLanes<In>; ++i) sums[v][i] = kNothing;
    }
    for (int rank = 0; rank < world; rank += kPeers) {
      Vector loaded[kPeers][kVectors];
      FSDP_TP_UNROLL for (int p = 0; p < kPeers; ++p) {
        if (rank + p >= world) continue;
        const auto* const source = reinterpret_cast<const Vector*>(sources[rank + p] + first_byte);
        FSDP_TP_UNROLL for (int v = 0; v < kVectors; ++v) {
          if (first + v * threads < range.vectors) loaded[p][v] = load_peer(source + first + v * threads);
        }
      }
      FSDP_TP_UNROLL for (int p = 0; p < kPeers; ++p) {
        if (rank + p >= world) continue;
        FSDP_TP_UNROLL for (int v = 0; v < kVectors; ++v) {
          if (first + v * threads >= range.vectors) continue;
          FSDP_TP_UNROLL for (int i = 0; i < kLanes<In>; ++i) sums[v][i] += lane<In>(loaded[p][v], i);
        }
      }
    }
    FSDP_TP_UNROLL for (int v = 0; v < kVectors; ++v) {
      const size_t vector = first + v * threads;
      if (vector < range.vectors) {
        store_sums<In, Out>(out + range.head + vector * kLanes<In>, sums[v], scale, aligned);
      }
    }
  }
  // Head and tail are less than a vector each: the first threads take an element of either.
  const size_t beyond = range.head + range.vectors * kLanes<In>;
  for (size_t i = thread; i < range.head + range.tail; i += threads) {
    const size_t element = i < range.head ? i : beyond + i - range.head;
    float sum = kNothing;
    for (int rank = 0; rank < world; ++rank) {
      sum += In::widen(load_peer(reinterpret_cast<const Stored*>(sources[rank]) + range.start + element));
    }
    out[element] = Out::narrow(sum * scale);
  }
}

// Copies a rank's input to its source. The same thread writes here what it would read in reduce(), so that a block need
// only wait for its like on other ranks.
template <class In>
FSDP_TP_DEVICE void stage(char* source, const typename In::Stored* in, const Range& range, size_t thread,
                          size_t threads) {
  using Stored = typename In::Stored;
  auto* const to = reinterpret_cast<Stored*>(source) + range.start;
  const bool aligned = reinterpret_cast<uintptr_t>(in + range.head) % sizeof(Vector) == 0;
  for (size_t vector = thread; vector < range.vectors; vector += threads) {
    const size_t element = range.head + vector * kLanes<In>;
    if (aligned) {
      *reinterpret_cast<Vector*>(to + element) = *reinterpret_cast<const Vector*>(in + element);
    } else {
      FSDP_TP_UNROLL for (int i = 0; i < kLanes<In>; ++i) to[element + i] = in[element + i];
    }
  }
  const size_t beyond = range.head + range.vectors * kLanes<In>;
  for (size_t i = thread; i < range.head + range.tail; i += threads) {
    const size_t element = i < range.head ? i : beyond + i - range.head;
    to[element] = in[element];
  }
}

}  // namespace fsdp_tp::cuda
