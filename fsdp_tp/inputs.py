"""A check of the first batch: ranks of one tensor axis must get the same one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fsdp_tp.comm.functional import all_reduce


def check_first_inputs(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """On its first forward ``model`` compares its inputs over ``group``, and raises on all ranks
    if they differ: ranks that compute one batch together would train on nonsense in silence."""

    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        handle.remove()
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if _differ(_digest(tensors, device), group):
            raise ValueError(
                f"the {group.size()} ranks of one tensor axis got different inputs, but they compute one batch "
                "together: choose a rank's slice by mesh.data_rank of mesh.data_size, not by its global rank"
            )

    handle = model.register_forward_pre_hook(check, with_kwargs=True, prepend=True)


def _differ(values: Tensor, group: dist.ProcessGroup) -> bool:
    return not torch.equal(all_reduce(values, group, "max"), all_reduce(values, group, "min"))


def _digest(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Of one shape whatever the ranks were given: the number of tensors, and a sum that order changes."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for number, tensor in enumerate(tensors):
        flat = tensor.detach().flatten().double().nan_to_num(nan=0.5)
        weights = torch.arange(flat.numel(), device=flat.device) % 1009 + 1 + number
        total += (flat * weights).sum().to(device)
    return torch.stack([torch.full_like(total, len(tensors)), total])
