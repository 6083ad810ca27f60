// A gloo backend of the same ranks, for operations that shared memory does not offer.

#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace fsdp_tp {

class Gloo {
 public:
  Gloo(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout)
      : store_(std::move(store)), rank_(rank), size_(size), timeout_(timeout) {}

  // Made on the first call, for which all ranks must come.
  c10::intrusive_ptr<c10d::Backend> get();
  // After an error: closes the connections, so that peers do not wait. get() throws from then on.
  void give_up();
  void set_timeout(std::chrono::milliseconds timeout);
  void shutdown();

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int size_;
  std::chrono::milliseconds timeout_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  bool given_up_ = false;
};

}  // namespace fsdp_tp
