// Sends and receives between two ranks of a group.
//
// Each ordered pair has a channel in the group's segment: a ring through which the sender's messages go one
// after the other, as a header and bytes. A receiver reads a message straight into the buffer of the receive
// that wants it. One that nobody wants yet stays in the ring, unless a receive waits for something behind it.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "shm/group.h"

namespace fsdp_tp {

constexpr int kAnyRank = -1;

struct MessageHeader {
  std::uint64_t bytes;
  std::uint32_t tag;
  std::uint32_t unused;
};

struct Request {
  Group* group;
  bool is_send;
  int peer;  // of a receive perhaps kAnyRank
  std::uint32_t tag;
  std::byte* data;
  std::size_t bytes;
  std::size_t moved = 0;
  bool header_sent = false;
  std::atomic<bool> done{false};
  int source = kAnyRank;  // of a receive that has found its message
};

// What one rank has yet to send and to receive. Any thread may call it.
class Mailbox {
 public:
  explicit Mailbox(Group& group);

  void add(Request* request);
  // Forgets a request that is not done.
  void remove(Request* request);
  // Moves whatever can be moved.
  void progress();

 private:
  // One that came before its receive.
  struct Message {
    int from;
    MessageHeader header;
    std::unique_ptr<std::byte[]> data;
    Request* receive;  // came for it while it was still coming in
  };
  // What is being read from a channel.
  struct Incoming {
    bool active = false;
    MessageHeader header{};
    std::size_t moved = 0;
    Request* receive = nullptr;  // null: into `message`
    std::list<Message>::iterator message{};
  };

  bool push(int to);
  bool pull(int from);
  Request* find_receive(int from, std::uint32_t tag);
  bool claim(Request& receive);

  Group& group_;
  std::atomic<int> pending_{0};
  std::mutex mutex_;  // guards what follows
  std::vector<std::deque<Request*>> sends_;
  std::list<Request*> receives_;  // that have no message yet
  std::vector<Incoming> incoming_;
  std::list<Message> unexpected_;
};

// Whether it is complete, after an attempt to move on.
bool test(Request& request);
void wait(Request& request);

}  // namespace fsdp_tp
