// The c10d backend fsdp_tp_shm: collectives through shared memory, and between hosts through gloo.
//
// Thin: it checks tensors, makes them contiguous and hands pointers to the library in kernels/shm, which
// knows nothing of torch. How the processes of a group find each other is Python (fsdp_tp/comm/rendezvous.py).

#pragma once

#include <ATen/record_function.h>

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "torch/gloo.h"
#include "torch/group.h"
#include "torch/point_to_point.h"
#include "torch/queue.h"

namespace fsdp_tp {

class ShmBackend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Milliseconds = std::chrono::milliseconds;

  // Joins the group in `segment`, which only a rank that is alone on its host does without. `hosts` has the ranks of
  // the group by host; see Hierarchy for the rest.
  ShmBackend(fsdp_tp_segment* segment, c10::intrusive_ptr<c10d::Store> store, int rank, int size, Milliseconds timeout,
             std::vector<std::vector<int>> hosts, int wire, std::vector<int> world_ranks);
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "fsdp_tp_shm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(Milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
  // Leaves no thread, mapping or file descriptor behind. An operation that has not completed fails, on all ranks.
  void shutdown() override;
  void abort() override;

  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_split_sizes,
                        std::vector<int64_t>& input_split_sizes, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  // Runs `body` now, or queues it; `options` are those of any operation.
  template <typename Options, typename Body>
  WorkPtr run(c10d::OpType type, const char* name, const Options& options, Tensors outputs, Body body) {
    ++sequence_;
    auto timed = [body = std::move(body), group = group_, timeout = timeout_, wanted = options.timeout]() mutable {
      if (wanted <= Milliseconds::zero() || wanted == timeout) return body();
      group->set_timeout(wanted);
      try {
        body();
      } catch (...) {
        group->set_timeout(timeout);
        throw;
      }
      group->set_timeout(timeout);
    };
    if (!options.asyncOp) {
      RECORD_FUNCTION(name, std::vector<c10::IValue>());
      queue_->run(timed);
      return c10::make_intrusive<CompletedWork>(getRank(), type, std::move(outputs));
    }
    auto work = c10::make_intrusive<QueuedWork>(getRank(), type, std::move(outputs),
                                                std::function<void()>(std::move(timed)), queue_, name);
    queue_->push(work);
    return work;
  }
  // The same over gloo, for what the library does not know: `call(gloo)` starts it.
  template <typename Options, typename Call>
  WorkPtr run_on_gloo(c10d::OpType type, const char* name, const Options& options, Tensors outputs, Call call) {
    return run(type, name, options, std::move(outputs), [gloo = gloo_, call = std::move(call)]() mutable {
      if (auto work = call(*gloo->get())) work->wait();
    });
  }
  WorkPtr start(c10::intrusive_ptr<RequestWork> request);

  Milliseconds timeout_;
  const std::shared_ptr<Gloo> gloo_;
  const bool spans_hosts_;
  const std::shared_ptr<Group> group_;
  const std::shared_ptr<Requests> requests_;
  const std::shared_ptr<Queue> queue_;
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace fsdp_tp
