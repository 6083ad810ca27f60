// Sends and receives in flight.

#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "torch/group.h"
#include "torch/work.h"

namespace fsdp_tp {

// A send or receive. It moves on whenever somebody asks about it.
class RequestWork : public Work {
 public:
  // `source` is -1 for a receive from any rank.
  static c10::intrusive_ptr<RequestWork> send(std::shared_ptr<Group> group, const at::Tensor& tensor, int to, int tag);
  static c10::intrusive_ptr<RequestWork> receive(std::shared_ptr<Group> group, const at::Tensor& tensor, int source,
                                                 int tag);
  RequestWork(std::shared_ptr<Group> group, c10d::OpType type, at::Tensor tensor, at::Tensor buffer);
  ~RequestWork() override;

  bool isCompleted() override { return progress() && Work::isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override { return source_; }

  // Returns whether it has ended.
  bool progress();
  bool ended() const { return ended_; }
  // Ends it for good; the group has failed or is about to be left.
  void drop();

 private:
  void end(int status, std::unique_lock<std::mutex>& requesting);
  void release(std::exception_ptr error, std::unique_lock<std::mutex>& requesting);

  const std::shared_ptr<Group> group_;
  const at::Tensor tensor_;
  const at::Tensor buffer_;  // tensor_, or a contiguous copy of it
  std::mutex requesting_;    // guards request_
  fsdp_tp_request* request_ = nullptr;
  std::atomic<bool> ended_{false};
  int source_ = -1;
};

// Keeps requests, and so their tensors, until they end, though the caller may drop his Work.
class Requests {
 public:
  void add(c10::intrusive_ptr<RequestWork> work);
  // Returns whether some have not ended.
  bool progress();
  void drop();
  bool empty();

 private:
  std::mutex mutex_;
  std::vector<c10::intrusive_ptr<RequestWork>> requests_;
};

}  // namespace fsdp_tp
