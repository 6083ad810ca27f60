#include "torch/point_to_point.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <thread>

namespace fsdp_tp {

namespace {

constexpr std::chrono::microseconds kPollPeriod{50};

}  // namespace

RequestWork::RequestWork(std::shared_ptr<Group> group, c10d::OpType type, at::Tensor tensor, at::Tensor buffer)
    : Work(group->rank, type, {tensor}),
      group_(std::move(group)),
      tensor_(std::move(tensor)),
      buffer_(std::move(buffer)) {}

RequestWork::~RequestWork() { drop(); }

c10::intrusive_ptr<RequestWork> RequestWork::send(std::shared_ptr<Group> group, const at::Tensor& tensor, int to,
                                                  int tag) {
  auto work = c10::make_intrusive<RequestWork>(group, c10d::OpType::SEND, tensor, tensor.contiguous());
  group->check_request(fsdp_tp_isend(group->handle(), work->buffer_.data_ptr(), work->buffer_.nbytes(), to,
                                     static_cast<uint32_t>(tag), &work->request_));
  return work;
}

c10::intrusive_ptr<RequestWork> RequestWork::receive(std::shared_ptr<Group> group, const at::Tensor& tensor, int source,
                                                     int tag) {
  const auto buffer = tensor.is_contiguous() ? tensor : at::empty_like(tensor, at::MemoryFormat::Contiguous);
  const auto type = source < 0 ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV;
  auto work = c10::make_intrusive<RequestWork>(group, type, tensor, buffer);
  group->check_request(fsdp_tp_irecv(group->handle(), buffer.data_ptr(), buffer.nbytes(), source,
                                     static_cast<uint32_t>(tag), &work->request_));
  return work;
}

bool RequestWork::wait(std::chrono::milliseconds timeout) {
  if (timeout == kNoTimeout) {
    std::unique_lock lock(requesting_);
    if (request_) end(fsdp_tp_wait(request_), lock);
  } else {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (!progress()) {
      TORCH_CHECK_WITH(DistBackendError, std::chrono::steady_clock::now() < deadline,
                       c10d::opTypeToString(retrieveOpType()), " did not complete within ", timeout.count(), " ms");
      std::this_thread::sleep_for(kPollPeriod);
    }
  }
  wait_for_completion(kNoTimeout);
  rethrow();
  return true;
}

bool RequestWork::progress() {
  if (ended_) return true;
  std::unique_lock lock(requesting_, std::try_to_lock);
  if (!lock) return false;  // another thread is moving it
  if (!request_) return true;
  int done = 0;
  const int status = fsdp_tp_test(request_, &done);
  if (status == FSDP_TP_OK && !done) return false;
  end(status, lock);
  return true;
}

void RequestWork::drop() {
  std::unique_lock lock(requesting_);
  if (!request_) return;
  try {
    TORCH_CHECK_WITH(DistBackendError, false, c10d::opTypeToString(retrieveOpType()),
                     " did not complete before its process group was destroyed");
  } catch (...) {
    release(std::current_exception(), lock);
  }
}

void RequestWork::end(int status, std::unique_lock<std::mutex>& requesting) {
  std::exception_ptr error;
  try {
    group_->check_request(status);
    source_ = fsdp_tp_request_source(request_);
    if (retrieveOpType() != c10d::OpType::SEND && !buffer_.is_same(tensor_)) {
      at::NoGradGuard no_grad;
      tensor_.copy_(buffer_);
    }
  } catch (...) {
    error = std::current_exception();
  }
  release(error, requesting);
}

void RequestWork::release(std::exception_ptr error, std::unique_lock<std::mutex>& requesting) {
  fsdp_tp_request_free(request_);
  request_ = nullptr;
  ended_ = true;
  requesting.unlock();  // a callback of the future may ask about this
  complete(error);
}

void Requests::add(c10::intrusive_ptr<RequestWork> work) {
  std::lock_guard lock(mutex_);
  requests_.push_back(std::move(work));
}

bool Requests::progress() {
  // A request that ends runs callbacks, which may add requests.
  std::unique_lock lock(mutex_);
  auto requests = requests_;
  lock.unlock();
  for (auto& request : requests) request->progress();
  lock.lock();
  std::erase_if(requests_, [](auto& request) { return request->ended(); });
  return !requests_.empty();
}

void Requests::drop() {
  std::unique_lock lock(mutex_);
  auto requests = std::move(requests_);
  requests_.clear();
  lock.unlock();
  for (auto& request : requests) request->drop();
}

bool Requests::empty() {
  std::lock_guard lock(mutex_);
  return requests_.empty();
}

}  // namespace fsdp_tp
