"""The output projection and the cross entropy in one, so that the logits never exist whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_tp.comm.functional import all_reduce
from fsdp_tp.layers.parameter import tensor_axis, to_local
from fsdp_tp.layers.sliced_cross_entropy import (
    SlicedCrossEntropy,
    check_arguments,
    check_class_weight,
    computed_in,
    reduce_losses,
)
from fsdp_tp.mesh import ParallelMesh


def vocab_parallel_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    mesh: ParallelMesh | DeviceMesh,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    r""":func:`vocab_parallel_cross_entropy` of X W^T + b, without the logits of more than a chunk of tokens.

    In place of the last column-parallel layer and the loss after it, for long sequences and
    large vocabularies. With W = [W_1; ...; W_t], a chunk's logits are Z_r = X W_r^T + b_r.

    - Shapes per rank: X ``(..., d)`` and ``target`` ``(...)``, the same on all ranks of the axis;
      W_r ``(V_r, d)``, b_r ``(V_r,)``, cut as ``torch.chunk`` cuts V rows.
    - Forward: the two all-reduces of per-token numbers of :func:`vocab_parallel_cross_entropy`; one
      more, of one number, where ``linear_weight`` is a plain tensor.
    - Backward: each chunk's Z_r is computed again (one product more than with logits that are
      kept). X is invariant: dX = sum over r of dZ_r W_r, one all-reduce for all tokens, so X must
      not go through ``copy_to_tensor_axis`` first; a split sequence is gathered by
      ``gather_from_tensor_axis``. dW_r = dZ_r^T X and db_r are local, summed over the chunks in
      fp32 or wider.

    Args:
        input: X. Under autocast the products are computed in its dtype.
        linear_weight: the head's parameter as it is within a forward, or W_r as a plain tensor.
        target: int64 global ids.
        mesh: a ParallelMesh, or a DeviceMesh with a tensor axis of t ranks.
        linear_bias: the same of b.
        weight, ignore_index, label_smoothing, reduction, chunk_size: as in
            :func:`vocab_parallel_cross_entropy`; ``chunk_size`` holds for logits of every dtype.

    Returns:
        A scalar, or ``target``'s shape for ``"none"``; fp32 or wider, equal on all ranks.

    Raises:
        ValueError: as in :func:`vocab_parallel_cross_entropy`.
        RuntimeError: as there, or W is still sharded by FSDP.
    """
    check_arguments(input, target, reduction, label_smoothing, chunk_size, "inputs")
    group = tensor_axis(mesh).get_group()
    rows = -(-linear_weight.shape[0] // group.size()) if isinstance(linear_weight, DTensor) else None
    input, linear_weight = _cast_by_autocast(input), _cast_by_autocast(to_local(linear_weight))
    if linear_bias is not None:
        linear_bias = _cast_by_autocast(to_local(linear_bias))
    weight = check_class_weight(weight, linear_weight.shape[0], group)
    losses = _VocabParallelLinearCrossEntropy.apply(
        input, linear_weight, linear_bias, target, weight, rows, ignore_index, label_smoothing, chunk_size, group
    )
    return reduce_losses(losses, target, weight, ignore_index, reduction)


class _VocabParallelLinearCrossEntropy(torch.autograd.Function):
    """Invariant input, varying weight and bias -> invariant loss a token."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        rows: int | None,
        ignore_index: int,
        smoothing: float,
        chunk_size: int | None,
        group: dist.ProcessGroup,
    ) -> Tensor:
        options = (ignore_index, smoothing, linear_weight.shape[0], group)
        sliced = SlicedCrossEntropy(target.flatten(), weight, *options)
        chunks = sliced.chunks(chunk_size)
        x = input.reshape(target.numel(), input.shape[-1])
        size: Tensor | int = rows or 0
        if rows is None:
            size = all_reduce(torch.full((), sliced.classes, device=x.device), group, "max")
        index, here = sliced.own_targets(size)
        statistics, z_targets = [], []
        for chunk in chunks:
            z = F.linear(x[chunk], linear_weight, linear_bias)
            statistics.append(sliced.statistics(z))
            if sliced.classes:
                z_targets.append(z.gather(-1, index[chunk].unsqueeze(-1)).squeeze(-1).double())
            else:
                z_targets.append(torch.zeros_like(statistics[-1][0]))
        of_all = torch.cat(statistics, 1)
        maximum, exchanged = sliced.maximum(of_all)
        z_target = torch.cat(z_targets).masked_fill(~here, 0)
        losses, denominator, vocabulary = sliced.losses(of_all, maximum, exchanged, z_target)
        ctx.save_for_backward(
            input, linear_weight, linear_bias, target, weight, maximum, denominator, exchanged, vocabulary
        )
        ctx.options, ctx.chunks, ctx.group = options, chunks, group
        return losses.to(computed_in(input)).view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Any, ...]:
        input, linear_weight, linear_bias, target, weight, *saved = ctx.saved_tensors
        sliced = SlicedCrossEntropy(target.flatten(), weight, *ctx.options)
        terms = sliced.gradient_terms(grad_losses.flatten(), *saved, dtype=computed_in(input))
        x = input.reshape(target.numel(), input.shape[-1])
        of_input, of_weight, of_bias = ctx.needs_input_grad[:3]
        grad_x = []
        # In 16 bits the sum over the chunks would round once a chunk.
        wide = computed_in(linear_weight)
        grad_weight = torch.zeros_like(linear_weight, dtype=wide) if of_weight else None
        grad_bias = torch.zeros_like(linear_bias, dtype=wide) if of_bias else None
        for chunk in ctx.chunks:
            z = F.linear(x[chunk], linear_weight, linear_bias)
            grad_z = sliced.gradient(z, chunk, *terms)
            if grad_bias is not None:
                grad_bias += grad_z.sum(0)
            grad_z = grad_z.to(z.dtype)
            if of_input:
                grad_x.append(grad_z @ linear_weight)
            if grad_weight is not None:
                grad_weight += grad_z.T @ x[chunk]
        grad_input = all_reduce(torch.cat(grad_x), ctx.group).view(input.shape) if of_input else None
        if grad_weight is not None:
            grad_weight = grad_weight.to(linear_weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(linear_bias.dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None, None, None


def _cast_by_autocast(x: Tensor) -> Tensor:
    # As autocast would cast it for F.linear; but the backward, which repeats the product, runs outside autocast.
    if torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x
