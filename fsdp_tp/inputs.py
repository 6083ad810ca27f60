"""A check of the first batch: ranks of one tensor axis must get the same one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def check_first_inputs(model: nn.Module, group: dist.ProcessGroup) -> None:
    """On its first forward ``model`` compares its inputs over ``group``, and raises on all ranks
    if they differ: ranks that compute one batch together would train on nonsense in silence."""

    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        handle.remove()
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if tensors and _differ(torch.stack([_position_weighted_sum(tensor) for tensor in tensors]), group):
            raise ValueError(
                f"the {group.size()} ranks of one tensor axis got different inputs, but they compute one batch "
                "together: choose a rank's slice by mesh.data_rank of mesh.data_size, not by its global rank"
            )

    handle = model.register_forward_pre_hook(check, with_kwargs=True, prepend=True)


def _differ(values: Tensor, group: dist.ProcessGroup) -> bool:
    highest, lowest = values.clone(), values.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group)
    return not torch.equal(highest, lowest)


def _position_weighted_sum(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten().double()
    return (flat * (torch.arange(flat.numel(), device=flat.device) % 1009 + 1)).sum()
