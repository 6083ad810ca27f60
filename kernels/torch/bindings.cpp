// The module fsdp_tp._lib.fsdp_tp_torch: the backend, and the segments in which its groups meet.

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <mutex>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "torch/backend.h"
#include "torch/python.h"

namespace py = pybind11;

namespace fsdp_tp {

namespace {

std::string host() {
  char text[1024];
  return {text, fsdp_tp_host(text, sizeof(text))};
}

// A segment until a group takes it.
class Segment {
 public:
  static std::unique_ptr<Segment> create(int size, bool named) {
    fsdp_tp_segment* segment = nullptr;
    return owner(fsdp_tp_segment_create(fsdp_tp_group_bytes(size), named ? FSDP_TP_NAMED : FSDP_TP_MEMFD, &segment),
                 segment);
  }
  static std::unique_ptr<Segment> attach(const std::string& handle) {
    fsdp_tp_segment* segment = nullptr;
    return owner(fsdp_tp_segment_attach(handle.c_str(), &segment), segment);
  }

  explicit Segment(fsdp_tp_segment* segment) : segment_(segment) {}
  Segment(const Segment&) = delete;
  ~Segment() {
    if (!segment_) return;
    unlink();
    fsdp_tp_segment_close(segment_);
  }

  std::string handle() const { return fsdp_tp_segment_handle(segment_); }
  void unlink() { fsdp_tp_segment_unlink(segment_); }
  fsdp_tp_segment* release() { return std::exchange(segment_, nullptr); }

 private:
  static std::unique_ptr<Segment> owner(int status, fsdp_tp_segment*& segment) {
    if (status != FSDP_TP_OK) throw std::runtime_error(fsdp_tp_last_error());
    return std::make_unique<Segment>(segment);
  }

  fsdp_tp_segment* segment_;
};

// Of this process. Python ends with their worker threads still at work, and one that lets go of a tensor then is killed
// while it waits for the interpreter, which ends the process with an abort.
std::mutex backends_mutex;
std::vector<c10::weak_intrusive_ptr<ShmBackend>> backends;

void remember(const c10::intrusive_ptr<ShmBackend>& backend) {
  std::lock_guard lock(backends_mutex);
  std::erase_if(backends, [](const auto& each) { return each.expired(); });
  backends.emplace_back(backend);
}

void shutdown_all() {
  std::vector<c10::intrusive_ptr<ShmBackend>> alive;
  {
    std::lock_guard lock(backends_mutex);
    for (const auto& each : backends) {
      if (auto backend = each.lock()) alive.push_back(std::move(backend));
    }
  }
  for (const auto& each : alive) each->shutdown();
}

}  // namespace

PYBIND11_MODULE(fsdp_tp_torch, module) {
  py::module_::import("torch.distributed");  // makes the classes known that are named below
  module.attr("torch_version") = FSDP_TP_TORCH_VERSION;
  module.def("host", &host);
  module.def("shutdown_all", &shutdown_all, py::call_guard<py::gil_scoped_release>());
  py::class_<Segment>(module, "Segment")
      .def_static("create", &Segment::create, py::arg("size"), py::arg("named"))
      .def_static("attach", &Segment::attach, py::arg("handle"))
      .def("unlink", &Segment::unlink)
      .def_property_readonly("handle", &Segment::handle);
  py::class_<ShmBackend, c10d::Backend, c10::intrusive_ptr<ShmBackend>>(module, "ShmBackend")
      .def(py::init([](Segment* segment, c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout,
                       std::vector<std::vector<int>> hosts, int wire, std::vector<int> world_ranks) {
             py::gil_scoped_release released;  // joining waits for the other ranks
             auto backend =
                 c10::make_intrusive<ShmBackend>(segment ? segment->release() : nullptr, shared(store), rank, size,
                                                 timeout, std::move(hosts), wire, std::move(world_ranks));
             remember(backend);
             return backend;
           }),
           py::arg("segment"), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("hosts"),
           py::arg("wire"), py::arg("world_ranks"))
      .def_property_readonly("options", &ShmBackend::getBackendOptions)
      // Torch binds it for its own backends one by one.
      .def("_set_default_timeout", &ShmBackend::setTimeout, py::arg("timeout"));
}

}  // namespace fsdp_tp
