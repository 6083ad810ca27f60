#include "torch/gloo.h"

#include <pybind11/chrono.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "torch/python.h"

namespace fsdp_tp {

// Torch ships no header of gloo, so its backend can only be made in Python.
c10::intrusive_ptr<c10d::Backend> Gloo::get() {
  TORCH_CHECK_WITH(DistBackendError, !given_up_, "fsdp_tp_shm: the group was given up after an earlier error");
  if (!backend_) {
    pybind11::gil_scoped_acquire gil;
    const auto distributed = pybind11::module_::import("torch.distributed");
    const auto backend = distributed.attr("ProcessGroupGloo")(store_, rank_, size_, timeout_);
    backend_ = shared(backend.cast<c10d::Backend&>());
  }
  return backend_;
}

void Gloo::give_up() {
  given_up_ = true;
  backend_.reset();
}

void Gloo::set_timeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  if (backend_) backend_->setTimeout(timeout);
}

void Gloo::shutdown() { backend_.reset(); }

}  // namespace fsdp_tp
