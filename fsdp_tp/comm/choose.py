"""Which communication strategy a module gets: ``comm=`` of ``fully_shard`` and ``wrap``."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from fsdp_tp.comm.backend import unavailable
from fsdp_tp.comm.fp32_accumulate import FP32AccumulateReduceScatter
from fsdp_tp.comm.shared import SharedAllGather, SharedReduceScatter
from fsdp_tp.comm.shared_memory import NotShared, SharedGroup
from fsdp_tp.comm.symmetric import use_for_fsdp
from fsdp_tp.comm.wires import ON_LINK, WIRES, use_wire
from fsdp_tp.comm.zero_copy import ZeroCopyAllGather

logger = logging.getLogger("fsdp_tp")

COMM = ("auto", "torch", "shared", "zero_copy", *WIRES, *(f"{wire}:hosts" for wire in WIRES), "symmetric")


def check_comm(comm: str) -> None:
    """Raises ValueError for a strategy that does not exist."""
    if comm not in COMM:
        raise ValueError(f"comm={comm!r} must be one of {', '.join(map(repr, COMM))}")


def communicates_in_place(group: dist.ProcessGroup, comm: str) -> bool:
    """Whether gathers over this shard group of a CPU move nothing, or only once into memory that all its ranks see."""
    if comm in ("torch", "int8"):
        return False
    try:
        SharedGroup.join(group)
    except NotShared:
        return False
    return True


def use_comm(modules: Iterable[nn.Module], comm: str) -> None:
    """Gives each of the modules, just sharded, the strategy ``comm`` or what is nearest to it and possible.

    What is used, and why, is logged once: as a warning if something else was asked for. All ranks call it together.
    """
    check_comm(comm)
    for module in modules:
        param_groups = _param_groups(module)
        if comm != "torch" and param_groups:
            _use(module, param_groups, comm)


def _use(module: Any, param_groups: list[Any], comm: str) -> None:
    param_group, asked, also = param_groups[0], comm, ""
    if comm == "symmetric":
        if (obstacle := use_for_fsdp(module, param_groups)) is None:
            _say(comm, comm, "torch gathers and reduces in the symmetric memory of NCCL")
            return
        comm, also = "auto", f"{obstacle}; "
    wire, _, only_between_hosts = comm.partition(":")
    wired: list[str] = []
    if wire in WIRES:
        device = param_group.device.type
        if reason := unavailable() if device == "cpu" else f"the parameters are on {device}, where no wire is":
            _say(asked, "torch", reason)
            return
        wired = use_wire(param_groups, comm)
        if "shard" in wired:
            _gather_ahead(param_groups)
            _say(asked, asked, f"the {' and the '.join(wired)} group of this rank {ON_LINK[wire]}")
            return
        if only_between_hosts or wire == "int8":
            comm = "auto"
            if wired:
                ranks = param_group.mesh_info.shard_process_group.size()
                where = "is this rank" if ranks == 1 else "is on one host"
                _say(asked, asked, f"the replicate group of this rank {ON_LINK[wire]}; its shard group {where}")
            else:
                _say(asked, "auto", "no group of this rank spans hosts")
    try:
        for each in param_groups:
            _require_shareable(each, len(param_groups))
        group = SharedGroup.join(param_group.mesh_info.shard_process_group)
    except NotShared as reason:
        _gather_ahead(param_groups)
        if not wired:
            _say(asked, "torch", f"{also}{reason}")
        return
    why = f"the {group.size} ranks of the shard group share the memory of one host"
    chosen = "zero_copy" if comm == "auto" else comm
    if chosen == "zero_copy":
        obstacle = ZeroCopyAllGather.obstacle(param_group)
        if obstacle is None and comm == "auto" and ZeroCopyAllGather.on_meta(param_group):
            # It would move later, away from a state dict that somebody may have taken before.
            obstacle = "the parameters are on the meta device (fsdp_tp.wrap gives them memory in time)"
        if obstacle is not None:
            chosen, why = "shared", obstacle
    _say(comm if wire in WIRES else asked, chosen, also + why)
    if chosen == "zero_copy":
        all_gather = ZeroCopyAllGather(group, param_group)
        all_gather.adopt()
        _watch(param_group.modules, all_gather)
        module.set_custom_all_gather(all_gather)
    else:
        module.set_custom_all_gather(SharedAllGather(group))
    if chosen == "fp32_accumulate":
        module.set_custom_reduce_scatter(FP32AccumulateReduceScatter(group, param_group.mp_policy.param_dtype))
    else:
        module.set_custom_reduce_scatter(SharedReduceScatter(group))


def _gather_ahead(param_groups: list[Any]) -> None:
    """Lets what FSDP gathers ahead in backward be on its way while the CPU computes; else each gather, also one ahead,
    holds it up. (Other devices have streams for that.)"""
    for param_group in param_groups:
        if param_group.device.type == "cpu":
            param_group.unshard_async_op = True


def _require_shareable(param_group: Any, number: int) -> None:
    if number > 1:
        raise NotShared("a module with parameters of several meshes takes no collectives but torch's")
    if param_group.device.type != "cpu":
        raise NotShared(f"the parameters are on {param_group.device.type}")
    if isinstance(param_group.offload_policy, CPUOffloadPolicy):
        raise NotShared("parameters are offloaded")
    if not isinstance(param_group.mesh_info, FSDPMeshInfo):
        raise NotShared("nothing is sharded")
    if param_group._use_post_forward_mesh:
        raise NotShared("reshard_after_forward is a number, so that forward and backward gather in different groups")


@cache
def _say(asked: str, chosen: str, why: str) -> None:
    if dist.get_rank() > 0:
        return
    level = logging.INFO if asked in ("auto", chosen) else logging.WARNING
    logger.log(level, "comm=%r uses %r: %s", asked, chosen, why)


def _param_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # before torch 2.12


@torch.compiler.disable  # type: ignore[untyped-decorator]
def finish_forward(module: nn.Module, *_: Any) -> None:
    """The end of a forward of an outermost module: without gradients, only once no rank reads parameters any more.

    Whoever writes parameters then may do so while others go on, so the next forward must gather all of them: also
    those that FSDP would have left unsharded.
    """
    if not torch.is_grad_enabled() and (watched := vars(module).get("_zero_copy")) is not None:
        for each in watched[0]:
            each.reshard()
        for group in dict.fromkeys(each.group for each in watched[0]):
            group.barrier()


def _watch(modules: Iterable[nn.Module], all_gather: ZeroCopyAllGather) -> None:
    """Hooks of outermost modules: parameters that were replaced move into shared memory before a forward, and
    :func:`finish_forward`."""
    all_gathers = [all_gather]
    modules = list(modules)
    for module in modules:
        for below in module.modules():
            if (watched := vars(below).pop("_zero_copy", None)) is not None:
                more, handles = watched
                all_gathers += [each for each in more if each not in all_gathers]
                for handle in handles:
                    handle.remove()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(module: nn.Module, args: Any) -> None:
        for each in all_gathers:
            each.adopt()

    for module in modules:
        # The first before FSDP's own hook, which gathers.
        handles = [module.register_forward_pre_hook(before, prepend=True), module.register_forward_hook(finish_forward)]
        vars(module)["_zero_copy"] = (all_gathers, handles)
