// Collectives that compute nothing: broadcast, gather, scatter, all-to-all, barrier.

#include <cstring>

#include "torch/backend.h"
#include "torch/tensors.h"

namespace fsdp_tp {

namespace {

using c10d::OpType;
using Tensors = ShmBackend::Tensors;

void all_gather_base(Group& group, const at::Tensor& output, const at::Tensor& input) {
  const Output out(output);
  const auto in = input.contiguous();
  group.all_gather(parts(out.data(), out.bytes(), group.size), in.data_ptr(), in.nbytes(), dtype_of(in));
  out.finish();
}

void all_gather_list(Group& group, const Tensors& outputs, const at::Tensor& input) {
  const std::vector<Output> outs(outputs.begin(), outputs.end());
  std::vector<void*> pointers;
  for (const auto& out : outs) pointers.push_back(out.data());
  const auto in = input.contiguous();
  group.all_gather(pointers, in.data_ptr(), in.nbytes(), dtype_of(in));
  for (const auto& out : outs) out.finish();
}

void all_to_all(const Group& group, const std::vector<void*>& outs, const std::vector<size_t>& out_bytes,
                const std::vector<const void*>& ins, const std::vector<size_t>& in_bytes) {
  if (group.size == 1) {
    TORCH_CHECK_VALUE(out_bytes[0] == in_bytes[0], "all_to_all over one rank receives ", out_bytes[0], " bytes of the ",
                      in_bytes[0], " that it sends");
    if (in_bytes[0]) std::memcpy(outs[0], ins[0], in_bytes[0]);
    return;
  }
  group.check(fsdp_tp_all_to_all(group.handle(), outs.data(), out_bytes.data(), ins.data(), in_bytes.data()));
}

// How many bytes of a tensor go to each rank when its first dim is split.
std::vector<size_t> split_bytes(const at::Tensor& tensor, const std::vector<int64_t>& sizes, int ranks,
                                const char* name) {
  if (sizes.empty()) {
    TORCH_CHECK_VALUE(tensor.dim() && tensor.size(0) % ranks == 0, "all_to_all_single: the first dim of ", name, ", ",
                      tensor.sizes(), ", does not divide by the ", ranks, " ranks; pass its split sizes");
    return std::vector<size_t>(ranks, tensor.nbytes() / ranks);
  }
  int64_t rows = 0;
  for (const auto size : sizes) rows += size;
  TORCH_CHECK_VALUE(static_cast<int>(sizes.size()) == ranks && rows == tensor.size(0), "all_to_all_single: ", name,
                    "_split_sizes ", at::IntArrayRef(sizes), " must be ", ranks, " numbers that add up to ",
                    tensor.size(0));
  std::vector<size_t> bytes;
  for (const auto size : sizes) bytes.push_back(rows ? tensor.nbytes() / rows * size : 0);
  return bytes;
}

template <typename Pointer>
std::vector<Pointer> running(Pointer data, const std::vector<size_t>& bytes) {
  std::vector<Pointer> pointers;
  for (size_t offset = 0; const auto size : bytes) {
    pointers.push_back(data ? static_cast<Pointer>(static_cast<char*>(const_cast<void*>(data)) + offset) : data);
    offset += size;
  }
  return pointers;
}

}  // namespace

ShmBackend::WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const auto& tensor = only(tensors, "broadcast");
  return run(OpType::BROADCAST, "fsdp_tp_shm:broadcast", options, tensors,
             [group = group_, tensor, root = static_cast<int>(options.rootRank)] {
               const bool is_root = group->rank == root;
               const Output data(tensor, /*with_contents=*/is_root);
               group->broadcast(data.data(), data.bytes(), root);
               if (!is_root) data.finish();
             });
}

ShmBackend::WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  check_parts(output, input, getSize(), "all_gather_into_tensor");
  return run(OpType::_ALLGATHER_BASE, "fsdp_tp_shm:all_gather", options, {output},
             [group = group_, output, input] { all_gather_base(*group, output, input); });
}

ShmBackend::WorkPtr ShmBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "all_gather_into_tensor_coalesced: ", outputs.size(),
                    " outputs for ", inputs.size(), " inputs");
  for (size_t i = 0; i < outputs.size(); ++i) {
    check_parts(outputs[i], inputs[i], getSize(), "all_gather_into_tensor_coalesced");
  }
  return run(OpType::COALESCED, "fsdp_tp_shm:all_gather", options, outputs, [group = group_, outputs, inputs] {
    for (size_t i = 0; i < outputs.size(); ++i) all_gather_base(*group, outputs[i], inputs[i]);
  });
}

ShmBackend::WorkPtr ShmBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == 1, "all_gather takes one list of outputs, not ", outputs.size());
  const auto& input = only(inputs, "all_gather");
  check_list(outputs[0], input, getSize(), "all_gather");
  return run(OpType::ALLGATHER, "fsdp_tp_shm:all_gather", options, outputs[0],
             [group = group_, list = outputs[0], input] { all_gather_list(*group, list, input); });
}

ShmBackend::WorkPtr ShmBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  // outputs[r][i] is what rank r has as inputs[i].
  TORCH_CHECK_VALUE(static_cast<int>(outputs.size()) == getSize(), "all_gather_coalesced: ", outputs.size(),
                    " lists of outputs, for ", getSize(), " ranks");
  TensorLists lists(inputs.size());
  Tensors flat;
  for (size_t i = 0; i < inputs.size(); ++i) {
    for (auto& each : outputs) lists[i].push_back(each.at(i));
    check_list(lists[i], inputs[i], getSize(), "all_gather_coalesced");
    flat.insert(flat.end(), lists[i].begin(), lists[i].end());
  }
  return run(OpType::ALLGATHER_COALESCED, "fsdp_tp_shm:all_gather", options, flat, [group = group_, lists, inputs] {
    for (size_t i = 0; i < inputs.size(); ++i) all_gather_list(*group, lists[i], inputs[i]);
  });
}

