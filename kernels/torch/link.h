// Bytes between ranks of different hosts: sends and receives of gloo.

#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "torch/gloo.h"

namespace fsdp_tp {

// Ends the wait of another thread, and all that come later.
class Interrupt {
 public:
  void raise();
  // False if it ended before the transfer did.
  bool wait(c10d::Work& work, std::chrono::milliseconds timeout);

 private:
  std::mutex mutex_;
  c10d::Work* waited_for_ = nullptr;
  bool raised_ = false;
};

// The transfers of one collective. Those that are under way when it fails are given up with it.
class Link {
 public:
  // `operation` is for errors, and so are the ranks of the world that the group's ranks are.
  Link(Gloo& gloo, Interrupt& interrupt, std::string operation, std::chrono::milliseconds timeout,
       const std::vector<int>& world_ranks)
      : gloo_(gloo),
        interrupt_(interrupt),
        operation_(std::move(operation)),
        timeout_(timeout),
        world_ranks_(world_ranks) {}

  struct Transfer {
    int peer = -1;
    c10::intrusive_ptr<c10d::Work> work;  // none: of no bytes
  };

  // Neither blocks. Transfers of one pair of ranks match in the order of their calls. `data` stays in place until
  // wait().
  Transfer send(const void* data, size_t bytes, int to);
  Transfer receive(void* data, size_t bytes, int from);
  // Throws with the operation and the peer.
  void wait(Transfer& transfer);

 private:
  [[noreturn]] void fail(int peer, const std::exception& why) const;

  Gloo& gloo_;
  Interrupt& interrupt_;
  const std::string operation_;
  const std::chrono::milliseconds timeout_;
  const std::vector<int>& world_ranks_;
};

}  // namespace fsdp_tp
