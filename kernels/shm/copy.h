// When to write past the caches, and copies that do.

#pragma once

#include <cstddef>

namespace fsdp_tp {

// If all ranks together write this much or more, they write it past the caches: a plain store first reads the line it
// writes, and the caches would not keep so much until somebody reads it.
constexpr std::size_t kStreamedBytes = std::size_t{48} << 20;

// to[0:bytes] = from[0:bytes], as a part of what is `written` by all ranks. They may be the same, but not overlap.
void copy_part(void* to, const void* from, std::size_t bytes, std::size_t written);

}  // namespace fsdp_tp
