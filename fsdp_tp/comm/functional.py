"""Collectives that ``torch.compile`` and fake tensors can trace.

The registered ops under torch's functional collectives, without the wrapper tensor that each
of those allocates (on a CPU it costs as much as a small collective).
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

_ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, group: dist.ProcessGroup, operation: str = "sum") -> Tensor:
    """A new tensor: the ``"sum"``, ``"max"`` or ``"min"`` of ``x`` over the group."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), operation, group.group_name))


def chunk_of(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Start and length of a rank's part of a dim, as ``torch.chunk`` cuts it: the last ones have less, or nothing."""
    step = -(-size // ranks)
    start = min(rank * step, size)
    return start, min(step, size - start)


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup, size: int | None = None) -> Tensor:
    """The ranks' ``x`` in rank order along ``dim`` (not negative).

    Either all are of one shape, or they are the chunks of a dim of ``size``; only inside the collective are
    they padded to one shape.

    Raises:
        ValueError: ``x`` is not this rank's chunk of ``size``.
    """
    ranks = group.size()
    if size is not None and x.shape[dim] != (length := chunk_of(size, ranks, group.rank())[1]):
        raise ValueError(
            f"x has size {x.shape[dim]} along dim={dim}, but rank {group.rank()} of {ranks} must pass its slice of "
            f"size={size} as torch.chunk cuts it, which has size {length}"
        )
    if size is None or size % ranks == 0:
        gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), ranks, group.group_name))
        return gathered if dim == 0 else torch.cat(gathered.chunk(ranks), dim)
    lengths = [chunk_of(size, ranks, rank)[1] for rank in range(ranks)]
    padded = _pad(x, dim, lengths[0]).contiguous()
    gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(padded, ranks, group.group_name))
    pieces = zip(gathered.chunk(ranks), lengths, strict=True)
    return torch.cat([piece.narrow(dim, 0, length) for piece, length in pieces], dim)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's chunk along ``dim`` (not negative) of the sum of ``x``; padded inside the collective only."""
    ranks, size = group.size(), x.shape[dim]
    even = size % ranks == 0
    x = x if even else _pad(x, dim, -(-size // ranks) * ranks)
    stacked = x.contiguous() if dim == 0 else torch.cat(x.chunk(ranks, dim))
    if group._get_backend_name() == "gloo":  # its own reduce-scatter is an all-reduce of everything: twice the traffic
        lengths = [stacked.shape[0] // ranks] * ranks
        received = _ops.wait_tensor(_ops.all_to_all_single(stacked, lengths, lengths, group.group_name))
        scattered = functools.reduce(torch.add, received.chunk(ranks))
    else:
        scattered = _ops.wait_tensor(_ops.reduce_scatter_tensor(stacked, "sum", ranks, group.group_name))
    return scattered if even else scattered.narrow(dim, 0, chunk_of(size, ranks, group.rank())[1]).contiguous()


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    """Zeros after ``x`` along ``dim``, up to ``size``."""
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, size - x.shape[dim]])
