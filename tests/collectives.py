"""Counts the collectives of a piece of code by operation and mesh axis."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_tp import ParallelMesh

_OPERATIONS = {
    "all_reduce": "all_reduce",
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_to_all_single": "reduce_scatter",  # on gloo
}

_LOCAL = ("wait_tensor", "_wrap_tensor_autograd")


class CollectiveCounter(TorchDispatchMode):
    """While entered, ``counts[operation, axis]`` counts; collectives on one rank are left out.

    ``data`` is the loss's axis: replicate x shard where both have more than one rank. An
    operation or a group that the table does not know is an error, so nothing goes uncounted.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()
        axes = {name: mesh.device_mesh[name] for name in ("tensor", "shard", "replicate")} | {"data": mesh.data}
        self._axis_of = {}
        for name, axis in axes.items():
            self._axis_of.setdefault(tuple(dist.get_process_group_ranks(axis.get_group())), name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        communicates = func.namespace in ("c10d", "_c10d_functional") and name not in _LOCAL
        if communicates:
            group = _group(args)
            if group.size() > 1:
                axis = self._axis_of[tuple(dist.get_process_group_ranks(group))]
                self.counts[_OPERATIONS[name], axis] += 1
        return func(*args, **(kwargs or {}))


def _group(args: Any) -> dist.ProcessGroup:
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(argument)
            except RuntimeError:
                continue  # a ReduceOp
        if isinstance(argument, str) and argument not in ("sum", "max", "avg"):
            return dist.distributed_c10d._resolve_process_group(argument)
    return dist.group.WORLD
