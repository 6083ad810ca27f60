// What a collective returns: c10d::Work, with the future that functional collectives ask for.

#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace fsdp_tp {

// Ends once, with or without an error, and tells its future.
class Work : public c10d::Work {
 public:
  Work(int rank, c10d::OpType type, std::vector<at::Tensor> outputs);

  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  void synchronize() override { wait(); }
  void abort() override {}

  void complete(std::exception_ptr error);

 protected:
  void rethrow() const;
  // False where `timeout` passed before completion.
  bool wait_for_completion(std::chrono::milliseconds timeout);

 private:
  const std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when asked for; guarded by mutex_
};

// An operation that was over before its call returned.
class CompletedWork : public Work {
 public:
  CompletedWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs);
  bool wait(std::chrono::milliseconds) override { return true; }
};

class Queue;

// An operation that waits in a Queue for its turn.
class QueuedWork : public Work {
 public:
  // A profiler sees the waiting for it as `name`: not the operation, which may run in the worker and outlive a profile.
  QueuedWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::function<void()> body,
             std::shared_ptr<Queue> queue, const char* name);
  // Exact: an operation that another thread has run is complete in a moment.
  bool isCompleted() override { return executed_.load(std::memory_order_acquire) && wait_for_completion(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  friend class Queue;
  std::function<void()> body_;
  std::shared_ptr<Queue> queue_;
  const char* const name_;
  const std::chrono::steady_clock::time_point queued_;
  std::atomic<bool> executed_{false};  // set under the queue's running_
};

}  // namespace fsdp_tp
