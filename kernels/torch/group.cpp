#include "torch/group.h"

namespace fsdp_tp {

namespace {

double seconds(std::chrono::milliseconds timeout) { return std::chrono::duration<double>(timeout).count(); }

}  // namespace

Group::Group(fsdp_tp_segment* segment, int rank, int size, std::chrono::milliseconds timeout) : rank(rank), size(size) {
  if (!segment) return;
  char error[1024] = "";
  fsdp_tp_group* handle = nullptr;
  const int status = fsdp_tp_group_join(segment, rank, size, seconds(timeout), &handle, error, sizeof(error));
  TORCH_CHECK_WITH(DistBackendError, status == FSDP_TP_OK, error);
  handle_ = handle;
}

fsdp_tp_group* Group::handle() const {
  fsdp_tp_group* handle = handle_;
  TORCH_CHECK_WITH(DistBackendError, handle, "fsdp_tp_shm: the process group was destroyed");
  return handle;
}

void Group::check(int status) const {
  TORCH_CHECK_WITH(DistBackendError, status == FSDP_TP_OK, fsdp_tp_group_error(handle()));
}

void Group::check_request(int status) const {
  TORCH_CHECK_WITH(DistBackendError, status == FSDP_TP_OK, fsdp_tp_last_error());
}

void Group::set_timeout(std::chrono::milliseconds timeout) {
  if (handle_) fsdp_tp_group_set_timeout(handle_, seconds(timeout));
}

void Group::abort(const std::string& reason) {
  if (handle_) fsdp_tp_group_abort(handle_, reason.c_str());
}

void Group::leave() {
  if (auto* handle = handle_.exchange(nullptr)) fsdp_tp_group_leave(handle);
}

}  // namespace fsdp_tp
