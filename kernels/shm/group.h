// The ranks of one host that work together: who they are, how they wait for one another, how they fail.
//
// A collective is a sequence of steps, the same for all ranks. In step s a rank may write its slot
// s % 2, then publishes s, then reads the slots of others that have published s. A rank that has
// published s has finished reading what was written in step s - 1; so the slot of step s is free to
// write once all have published s - 1. One wait a step is enough, and copies of one step overlap with
// those of the next on other ranks.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shm/pool.h"
#include "shm/segment.h"
#include "shm/signal.h"

namespace fsdp_tp {

class Mailbox;  // p2p.h

// What a rank says beside its step. Two of each, like slots: a peer may still read that of the step before.
struct Card {
  std::atomic<std::int32_t> process;
  std::atomic<std::uint32_t> state;  // see group.cpp
  Place place[2];
  std::uint64_t number[2];
  char text[2][128];
};

class Group {
 public:
  static std::size_t segment_bytes(int size);
  // Returns when all ranks have joined.
  Group(std::shared_ptr<Segment> segment, int rank, int size, double timeout);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int segment_kind() const { return segment_->kind(); }
  bool shared_cores() const { return shared_cores_; }
  void set_timeout(double seconds) { timeout_ = seconds; }

  // --- Steps: for one thread at a time ---
  std::size_t slot_bytes() const { return slot_bytes_; }
  std::uint32_t next_step() { return ++step_; }
  std::byte* slot(int rank, std::uint32_t step) const;
  Card& card(int rank) const;
  // Waits until this rank's slot and card of `step` may be written.
  void acquire(std::uint32_t step);
  void publish(std::uint32_t step);
  void wait_for(int rank, std::uint32_t step);
  void wait_for_all(std::uint32_t step);
  // A step in which each rank says yes or no: whether all say yes.
  bool all_agree(bool here);

  // --- Failing ---
  // What errors call the present operation.
  void set_operation(const char* name) { operation_ = name; }
  // Throws if the group was aborted, or if `rank` (-1: any) has ended or left, or after the timeout since `start`.
  void check(int rank, Clock::time_point start) { check(rank, start, operation_); }
  void check(int rank, Clock::time_point start, const char* operation);
  void throw_if_aborted() { throw_if_aborted(operation_); }
  void throw_if_aborted(const char* operation);
  // Tells all ranks; the first reason stays.
  void abort(const std::string& reason);

  // --- Point to point ---
  static constexpr std::size_t kChannelBytes = std::size_t{64} << 10;
  // Zero at first; of the ordered pair.
  std::byte* channel(int from, int to) const;
  // Advanced by whoever has moved something in a channel to or from `rank`; what that rank sleeps on.
  Signal& bell(int rank) const;

  // --- Reading what another rank has, where it lies ---
  // What a rank tells others, so that they can read data[0:bytes].
  Place place_of(const void* data, std::size_t bytes) const;
  // Whether every rank may read the private memory of all others, and should: the same answer in all ranks.
  bool reads_private() const { return reads_private_; }
  // From now on not: all ranks have seen that one could not.
  void stop_reading_private() { reads_private_ = false; }
  // Copies `bytes` from `offset` bytes behind a place of `rank`, one in private memory only if reads_private().
  // Returns whether it could: no other process can read what belongs to a device, or is secret.
  bool read(void* to, int rank, const Place& place, std::size_t offset, std::size_t bytes);
  // A place of `rank` in one of its pools.
  std::shared_ptr<const std::byte> attached(int rank, const Place& place);

  std::shared_ptr<Mailbox> mailbox;  // sends and receives
  std::string error;                 // of the last failure of a collective

 private:
  struct Header;
  Header& header() const;
  std::byte* at(std::size_t offset) const { return segment_->data() + offset; }
  Signal& line(int rank) const;
  void join();
  bool try_reading_private();
  bool has_ended(int rank) const;
  std::string who(int rank) const;

  const int maker_;  // its process: a fork of it has a copy of this object, and must not leave for the rank
  std::shared_ptr<Segment> segment_;
  int rank_;
  int size_;
  std::atomic<double> timeout_;
  std::size_t slot_bytes_ = 0;
  std::uint32_t step_ = 0;
  std::uint32_t all_at_ = 0;  // all ranks have published this step, as far as this one has looked
  bool shared_cores_;
  bool reads_private_ = false;
  Attachments attachments_;  // pools of peers
  std::uint64_t token_ = 0;  // for others to read, as a trial
  const char* operation_ = "join";
  std::vector<int> processes_;  // pidfd of each rank; -1: not to be had, only the timeout finds its death
};

}  // namespace fsdp_tp
