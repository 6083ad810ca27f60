#include "torch/work.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include "torch/queue.h"

namespace fsdp_tp {

Work::Work(int rank, c10d::OpType type, std::vector<at::Tensor> outputs)
    : c10d::Work(rank, type), outputs_(std::move(outputs)) {}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  std::unique_lock lock(mutex_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  auto future = future_;
  const bool completed = completed_;
  lock.unlock();
  // Nobody else marks it: complete() came before there was a future, or will find it.
  if (completed) exception_ ? future->setError(exception_) : future->markCompleted(c10::IValue(outputs_));
  return future;
}

void Work::complete(std::exception_ptr error) {
  std::unique_lock lock(mutex_);
  completed_ = true;
  exception_ = error;
  auto future = future_;
  lock.unlock();
  cv_.notify_all();
  if (future) error ? future->setError(error) : future->markCompleted(c10::IValue(outputs_));
}

void Work::rethrow() const {
  if (auto error = exception()) std::rethrow_exception(error);
}

bool Work::wait_for_completion(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const auto completed = [this] { return completed_; };
  if (timeout != kNoTimeout) return cv_.wait_for(lock, timeout, completed);
  cv_.wait(lock, completed);
  return true;
}

CompletedWork::CompletedWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs)
    : Work(rank, type, std::move(outputs)) {
  completed_ = true;
}

QueuedWork::QueuedWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::function<void()> body,
                       std::shared_ptr<Queue> queue, const char* name)
    : Work(rank, type, std::move(outputs)),
      body_(std::move(body)),
      queue_(std::move(queue)),
      name_(name),
      queued_(std::chrono::steady_clock::now()) {}

bool QueuedWork::wait(std::chrono::milliseconds timeout) {
  RECORD_FUNCTION(name_, std::vector<c10::IValue>());
  // With a timeout of its own the caller must not get stuck inside an operation.
  if (timeout == kNoTimeout) queue_->run_until(*this);
  if (!wait_for_completion(timeout)) {
    TORCH_CHECK_WITH(DistBackendError, false, c10d::opTypeToString(retrieveOpType()), " did not complete within ",
                     timeout.count(), " ms");
  }
  rethrow();
  return true;
}

}  // namespace fsdp_tp
