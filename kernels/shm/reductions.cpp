// Collectives that add up. Sums go in the order of ranks, whoever computes them.

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "shm/collectives.h"
#include "shm/failure.h"
#include "shm/fsdp_tp_shm.h"
#include "shm/pieces.h"

namespace fsdp_tp {

namespace {

// Up to here every rank adds up everything: one step, and more additions than needed.
constexpr std::size_t kSmall = std::size_t{32} << 10;

// `written` by all ranks in the whole collective.
void reduce(void* out, const std::vector<const void*>& sources, std::size_t count, const Reduction& how,
            std::size_t written = 0) {
  const int status = reduce_part(out, how.out_dtype, sources.data(), static_cast<int>(sources.size()), count, how.dtype,
                                 how.op, how.factor, written);
  if (status != FSDP_TP_OK) throw Failure{status, "this dtype does not go with this operation"};
}

// Before the first step, where all ranks fail alike: what reduce() would refuse.
void require_valid(const Group& group, const Reduction& how) {
  std::vector<const void*> none(static_cast<std::size_t>(group.size()), nullptr);
  reduce(nullptr, none, 0, how);
}

// A slice of the elements for each rank, equal but for the last ones.
struct Slices {
  Slices(std::size_t count, int ranks) : count_(count), step_((count + ranks - 1) / static_cast<std::size_t>(ranks)) {}
  std::size_t start(int rank) const { return std::min(static_cast<std::size_t>(rank) * step_, count_); }
  std::size_t length(int rank) const { return start(rank + 1) - start(rank); }

