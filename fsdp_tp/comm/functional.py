"""Collectives that ``torch.compile`` and fake tensors can trace.

The registered ops under torch's functional collectives, without the wrapper tensor that each
of those allocates (on a CPU it costs as much as a small collective).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

_ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, group: dist.ProcessGroup, operation: str = "sum") -> Tensor:
    """A new tensor: the ``"sum"``, ``"max"`` or ``"min"`` of ``x`` over the group."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), operation, group.group_name))


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The ranks' ``x``, all of one shape, in rank order along ``dim`` (not negative)."""
    size = group.size()
    gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), size, group.group_name))
    return gathered if dim == 0 else torch.cat(gathered.chunk(size), dim)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice along ``dim`` (not negative) of the sum of ``x``; the group divides that dim."""
    size = group.size()
    stacked = x.contiguous() if dim == 0 else torch.cat(x.chunk(size, dim))
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(stacked, "sum", size, group.group_name))
