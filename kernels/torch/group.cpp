#include "torch/group.h"

#include <cstring>

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

void Group::all_gather(const std::vector<void*>& outs, const void* in, size_t bytes, int) {
  if (size == 1) {
    if (bytes && outs[0] != in) std::memcpy(outs[0], in, bytes);
    return;
  }
  check(fsdp_tp_all_gather(handle(), outs.data(), in, bytes));
}

void Group::reduce_scatter(void* out, int out_dtype, const std::vector<const void*>& ins, size_t count,
                           const Reduction& how) {
  if (size == 1) {
    const int status = fsdp_tp_reduce(out, out_dtype, ins.data(), 1, count, how.dtype, how.op, how.factor);
    TORCH_CHECK_WITH(DistBackendError, status == FSDP_TP_OK, "this dtype does not go with this operation");
    return;
  }
  check(fsdp_tp_reduce_scatter(handle(), out, out_dtype, ins.data(), count, how.dtype, how.op, how.factor));
}

void Group::all_reduce(void* data, size_t count, const Reduction& how) {
  if (size == 1) return Group::reduce_scatter(data, how.dtype, {data}, count, how);
  check(fsdp_tp_all_reduce(handle(), data, count, how.dtype, how.op, how.factor));
}

void Group::broadcast(void* data, size_t bytes, int root) {
  if (size > 1) check(fsdp_tp_broadcast(handle(), data, bytes, root));
}

void Group::barrier() {
  if (size > 1) check(fsdp_tp_barrier(handle()));
}

fsdp_tp_group* Group::handle() const {
  fsdp_tp_group* handle = handle_;
  TORCH_CHECK_WITH(DistBackendError, handle, "fsdp_tp_shm: the process group was destroyed");
  return handle;
}

void Group::check(int status) const {
  TORCH_CHECK_WITH(DistBackendError, status == FSDP_TP_OK, fsdp_tp_group_error(handle()), whose_ranks);
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
