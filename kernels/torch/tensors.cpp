#include "torch/tensors.h"

#include "shm/fsdp_tp_shm.h"

namespace fsdp_tp {

namespace {

std::optional<int> dtype_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return FSDP_TP_FLOAT32;
    case at::kDouble:
      return FSDP_TP_FLOAT64;
    case at::kBFloat16:
      return FSDP_TP_BFLOAT16;
    case at::kHalf:
      return FSDP_TP_FLOAT16;
    case at::kInt:
      return FSDP_TP_INT32;
    case at::kLong:
      return FSDP_TP_INT64;
    default:
      return std::nullopt;
  }
}

double factor_of(const c10d::ReduceOp& op) {
  // Only torch's own makers of PREMUL_SUM give an operation that number.
  const auto* supplement = static_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(supplement, "PREMUL_SUM without a factor");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
}

}  // namespace

int dtype_of(const at::Tensor& tensor) { return dtype_of(tensor.scalar_type()).value_or(Group::kBytes); }

std::optional<Reduction> reduction_of(const c10d::ReduceOp& op, at::ScalarType dtype) {
  const auto known = dtype_of(dtype);
  if (!known) return std::nullopt;
  TORCH_CHECK_VALUE(
      at::isFloatingType(dtype) || (op.op_ != c10d::ReduceOp::AVG && op.op_ != c10d::ReduceOp::PREMUL_SUM),
      "AVG and PREMUL_SUM are for floating-point tensors, not for ", dtype);
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return Reduction{*known, FSDP_TP_SUM, 1};
    case c10d::ReduceOp::AVG:
      return Reduction{*known, FSDP_TP_AVG, 1};
    case c10d::ReduceOp::MIN:
      return Reduction{*known, FSDP_TP_MIN, 1};
    case c10d::ReduceOp::MAX:
      return Reduction{*known, FSDP_TP_MAX, 1};
    case c10d::ReduceOp::PREMUL_SUM:
      return Reduction{*known, FSDP_TP_PREMUL_SUM, factor_of(op)};
    default:
      return std::nullopt;
  }
}

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* name) {
  TORCH_CHECK_VALUE(tensors.size() == 1, name, " takes one tensor a call, not ", tensors.size());
  return tensors[0];
}

void check_list(const std::vector<at::Tensor>& list, const at::Tensor& one, int ranks, const char* name) {
  TORCH_CHECK_VALUE(static_cast<int>(list.size()) == ranks, name, ": a list of ", list.size(), " tensors, for ", ranks,
                    " ranks");
  for (const auto& each : list) {
    TORCH_CHECK_VALUE(each.numel() == one.numel() && each.scalar_type() == one.scalar_type(), name,
                      ": the tensors must be of one size and dtype, but there is ", each.sizes(), " of ", each.dtype(),
                      " beside ", one.sizes(), " of ", one.dtype());
  }
}

void check_parts(const at::Tensor& whole, const at::Tensor& part, int ranks, const char* name) {
  TORCH_CHECK_VALUE(whole.numel() == part.numel() * ranks && whole.scalar_type() == part.scalar_type(), name, ": ",
                    whole.sizes(), " of ", whole.dtype(), " is not ", ranks, " times ", part.sizes(), " of ",
                    part.dtype());
}

}  // namespace fsdp_tp
