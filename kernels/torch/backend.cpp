#include "torch/backend.h"

#include "torch/hierarchy.h"
#include "torch/python.h"

namespace fsdp_tp {

namespace {

std::shared_ptr<Group> make_group(fsdp_tp_segment* segment, std::vector<std::vector<int>> hosts, int rank, int size,
                                  std::chrono::milliseconds timeout, const std::shared_ptr<Gloo>& gloo, int wire,
                                  std::vector<int> world_ranks) {
  if (hosts.size() <= 1) return std::make_shared<Group>(segment, rank, size, timeout);
  gloo->get();  // now, when all ranks are here
  return std::make_shared<Hierarchy>(segment, std::move(hosts), rank, size, timeout, gloo, wire,
                                     std::move(world_ranks));
}

}  // namespace

ShmBackend::ShmBackend(fsdp_tp_segment* segment, c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                       Milliseconds timeout, std::vector<std::vector<int>> hosts, int wire,
                       std::vector<int> world_ranks)
    : Backend(rank, size),
      timeout_(timeout),
      gloo_(std::make_shared<Gloo>(std::move(store), rank, size, timeout)),
      spans_hosts_(hosts.size() > 1),
      group_(make_group(segment, std::move(hosts), rank, size, timeout, gloo_, wire, std::move(world_ranks))),
      requests_(std::make_shared<Requests>()),
      queue_(std::make_shared<Queue>([requests = requests_] { return requests->progress(); },
                                     "fsdp_tp_shm: the process group was destroyed")) {}

ShmBackend::~ShmBackend() { shutdown(); }

c10::intrusive_ptr<c10d::Backend::Options> ShmBackend::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), timeout_);
}

void ShmBackend::setTimeout(Milliseconds timeout) {
  timeout_ = timeout;
  group_->set_timeout(timeout);
  gloo_->set_timeout(timeout);
}

void ShmBackend::shutdown() {
  // The worker may be waiting for the GIL, to run a callback.
  std::optional<pybind11::gil_scoped_release> released;
  if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
  // An operation that no rank waited for must not keep this one until the timeout.
  if (queue_->busy() || requests_->progress()) abort();
  queue_->stop();
  requests_->drop();
  group_->leave();
  gloo_->shutdown();
}

void ShmBackend::abort() { group_->abort("its process group was destroyed or aborted"); }

at::Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  const size_t bytes = size * c10::elementSize(c10::typeMetaToScalarType(options.dtype()));
  void* data = bytes ? fsdp_tp_alloc(bytes) : nullptr;
  if (!data) return at::empty({size}, options);
  return at::from_blob(data, {size}, fsdp_tp_free, options);
}

ShmBackend::WorkPtr ShmBackend::start(c10::intrusive_ptr<RequestWork> request) {
  if (!request->progress()) {
    requests_->add(request);
    queue_->poll_soon();
  }
  return request;
}

ShmBackend::WorkPtr ShmBackend::send(Tensors& tensors, int to, int tag) {
  if (spans_hosts_) return gloo_->get()->send(tensors, to, tag);
  TORCH_CHECK_VALUE(tensors.size() == 1, "send takes one tensor, not ", tensors.size());
  return start(RequestWork::send(group_, tensors[0], to, tag));
}

ShmBackend::WorkPtr ShmBackend::recv(Tensors& tensors, int from, int tag) {
  if (spans_hosts_) return gloo_->get()->recv(tensors, from, tag);
  TORCH_CHECK_VALUE(tensors.size() == 1, "recv takes one tensor, not ", tensors.size());
  return start(RequestWork::receive(group_, tensors[0], from, tag));
}

ShmBackend::WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return spans_hosts_ ? gloo_->get()->recvAnysource(tensors, tag) : recv(tensors, -1, tag);
}

}  // namespace fsdp_tp