ShmBackend::WorkPtr ShmBackend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  if (spans_hosts_) {
    return run_on_gloo(
        OpType::GATHER, "fsdp_tp_shm:gather", options, outputs.empty() ? Tensors{} : outputs[0],
        [outputs, inputs, options](Backend& gloo) mutable { return gloo.gather(outputs, inputs, options); });
  }
  const auto& input = only(inputs, "gather");
  const int root = static_cast<int>(options.rootRank);
  Tensors list;
  if (getRank() == root) {
    TORCH_CHECK_VALUE(outputs.size() == 1, "gather takes one list of outputs on its root, not ", outputs.size());
    list = outputs[0];
    check_list(list, input, getSize(), "gather");
  }
  return run(OpType::GATHER, "fsdp_tp_shm:gather", options, list, [group = group_, list, input, root] {
    if (group->size == 1) return all_gather_list(*group, list, input);
    const auto in = input.contiguous();
    const std::vector<Output> outs(list.begin(), list.end());
    std::vector<void*> pointers;
    for (const auto& out : outs) pointers.push_back(out.data());
    group->check(fsdp_tp_gather(group->handle(), pointers.empty() ? nullptr : pointers.data(), in.data_ptr(),
                                in.nbytes(), root));
    for (const auto& out : outs) out.finish();
  });
}

ShmBackend::WorkPtr ShmBackend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  if (spans_hosts_) {
    return run_on_gloo(
        OpType::SCATTER, "fsdp_tp_shm:scatter", options, outputs,
        [outputs, inputs, options](Backend& gloo) mutable { return gloo.scatter(outputs, inputs, options); });
  }
  const auto& output = only(outputs, "scatter");
  const int root = static_cast<int>(options.rootRank);
  Tensors list;
  if (getRank() == root) {
    TORCH_CHECK_VALUE(inputs.size() == 1, "scatter takes one list of inputs on its root, not ", inputs.size());
    list = inputs[0];
    check_list(list, output, getSize(), "scatter");
  }
  return run(OpType::SCATTER, "fsdp_tp_shm:scatter", options, outputs, [group = group_, list, output, root] {
    if (group->size == 1) return all_gather_list(*group, {output}, list[0]);
    const Output out(output);
    Tensors contiguous;
    std::vector<const void*> pointers;
    for (const auto& each : list) pointers.push_back(contiguous.emplace_back(each.contiguous()).data_ptr());
    group->check(
        fsdp_tp_scatter(group->handle(), out.data(), pointers.empty() ? nullptr : pointers.data(), out.bytes(), root));
    out.finish();
  });
}

ShmBackend::WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<int64_t>& output_split_sizes,
                                              std::vector<int64_t>& input_split_sizes,
                                              const c10d::AllToAllOptions& options) {
  if (spans_hosts_) {
    return run_on_gloo(OpType::ALLTOALL_BASE, "fsdp_tp_shm:all_to_all", options, {output}, [=](Backend& gloo) mutable {
      return gloo.alltoall_base(output, input, output_split_sizes, input_split_sizes, options);
    });
  }
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), "all_to_all_single: output is of ", output.dtype(),
                    ", input of ", input.dtype());
  const auto out_bytes = split_bytes(output, output_split_sizes, getSize(), "output");
  const auto in_bytes = split_bytes(input, input_split_sizes, getSize(), "input");
  return run(OpType::ALLTOALL_BASE, "fsdp_tp_shm:all_to_all", options, {output},
             [group = group_, output, input, out_bytes, in_bytes] {
               const Output out(output);
               const auto in = input.contiguous();
               all_to_all(*group, running<void*>(out.data(), out_bytes), out_bytes,
                          running<const void*>(in.data_ptr(), in_bytes), in_bytes);
               out.finish();
             });
}

ShmBackend::WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  if (spans_hosts_) {
    return run_on_gloo(
        OpType::ALLTOALL, "fsdp_tp_shm:all_to_all", options, outputs,
        [outputs, inputs, options](Backend& gloo) mutable { return gloo.alltoall(outputs, inputs, options); });
  }
  for (const auto* list : {&outputs, &inputs}) {
    TORCH_CHECK_VALUE(static_cast<int>(list->size()) == getSize(), "all_to_all: a list of ", list->size(),
                      " tensors, for ", getSize(), " ranks");
  }
  return run(OpType::ALLTOALL, "fsdp_tp_shm:all_to_all", options, outputs, [group = group_, outputs, inputs] {
    const std::vector<Output> outs(outputs.begin(), outputs.end());
    Tensors contiguous;
    std::vector<void*> out_pointers;
    std::vector<const void*> in_pointers;
    std::vector<size_t> out_bytes, in_bytes;
    for (const auto& out : outs) {
      out_pointers.push_back(out.data());
      out_bytes.push_back(out.bytes());
    }
    for (const auto& input : inputs) {
      in_pointers.push_back(contiguous.emplace_back(input.contiguous()).data_ptr());
      in_bytes.push_back(input.nbytes());
    }
    all_to_all(*group, out_pointers, out_bytes, in_pointers, in_bytes);
    for (const auto& out : outs) out.finish();
  });
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return run(OpType::BARRIER, "fsdp_tp_shm:barrier", options, {}, [group = group_] { group->barrier(); });
}

}  // namespace fsdp_tp
