// What the library needs of tensors: contiguous memory, and the names of dtypes and operations.

#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <optional>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace fsdp_tp {

struct Reduction {
  int dtype;
  int op;
  double factor;
};

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

}  // namespace fsdp_tp
