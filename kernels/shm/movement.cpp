// Collectives that move bytes and compute nothing.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>

#include "shm/collectives.h"
#include "shm/copy.h"
#include "shm/failure.h"
#include "shm/fsdp_tp_shm.h"
#include "shm/pieces.h"

namespace fsdp_tp {

namespace {

// Of each rank's part, where reading it out of the rank's private memory is fastest: below, the system call costs
// more than the second copy through a slot; above, copies through slots, which stay in the cache, overlap better.
constexpr std::size_t kReadFrom = std::size_t{16} << 10;
constexpr std::size_t kReadUpTo = std::size_t{2} << 20;

}  // namespace

void barrier(Group& group) {
  const std::uint32_t step = group.next_step();
  group.publish(step);
  group.wait_for_all(step);
}

void all_gather(Group& group, void* const* outs, const void* in, std::size_t bytes) {
  const int self = group.rank();
  const auto* const from = bytes_of(in);
  auto* const own = bytes_of(outs[self]);
  const std::size_t slot = group.slot_bytes();
  const std::size_t written = bytes * static_cast<std::size_t>(group.size()) * static_cast<std::size_t>(group.size());
  const bool in_place = group.reads_private() && bytes >= kReadFrom && bytes <= kReadUpTo;
  for (std::size_t offset = 0; offset < bytes; offset += slot) {
    const std::size_t length = in_place ? 0 : std::min(slot, bytes - offset);
    const std::uint32_t step = group.next_step();
    group.acquire(step);
    std::memcpy(group.slot(self, step), from + offset, length);
    // Offered beside the first of several slots: if all lie in pools, the rest needs no slots.
    bool direct = in_place || (offset == 0 && bytes > 2 * slot);
    if (direct) {
      const Place place = group.place_of(in, bytes);
      direct = in_place || place.in_pool();
      group.card(self).place[step % 2] = place;
    }
    group.publish(step);
    copy_part(own + offset, from + offset, length, written);
    for (int distance = 1; distance < group.size(); ++distance) {
      const int peer = (self + distance) % group.size();
      group.wait_for(peer, step);
      copy_part(bytes_of(outs[peer]) + offset, group.slot(peer, step), length, written);
      direct = direct && (in_place || group.card(peer).place[step % 2].in_pool());
    }
    if (!direct) continue;
    bool all_read = true;
    for (int distance = 1; distance < group.size(); ++distance) {
      const int peer = (self + distance) % group.size();
      const Place& place = group.card(peer).place[step % 2];
      all_read = group.read(bytes_of(outs[peer]) + length, peer, place, length, bytes - length) && all_read;
    }
    copy_part(own + length, from + length, bytes - length, written);
    // After this nobody reads `in` any more.
    if (group.all_agree(all_read)) return;
    group.stop_reading_private();
    return all_gather(group, outs, in, bytes);
  }
}

void broadcast(Group& group, void* data, std::size_t bytes, int root) {
  const std::size_t slot = group.slot_bytes();
  for (std::size_t offset = 0; offset < bytes; offset += slot) {
    const std::size_t length = std::min(slot, bytes - offset);
    const std::uint32_t step = group.next_step();
    if (group.rank() == root) {
      group.acquire(step);
      std::memcpy(group.slot(root, step), bytes_of(data) + offset, length);
      group.publish(step);
    } else {
      group.publish(step);
      group.wait_for(root, step);
      std::memcpy(bytes_of(data) + offset, group.slot(root, step), length);
    }
  }
}

void gather(Group& group, void* const* outs, const void* in, std::size_t bytes, int root) {
  const int self = group.rank();
  const std::size_t slot = group.slot_bytes();
  for (std::size_t offset = 0; offset < bytes; offset += slot) {
    const std::size_t length = std::min(slot, bytes - offset);
    const std::uint32_t step = group.next_step();
    if (self != root) {
      group.acquire(step);
      std::memcpy(group.slot(self, step), bytes_of(in) + offset, length);
      group.publish(step);
      continue;
    }
    group.publish(step);
    copy_part(bytes_of(outs[self]) + offset, bytes_of(in) + offset, length, 0);
    for (int distance = 1; distance < group.size(); ++distance) {
      const int peer = (self + distance) % group.size();
      group.wait_for(peer, step);
      std::memcpy(bytes_of(outs[peer]) + offset, group.slot(peer, step), length);
    }
  }
}

void scatter(Group& group, void* out, const void* const* ins, std::size_t bytes, int root) {
  const int self = group.rank();
  const std::size_t piece = piece_bytes(group);
  for (std::size_t offset = 0; offset < bytes; offset += piece) {
    const std::size_t length = std::min(piece, bytes - offset);
    const std::uint32_t step = group.next_step();
    if (self != root) {
      group.publish(step);
      group.wait_for(root, step);
      std::memcpy(bytes_of(out) + offset, group.slot(root, step) + piece_at(root, self, piece), length);
      continue;
    }
    group.acquire(step);
    for (int peer = 0; peer < group.size(); ++peer) {
      if (peer == self) continue;
      std::memcpy(group.slot(self, step) + piece_at(self, peer, piece), bytes_of(ins[peer]) + offset, length);
    }
    group.publish(step);
    copy_part(bytes_of(out) + offset, bytes_of(ins[self]) + offset, length, 0);
  }
}

void all_to_all(Group& group, void* const* outs, const std::size_t* out_bytes, const void* const* ins,
                const std::size_t* in_bytes) {
  const int self = group.rank();
  const std::size_t piece = piece_bytes(group);
  std::size_t longest = 0;  // between any two ranks, known after the first step
  for (int peer = 0; peer < group.size(); ++peer) {
    if (peer != self) longest = std::max({longest, in_bytes[peer], out_bytes[peer]});
  }
  if (in_bytes[self] != out_bytes[self]) {
    throw Failure{FSDP_TP_BAD_ARGUMENT, "all_to_all: this rank sends itself " + std::to_string(in_bytes[self]) +
                                            " bytes and expects " + std::to_string(out_bytes[self])};
  }
  copy_part(bytes_of(outs[self]), bytes_of(ins[self]), in_bytes[self], 0);
  std::size_t offset = 0;
  do {
    const std::uint32_t step = group.next_step();
    group.acquire(step);
    group.card(self).number[step % 2] = longest;
    for (int peer = 0; peer < group.size(); ++peer) {
      if (peer == self || in_bytes[peer] <= offset) continue;
      std::memcpy(group.slot(self, step) + piece_at(self, peer, piece), bytes_of(ins[peer]) + offset,
                  std::min(piece, in_bytes[peer] - offset));
    }
    group.publish(step);
    for (int distance = 1; distance < group.size(); ++distance) {
      const int peer = (self + distance) % group.size();
      group.wait_for(peer, step);
      longest = std::max<std::size_t>(longest, group.card(peer).number[step % 2]);
      if (out_bytes[peer] <= offset) continue;
      std::memcpy(bytes_of(outs[peer]) + offset, group.slot(peer, step) + piece_at(peer, self, piece),
                  std::min(piece, out_bytes[peer] - offset));
    }
    offset += piece;
  } while (offset < longest);
}

std::shared_ptr<Segment> map_together(Group& group, std::size_t bytes) {
  std::shared_ptr<Segment> segment;
  std::string problem;
  const auto attempt = [&](auto&& make) {
    try {
      segment = make();
      segment->prefault();
    } catch (const Failure& failure) {
      segment.reset();
      problem = failure.message;
    } catch (const std::exception& exception) {
      segment.reset();
      problem = exception.what();
    }
  };
  if (group.rank() == 0) attempt([&] { return Segment::create(bytes, group.segment_kind()); });
  std::uint32_t step = group.next_step();
  group.acquire(step);
  std::snprintf(group.card(group.rank()).text[step % 2], sizeof Card::text[0], "%s",
                segment ? segment->handle().c_str() : "");
  group.publish(step);
  group.wait_for_all(step);
  const std::string handle = group.card(0).text[step % 2];
  if (group.rank() != 0 && !handle.empty()) attempt([&] { return Segment::attach(handle); });
  step = group.next_step();
  group.acquire(step);
  std::snprintf(group.card(group.rank()).text[step % 2], sizeof Card::text[0], "%s", problem.c_str());
  group.publish(step);
  group.wait_for_all(step);
  if (group.rank() == 0 && segment) segment->unlink();
  for (int rank = 0; rank < group.size(); ++rank) {
    if (const std::string text = group.card(rank).text[step % 2]; !text.empty()) {
      throw Failure{FSDP_TP_SYSTEM,
                    "mapping " + std::to_string(bytes) + " bytes: rank " + std::to_string(rank) + ": " + text, true};
    }
  }
  return segment;
}

void compare_calls(Group& group, const std::string& call) {
  const std::uint32_t step = group.next_step();
  group.acquire(step);
  std::snprintf(group.card(group.rank()).text[step % 2], sizeof Card::text[0], "%s", call.c_str());
  group.publish(step);
  group.wait_for_all(step);
  const std::string own = group.card(group.rank()).text[step % 2];
  for (int rank = 0; rank < group.size(); ++rank) {
    const std::string other = group.card(rank).text[step % 2];
    if (other == own) continue;
    throw Failure{FSDP_TP_MISMATCH,
                  "ranks called different collectives: rank " + std::to_string(group.rank()) + " " + own + ", rank " +
                      std::to_string(rank) + " " + other,
                  true};
  }
}

void compare_sizes(Group& group, const std::size_t* out_bytes, const std::size_t* in_bytes) {
  const auto ranks = static_cast<std::size_t>(group.size());
  const std::uint32_t step = group.next_step();
  const auto sizes = [&](int rank) { return reinterpret_cast<std::size_t*>(group.slot(rank, step)); };
  group.acquire(step);
  std::copy_n(in_bytes, ranks, sizes(group.rank()));
  std::copy_n(out_bytes, ranks, sizes(group.rank()) + ranks);
  group.publish(step);
  group.wait_for_all(step);
  for (std::size_t from = 0; from < ranks; ++from) {
    for (std::size_t to = 0; to < ranks; ++to) {
      const std::size_t sent = sizes(static_cast<int>(from))[to];
      const std::size_t expected = sizes(static_cast<int>(to))[ranks + from];
      if (sent == expected) continue;
      throw Failure{FSDP_TP_MISMATCH,
                    "all_to_all: rank " + std::to_string(from) + " sends " + std::to_string(sent) + " bytes to rank " +
                        std::to_string(to) + ", which expects " + std::to_string(expected),
                    true};
    }
  }
}

}  // namespace fsdp_tp
