#include "torch/link.h"

#include <ATen/ATen.h>

namespace fsdp_tp {

namespace {

// Beside those of users' sends and receives, which go over the same gloo group.
constexpr int kTag = 0x7f5d0000;

std::vector<at::Tensor> as_tensor(void* data, size_t bytes) {
  return {at::from_blob(data, {static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte))};
}

}  // namespace

void Interrupt::raise() {
  std::lock_guard lock(mutex_);
  raised_ = true;
  if (waited_for_) waited_for_->abort();
}

bool Interrupt::wait(c10d::Work& work, std::chrono::milliseconds timeout) {
  const auto set = [this](c10d::Work* waited_for) {
    std::lock_guard lock(mutex_);
    waited_for_ = waited_for;
    return !raised_;
  };
  if (!set(&work)) return false;
  try {
    const bool arrived = work.wait(timeout);
    set(nullptr);
    return arrived;
  } catch (...) {
    set(nullptr);
    throw;
  }
}

Link::Transfer Link::send(const void* data, size_t bytes, int to) {
  if (bytes == 0) return {to, {}};
  try {
    auto tensors = as_tensor(const_cast<void*>(data), bytes);
    return {to, gloo_.get()->send(tensors, to, kTag)};
  } catch (const std::exception& why) {
    fail(to, why);
  }
}

Link::Transfer Link::receive(void* data, size_t bytes, int from) {
  if (bytes == 0) return {from, {}};
  try {
    auto tensors = as_tensor(data, bytes);
    return {from, gloo_.get()->recv(tensors, from, kTag)};
  } catch (const std::exception& why) {
    fail(from, why);
  }
}

void Link::wait(Transfer& transfer) {
  if (!transfer.work) return;
  bool arrived = false;
  try {
    arrived = interrupt_.wait(*transfer.work, timeout_);
  } catch (const std::exception& why) {
    fail(transfer.peer, why);
  }
  TORCH_CHECK_WITH(DistBackendError, arrived, operation_, ": the process group was destroyed or aborted");
  transfer.work.reset();
}

void Link::fail(int peer, const std::exception& why) const {
  const int world_rank = world_ranks_.at(peer);
  const auto also = world_rank == peer ? std::string() : c10::str(" (rank ", world_rank, " of the world)");
  TORCH_CHECK_WITH(DistBackendError, false, operation_, ": rank ", peer, also,
                   ", on another host, did not answer within ", static_cast<double>(timeout_.count()) / 1000,
                   " s or has ended (", why.what(), ")");
}

}  // namespace fsdp_tp