 private:
  std::size_t count_;
  std::size_t step_;
};

void all_reduce_small(Group& group, std::byte* data, std::size_t count, const Reduction& how) {
  const std::size_t bytes = count * fsdp_tp_dtype_size(how.dtype);
  const std::uint32_t step = group.next_step();
  group.acquire(step);
  std::memcpy(group.slot(group.rank(), step), data, bytes);
  group.publish(step);
  group.wait_for_all(step);
  std::vector<const void*> sources(static_cast<std::size_t>(group.size()));
  for (int rank = 0; rank < group.size(); ++rank) {
    sources[static_cast<std::size_t>(rank)] = rank == group.rank() ? data : group.slot(rank, step);
  }
  reduce(data, sources, count, how);
}

// Two steps: every rank adds up its slice, then all fetch the sums.
void all_reduce_chunk(Group& group, std::byte* data, std::size_t count, const Reduction& how) {
  const int self = group.rank();
  const std::size_t element = fsdp_tp_dtype_size(how.dtype);
  const std::size_t piece = piece_bytes(group);
  const Slices slices(count, group.size());
  std::uint32_t step = group.next_step();
  group.acquire(step);
  for (int peer = 0; peer < group.size(); ++peer) {
    if (peer == self) continue;
    std::memcpy(group.slot(self, step) + piece_at(self, peer, piece), data + slices.start(peer) * element,
                slices.length(peer) * element);
  }
  group.publish(step);
  group.wait_for_all(step);
  std::vector<const void*> sources(static_cast<std::size_t>(group.size()));
  std::byte* const own = data + slices.start(self) * element;
  for (int rank = 0; rank < group.size(); ++rank) {
    sources[static_cast<std::size_t>(rank)] = rank == self ? own : group.slot(rank, step) + piece_at(rank, self, piece);
  }
  reduce(own, sources, slices.length(self), how);

  step = group.next_step();
  group.acquire(step);
  std::memcpy(group.slot(self, step), own, slices.length(self) * element);
  group.publish(step);
  for (int distance = 1; distance < group.size(); ++distance) {
    const int peer = (self + distance) % group.size();
    group.wait_for(peer, step);
    std::memcpy(data + slices.start(peer) * element, group.slot(peer, step), slices.length(peer) * element);
  }
}

// Elements to do at a time, a whole number of cache lines for any dtype.
std::size_t piece_elements(const Group& group, int dtype) { return piece_bytes(group) / fsdp_tp_dtype_size(dtype); }

}  // namespace

void all_reduce(Group& group, void* data, std::size_t count, const Reduction& how) {
  require_valid(group, how);
  const std::size_t element = fsdp_tp_dtype_size(how.dtype);
  if (count * element <= std::min(kSmall, group.slot_bytes())) {
    if (count > 0) all_reduce_small(group, bytes_of(data), count, how);
    return;
  }
  const std::size_t chunk = piece_elements(group, how.dtype) * static_cast<std::size_t>(group.size());
  for (std::size_t start = 0; start < count; start += chunk) {
    all_reduce_chunk(group, bytes_of(data) + start * element, std::min(chunk, count - start), how);
  }
}

void reduce_scatter(Group& group, void* out, const void* const* ins, std::size_t count, const Reduction& how) {
  require_valid(group, how);
  const int self = group.rank();
  const std::size_t element = fsdp_tp_dtype_size(how.dtype);
  const std::size_t out_element = fsdp_tp_dtype_size(how.out_dtype);
  const std::size_t piece = piece_bytes(group);
  const std::size_t chunk = piece_elements(group, how.dtype);
  const auto ranks = static_cast<std::size_t>(group.size());
  const std::size_t written = count * out_element * ranks;
  std::vector<const void*> sources(ranks);
  bool one_buffer = true;
  for (std::size_t rank = 1; rank < ranks; ++rank) {
    one_buffer = one_buffer && bytes_of(ins[rank]) == bytes_of(ins[0]) + rank * count * element;
  }
  for (std::size_t start = 0; start < count; start += chunk) {
    const std::size_t length = std::min(chunk, count - start);
    const std::uint32_t step = group.next_step();
    group.acquire(step);
    // As in all_gather: if the inputs of all ranks lie in pools, only the first pieces go through slots.
    bool direct = start == 0 && count > 2 * chunk;
    if (direct) {
      const Place place = one_buffer ? group.place_of(ins[0], ranks * count * element) : Place{};
      direct = place.in_pool();
      group.card(self).place[step % 2] = place;
    }
    for (int peer = 0; peer < group.size(); ++peer) {
      if (peer == self) continue;
      std::memcpy(group.slot(self, step) + piece_at(self, peer, piece), bytes_of(ins[peer]) + start * element,
                  length * element);
    }
    group.publish(step);
    group.wait_for_all(step);
    for (int rank = 0; rank < group.size(); ++rank) {
      sources[static_cast<std::size_t>(rank)] =
          rank == self ? bytes_of(ins[self]) + start * element : group.slot(rank, step) + piece_at(rank, self, piece);
      direct = direct && group.card(rank).place[step % 2].in_pool();
    }
    reduce(bytes_of(out) + start * out_element, sources, length, how, written);
    if (!direct) continue;
    const std::size_t done = start + length;
    std::vector<std::shared_ptr<const std::byte>> pools;  // kept mapped while they are read
    for (int rank = 0; rank < group.size(); ++rank) {
      if (rank != self) pools.push_back(group.attached(rank, group.card(rank).place[step % 2]));
      const std::byte* const theirs = rank == self ? bytes_of(ins[0]) : pools.back().get();
      sources[static_cast<std::size_t>(rank)] = theirs + (static_cast<std::size_t>(self) * count + done) * element;
    }
    reduce(bytes_of(out) + done * out_element, sources, count - done, how, written);
    barrier(group);  // nobody reads `ins` any more
    return;
  }
}

void reduce_to(Group& group, void* data, std::size_t count, const Reduction& how, int root) {
  require_valid(group, how);
  const int self = group.rank();
  const std::size_t element = fsdp_tp_dtype_size(how.dtype);
  const std::size_t chunk = group.slot_bytes() / element;
  std::vector<const void*> sources(static_cast<std::size_t>(group.size()));
  for (std::size_t start = 0; start < count; start += chunk) {
    const std::size_t length = std::min(chunk, count - start);
    std::byte* const here = bytes_of(data) + start * element;
    const std::uint32_t step = group.next_step();
    if (self != root) {
      group.acquire(step);
      std::memcpy(group.slot(self, step), here, length * element);
      group.publish(step);
      continue;
    }
    group.publish(step);
    group.wait_for_all(step);
    for (int rank = 0; rank < group.size(); ++rank) {
      sources[static_cast<std::size_t>(rank)] = rank == self ? here : group.slot(rank, step);
    }
    reduce(here, sources, length, how);
  }
}

}  // namespace fsdp_tp
