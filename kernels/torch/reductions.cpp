// all-reduce, reduce, reduce-scatter.

#include "torch/backend.h"
#include "torch/tensors.h"

namespace fsdp_tp {

namespace {

using c10d::OpType;
using Tensors = ShmBackend::Tensors;

void all_reduce(Group& group, const at::Tensor& tensor, const Reduction& reduction) {
  const Output data(tensor, /*with_contents=*/true);
  group.all_reduce(data.data(), tensor.numel(), reduction);
  data.finish();
}

void reduce_scatter_base(Group& group, const at::Tensor& output, const at::Tensor& input, const Reduction& reduction) {
  const Output out(output);
  const auto in = input.contiguous();
  const auto ins = parts<const void*>(in.data_ptr(), in.nbytes(), group.size);
  group.reduce_scatter(out.data(), reduction.dtype, ins, output.numel(), reduction);
  out.finish();
}

void reduce_scatter_list(Group& group, const at::Tensor& output, const Tensors& inputs, const Reduction& reduction) {
  const Output out(output);
  Tensors contiguous;
  std::vector<const void*> ins;
  for (const auto& input : inputs) ins.push_back(contiguous.emplace_back(input.contiguous()).data_ptr());
  group.reduce_scatter(out.data(), reduction.dtype, ins, output.numel(), reduction);
  out.finish();
}

}  // namespace

ShmBackend::WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const auto& tensor = only(tensors, "all_reduce");
  const auto reduction = reduction_of(options.reduceOp, tensor.scalar_type());
  if (!reduction) {
    return run_on_gloo(OpType::ALLREDUCE, "fsdp_tp_shm:all_reduce", options, tensors,
                       [tensors, options](Backend& gloo) mutable { return gloo.allreduce(tensors, options); });
  }
  return run(OpType::ALLREDUCE, "fsdp_tp_shm:all_reduce", options, tensors,
             [group = group_, tensor, reduction = *reduction] { all_reduce(*group, tensor, reduction); });
}

ShmBackend::WorkPtr ShmBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return run_on_gloo(OpType::_ALLREDUCE_SPARSE, "fsdp_tp_shm:all_reduce_sparse", options, tensors,
                     [tensors, options](Backend& gloo) mutable { return gloo.allreduce_sparse(tensors, options); });
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Reduction> reductions;
  for (const auto& tensor : tensors) {
    const auto reduction = reduction_of(options.reduceOp, tensor.scalar_type());
    if (!reduction) {
      return run_on_gloo(
          OpType::ALLREDUCE_COALESCED, "fsdp_tp_shm:all_reduce_coalesced", options, tensors,
          [tensors, options](Backend& gloo) mutable { return gloo.allreduce_coalesced(tensors, options); });
    }
    reductions.push_back(*reduction);
  }
  return run(OpType::ALLREDUCE_COALESCED, "fsdp_tp_shm:all_reduce_coalesced", options, tensors,
             [group = group_, tensors, reductions] {
               for (size_t i = 0; i < tensors.size(); ++i) all_reduce(*group, tensors[i], reductions[i]);
             });
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const auto& tensor = only(tensors, "reduce");
  const auto reduction = reduction_of(options.reduceOp, tensor.scalar_type());
  if (!reduction || spans_hosts_) {
    return run_on_gloo(OpType::REDUCE, "fsdp_tp_shm:reduce", options, tensors,
                       [tensors, options](Backend& gloo) mutable { return gloo.reduce(tensors, options); });
  }
  return run(OpType::REDUCE, "fsdp_tp_shm:reduce", options, tensors,
             [group = group_, tensor, reduction = *reduction, root = static_cast<int>(options.rootRank)] {
               if (group->size == 1) return all_reduce(*group, tensor, reduction);
               const Output data(tensor, /*with_contents=*/true);
               group->check(fsdp_tp_reduce_to(group->handle(), data.data(), tensor.numel(), reduction.dtype,
                                              reduction.op, reduction.factor, root));
               if (group->rank == root) data.finish();
             });
}

ShmBackend::WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  check_parts(input, output, getSize(), "reduce_scatter_tensor");
  const auto reduction = reduction_of(options.reduceOp, input.scalar_type());
  if (!reduction) {
    return run_on_gloo(
        OpType::_REDUCE_SCATTER_BASE, "fsdp_tp_shm:reduce_scatter", options, {output},
        [output, input, options](Backend& gloo) mutable { return gloo._reduce_scatter_base(output, input, options); });
  }
  return run(OpType::_REDUCE_SCATTER_BASE, "fsdp_tp_shm:reduce_scatter", options, {output},
             [group = group_, output, input, reduction = *reduction] {
               reduce_scatter_base(*group, output, input, reduction);
             });
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "reduce_scatter_tensor_coalesced: ", outputs.size(),
                    " outputs for ", inputs.size(), " inputs");
  std::vector<Reduction> reductions;
  for (size_t i = 0; i < outputs.size(); ++i) {
    check_parts(inputs[i], outputs[i], getSize(), "reduce_scatter_tensor_coalesced");
    const auto reduction = reduction_of(options.reduceOp, inputs[i].scalar_type());
    if (!reduction) {
      return run_on_gloo(OpType::REDUCE_SCATTER_TENSOR_COALESCED, "fsdp_tp_shm:reduce_scatter", options, outputs,
                         [outputs, inputs, options](Backend& gloo) mutable {
                           return gloo.reduce_scatter_tensor_coalesced(outputs, inputs, options);
                         });
    }
    reductions.push_back(*reduction);
  }
  return run(OpType::REDUCE_SCATTER_TENSOR_COALESCED, "fsdp_tp_shm:reduce_scatter", options, outputs,
             [group = group_, outputs, inputs, reductions] {
               for (size_t i = 0; i < outputs.size(); ++i) {
                 reduce_scatter_base(*group, outputs[i], inputs[i], reductions[i]);
               }
             });
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  const auto& output = only(outputs, "reduce_scatter");
  TORCH_CHECK_VALUE(inputs.size() == 1, "reduce_scatter takes one list of inputs, not ", inputs.size());
  check_list(inputs[0], output, getSize(), "reduce_scatter");
  const auto reduction = reduction_of(options.reduceOp, output.scalar_type());
  if (!reduction) {
    return run_on_gloo(
        OpType::REDUCE_SCATTER, "fsdp_tp_shm:reduce_scatter", options, outputs,
        [outputs, inputs, options](Backend& gloo) mutable { return gloo.reduce_scatter(outputs, inputs, options); });
  }
  return run(OpType::REDUCE_SCATTER, "fsdp_tp_shm:reduce_scatter", options, outputs,
             [group = group_, output, list = inputs[0], reduction = *reduction] {
               reduce_scatter_list(*group, output, list, reduction);
             });
}

}  // namespace fsdp_tp
