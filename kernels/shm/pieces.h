// How a slot is cut into pieces for the other ranks.

#pragma once

#include <algorithm>
#include <cstddef>

#include "shm/group.h"

namespace fsdp_tp {

// Where in its slot `owner` puts the piece for another rank: it keeps none for itself.
inline std::size_t piece_at(int owner, int rank, std::size_t piece) {
  return static_cast<std::size_t>(rank < owner ? rank : rank - 1) * piece;
}

// As much as fits into a slot for each of the others, in whole cache lines.
inline std::size_t piece_bytes(const Group& group) {
  return group.slot_bytes() / static_cast<std::size_t>(std::max(1, group.size() - 1)) & ~std::size_t{63};
}

inline const std::byte* bytes_of(const void* data) { return static_cast<const std::byte*>(data); }
inline std::byte* bytes_of(void* data) { return static_cast<std::byte*>(data); }

}  // namespace fsdp_tp
