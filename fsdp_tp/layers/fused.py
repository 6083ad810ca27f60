"""Products that overlap with the collectives of sequence parallelism, on GPUs whose tensor group has symmetric memory.

torch's ``symm_mem`` operators gather a sequence piece by piece while they multiply the pieces that have come, and
scatter sums of a product while they compute the rest ("async tensor parallelism"). Any strides will do; those of a
sequence that comes first are copied least, and are what the operators return. :func:`gathered_products` and
:func:`scattered_product` return None where they do not apply: the caller then computes with plain collectives.
``wrap(comm="symmetric")``, or torch's ``enable_symm_mem_for_group``, enables a group.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor, nn

from fsdp_tp.comm.symmetric import enable_products
from fsdp_tp.layers.sequence import SEQUENCE_DIM, SequenceLength, enter_tensor_axis

logger = logging.getLogger("fsdp_tp")

_DEVICES = ("cuda",)


class ColumnParallel(Protocol):
    """:class:`~fsdp_tp.layers.ColumnParallelLinear` and what is like it."""

    out_dim: int
    """Of the weight."""

    def local_operands(self) -> tuple[Tensor, Tensor | None]: ...

    def __call__(self, x: Tensor) -> Tensor: ...


def enable(group: dist.ProcessGroup, device: torch.device) -> None:
    """For ``comm="symmetric"``. All ranks of the tensor group call it together; what comes of it is logged once."""
    if (obstacle := enable_products(group, device)) is None:
        _log_once(logging.INFO, "tensor-parallel products overlap with their collectives, in symmetric memory")
    else:
        _log_once(logging.WARNING, f"tensor-parallel products do not overlap with their collectives: {obstacle}")


def enter_products(
    x: Tensor,
    layers: Sequence[ColumnParallel],
    group: dist.ProcessGroup,
    *,
    sequence_parallel: bool,
    length: SequenceLength | None,
) -> list[Tensor]:
    """The outputs of ``layers`` (with ``shared_input``) of x, taken onto the tensor axis once for all of them."""
    if sequence_parallel and not any(map(_has_hooks, layers)):
        outputs = gathered_products(x, layers, group, length)
        if outputs is not None:
            return outputs
    x = enter_tensor_axis(x, group, sequence_parallel=sequence_parallel, length=length)
    return [layer(x) for layer in layers]


def gathered_products(
    x: Tensor, layers: Sequence[ColumnParallel], group: dist.ProcessGroup, length: SequenceLength | None
) -> list[Tensor] | None:
    """Y_i = X W_i^T + b_i for each layer, X gathered along the sequence from the ranks' slices ``x``.

    Backward: dx is this rank's slice of the sum over ranks and layers of dY_i W_i, dW_i = dY_i^T X.
    """
    if not _may_fuse(x, group):
        return None
    size = None if length is None else length.of(x, group)
    matrices, biases = [], []
    for layer in layers:
        weight, bias = layer.local_operands()
        matrices.append(weight.t() if layer.out_dim == 0 else weight)
        biases.append(bias)
    if not _fits(x, size, group, matrices):
        return None
    outputs = _GatheredProducts.apply(x, x.ndim + SEQUENCE_DIM, group, *matrices)
    return [y if bias is None else y + bias for y, bias in zip(outputs, biases, strict=True)]


def scattered_product(x: Tensor, matrix: Tensor, group: dist.ProcessGroup) -> Tensor | None:
    """This rank's slice along the sequence of the sum over ranks of x @ matrix.

    Backward: dx = dY matrix^T and x^T dY, dY gathered from the ranks' slices.
    """
    if not _may_fuse(x, group) or not _fits(x, x.shape[SEQUENCE_DIM], group, [matrix]):
        return None
    return _ScatteredProduct.apply(x, x.ndim + SEQUENCE_DIM, group, matrix)


def _may_fuse(x: Tensor, group: dist.ProcessGroup) -> bool:
    return x.device.type in _DEVICES and group.size() > 1 and symm_mem.is_symm_mem_enabled_for_group(group.group_name)


def _fits(x: Tensor, size: int | None, group: dist.ProcessGroup, matrices: list[Tensor]) -> bool:
    obstacle = None
    if size is not None and size % group.size() != 0:
        obstacle = f"a sequence of {size} does not divide by {group.size()}"
    elif any(matrix.dtype != x.dtype for matrix in matrices) or torch.is_autocast_enabled(x.device.type):
        obstacle = "autocast, or weights of another dtype than their input"
    if obstacle is not None and not torch.compiler.is_compiling():
        _log_once(logging.INFO, f"some tensor-parallel products do not overlap with their collectives: {obstacle}")
    return obstacle is None


def _has_hooks(layer: Any) -> bool:
    """Hooks see a layer's input, and FSDP's gather its weight, only when it is called."""
    assert isinstance(layer, nn.Module)
    return any(
        (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    )  # fmt: skip


class _GatheredProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, *matrices: Tensor) -> tuple[Tensor, ...]:
        ctx.dim, ctx.group = dim, group
        keep = any(ctx.needs_input_grad[3:])
        whole, outputs = torch.ops.symm_mem.fused_all_gather_matmul(
            x, list(matrices), dim, group.group_name, return_A=keep
        )
        ctx.save_for_backward(whole if keep else None, *matrices)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole, *matrices = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            grad, matrix = torch.cat(grads, -1), torch.cat(matrices, -1)
            dx = _scatter(grad, matrix.t(), ctx.dim, ctx.group)
        wanted = ctx.needs_input_grad[3:]
        return dx, None, None, *(_of_matrix(whole, g) if w else None for g, w in zip(grads, wanted, strict=True))


class _ScatteredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, matrix: Tensor) -> Tensor:
        ctx.dim, ctx.group = dim, group
        ctx.save_for_backward(x, matrix)
        return _scatter(x, matrix, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix = ctx.saved_tensors
        whole, [dx] = torch.ops.symm_mem.fused_all_gather_matmul(grad, [matrix.t()], ctx.dim, ctx.group.group_name)
        return dx, None, None, _of_matrix(x, whole) if ctx.needs_input_grad[3] else None


def _scatter(x: Tensor, matrix: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", dim, group.group_name)


def _of_matrix(x: Tensor, grad: Tensor) -> Tensor:
    """x^T grad, stored as the gradient of the transposed matrix: that is what layers hold."""
    return (grad.flatten(0, -2).t() @ x.flatten(0, -2)).t()


@functools.cache
def _log_once(level: int, message: str) -> None:
    if dist.get_rank() == 0:
        logger.log(level, message)
