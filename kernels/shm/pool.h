// Shared memory that a process allocates from for itself, and where its peers find it.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "shm/segment.h"

namespace fsdp_tp {

// Where a buffer lies, for another process; a plain value that shared memory can hold.
struct Place {
  char segment[96];      // the handle of what a pool has it in; empty: it is private to its process
  std::uint64_t offset;  // in the segment; of private memory the address

  bool in_pool() const { return segment[0] != '\0'; }
};

// Of this process. What is freed is kept for the next allocation: neither its pages nor what peers have
// attached must be made again.
void* pool_allocate(std::size_t bytes);
void pool_free(void* data);
// Gives back to the system what is free.
void pool_trim();
// Of data[0:bytes]; in a pool if all of it lies in one allocation.
Place pool_find(const void* data, std::size_t bytes);

// The pools of other processes, mapped when they are first met. What its owner has given back to the system is let
// go when something new is met.
class Attachments {
 public:
  // Stays mapped for as long as the result is held.
  std::shared_ptr<const std::byte> resolve(const Place& place);

 private:
  std::map<std::string, std::shared_ptr<Segment>> segments_;
};

}  // namespace fsdp_tp
