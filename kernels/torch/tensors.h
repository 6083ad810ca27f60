// What the library needs of tensors: contiguous memory, and the names of dtypes and operations.

#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <optional>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <type_traits>
#include <vector>

#include "torch/group.h"

namespace fsdp_tp {

// A fsdp_tp_dtype, or Group::kBytes where the library does not know it.
int dtype_of(const at::Tensor& tensor);
// Nothing where the library has no such reduction.
std::optional<Reduction> reduction_of(const c10d::ReduceOp& op, at::ScalarType dtype);

// The memory that an operation writes for a tensor: its own, or a contiguous stand-in.
class Output {
 public:
  explicit Output(const at::Tensor& tensor, bool with_contents = false)
      : tensor_(tensor),
        buffer_(tensor.is_contiguous() ? tensor
                : with_contents        ? tensor.contiguous()
                                       : at::empty_like(tensor, at::MemoryFormat::Contiguous)) {}

  void* data() const { return buffer_.data_ptr(); }
  size_t bytes() const { return buffer_.nbytes(); }
  const at::Tensor& buffer() const { return buffer_; }
  // Once the operation is over.
  void finish() const {
    if (buffer_.is_same(tensor_)) return;
    at::NoGradGuard no_grad;
    tensor_.copy_(buffer_);
  }

 private:
  at::Tensor tensor_;
  at::Tensor buffer_;
};

// Where the equal parts of a tensor begin.
template <typename Pointer>
std::vector<Pointer> parts(Pointer data, size_t bytes, int count) {
  std::vector<Pointer> pointers(count, data);
  if (!data) return pointers;  // an empty tensor
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const char, char>;
  for (int i = 0; i < count; ++i) pointers[i] = static_cast<Byte*>(data) + i * (bytes / count);
  return pointers;
}

// The one tensor of a call that could take several, or ValueError.
const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* name);
// ValueError unless `list` has a tensor like `one` for each rank.
void check_list(const std::vector<at::Tensor>& list, const at::Tensor& one, int ranks, const char* name);
// ValueError unless `whole` is as large as a `part` for each rank.
void check_parts(const at::Tensor& whole, const at::Tensor& part, int ranks, const char* name);

}  // namespace fsdp_tp
