"""Autograd functions at the border of the tensor axis.

Between two regions a layer computes on plain local tensors. Each region turns one SPMD
type into another, and its backward turns the gradient's type back. The four types, for
a value that exists once per rank of the tensor axis (the vocabulary of the
``spmd_types`` package and of Megatron's f and g, arXiv 1909.08053, section 3):

=========== ===================================== ==================================
type        value on each rank                    gradient on each rank
=========== ===================================== ==================================
replicate   the same                              a partial sum, waits to be summed
invariant   the same                              the same, complete
varying     this rank's own slice                 the gradient of that slice
partial     a partial sum, waits to be summed     the same, complete
=========== ===================================== ==================================

With t ranks on the axis (every group of size 1 makes a region the identity):

============================== ======================= ================ ================
function                       types                   forward          backward
============================== ======================= ================ ================
``copy_to_tensor_axis``        invariant -> replicate  identity         all-reduce
``reduce_from_tensor_axis``    partial -> invariant    all-reduce       identity
``split_to_tensor_axis``       invariant -> varying    own slice        all-gather
``gather_from_tensor_axis``    varying -> invariant    all-gather       own slice
``gather_sequence``            varying -> replicate    all-gather       reduce-scatter
``reduce_scatter_sequence``    partial -> varying      reduce-scatter   all-gather
``sum_gradients``              invariant -> replicate  identity         one all-reduce
``gather_weight``              varying -> replicate    all-gather       reduce-scatter
============================== ======================= ================ ================

A slice is the chunk that ``torch.chunk`` would give this rank: the last ranks may have less than
the others, or nothing. Who gathers such slices says how long the dim is in all (``size``).

All collectives are functional ops, so ``torch.compile`` traces through a region.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdp_tp.comm.functional import all_gather, all_reduce, chunk_of, reduce_scatter

Tensor = torch.Tensor
Group = dist.ProcessGroup


def _own_slice(x: Tensor, dim: int, group: Group) -> Tensor:
    return x.narrow(dim, *chunk_of(x.shape[dim], group.size(), group.rank())).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.size, ctx.group = dim, x.shape[dim], group
        return _own_slice(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.dim, ctx.group, ctx.size), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int | None, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _own_slice(grad, ctx.dim, ctx.group), None, None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int | None, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return reduce_scatter(grad, ctx.dim, ctx.group), None, None, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.size, ctx.group = dim, x.shape[dim], group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.dim, ctx.group, ctx.size), None, None


class _GatherWeight(_GatherSequence):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))  # as in sum_gradients
        return reduce_scatter(wide, ctx.dim, ctx.group).to(grad.dtype), None, None, None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Sixteen-bit gradients travel as fp32: summed in 16 bits they would round once a rank.
        wide = torch.float32
        for grad in grads:
            wide = torch.promote_types(wide, grad.dtype)
        summed = all_reduce(torch.cat([grad.reshape(-1).to(wide) for grad in grads]), ctx.group)
        pieces = summed.split([grad.numel() for grad in grads])
        return None, *(piece.view(grad.shape).to(grad.dtype) for piece, grad in zip(pieces, grads, strict=True))


def copy_to_tensor_axis(x: Tensor, group: Group) -> Tensor:
    """Invariant -> replicate: x as the shared input of column-parallel products.

    Forward y = x. Backward dx = sum over the axis of dy: one all-reduce for all products
    that read y.
    """
    return x if group.size() == 1 else _Copy.apply(x, group)


def reduce_from_tensor_axis(x: Tensor, group: Group) -> Tensor:
    """Partial -> invariant: y = sum over the axis of x (all-reduce). Backward dx = dy."""
    return x if group.size() == 1 else _Reduce.apply(x, group)


def split_to_tensor_axis(x: Tensor, dim: int, group: Group) -> Tensor:
    """Invariant -> varying: y = this rank's slice of x along ``dim``. Backward all-gathers dy."""
    return x if group.size() == 1 else _Split.apply(x, dim % x.ndim, group)


def gather_from_tensor_axis(x: Tensor, dim: int, group: Group, size: int | None = None) -> Tensor:
    """Varying -> invariant: y = the slices of all ranks along ``dim``. Backward dx = own slice of dy.

    Args:
        size: the length of y along ``dim``; by default all slices are as long as this rank's.

    Raises:
        ValueError: x is not this rank's slice of a dim of ``size``.
    """
    return x if group.size() == 1 else _Gather.apply(x, dim % x.ndim, size, group)


def gather_sequence(x: Tensor, dim: int, group: Group, size: int | None = None) -> Tensor:
    """Varying -> replicate: all-gather along the sequence ``dim``; backward reduce-scatters dy.

    Sequence parallelism's entry into column-parallel products (arXiv 2205.05198, section 4.2.2):
    takes the place of ``copy_to_tensor_axis``.

    Args:
        size: the length of the whole sequence; by default all slices are as long as this rank's.

    Raises:
        ValueError: x is not this rank's slice of a sequence of ``size``.
    """
    return x if group.size() == 1 else _GatherSequence.apply(x, dim % x.ndim, size, group)


def reduce_scatter_sequence(x: Tensor, dim: int, group: Group) -> Tensor:
    """Partial -> varying: reduce-scatter along the sequence ``dim``; backward all-gathers dy.

    Takes the place of ``reduce_from_tensor_axis`` under sequence parallelism.
    """
    return x if group.size() == 1 else _ReduceScatterSequence.apply(x, dim % x.ndim, group)


def sum_gradients(tensors: list[Tensor], group: Group) -> list[Tensor]:
    """Invariant -> replicate for several weights at once.

    For replicated weights that each rank applies to its own slice of the activations (norms
    under sequence parallelism, per-head norms): forward is the identity; in backward autograd
    waits for all their gradients, and one all-reduce sums them together.
    """
    wanted = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
    if group.size() == 1 or not wanted:
        return tensors
    summed = _SumGradients.apply(group, *(tensors[index] for index in wanted))
    result = list(tensors)
    for index, tensor in zip(wanted, summed, strict=True):
        result[index] = tensor
    return result


def gather_weight(x: Tensor, dim: int, group: Group, size: int | None = None) -> Tensor:
    """Varying -> replicate: a weight of which each rank stores a slice along ``dim`` and uses other parts.

    Backward adds up, in fp32 or wider, what the ranks that used a part found as its gradient.

    Args:
        size: as in :func:`gather_sequence`.
    """
    return x if group.size() == 1 else _GatherWeight.apply(x, dim % x.ndim, size, group)
