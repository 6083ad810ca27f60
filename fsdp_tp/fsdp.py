"""FSDP with a hybrid shard degree: torch's ``fully_shard``, told the mesh by one number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from fsdp_tp.comm.choose import check_comm, use_comm
from fsdp_tp.comm.functional import chunk_of
from fsdp_tp.layers.parameter import is_fsdp_sharded
from fsdp_tp.mesh import ParallelMesh, init_mesh
from fsdp_tp.modules import require_no_optimizer


def fully_shard(
    module: Any,
    *,
    mesh: ParallelMesh | DeviceMesh | None = None,
    hybrid_shard_degree: int | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[..., Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    comm: str = "auto",
) -> Any:
    """``torch.distributed.fsdp.fully_shard`` plus ``hybrid_shard_degree``.

    Same meaning, so a script may change only its import. Call it on the blocks, then on the
    root. Returns ``module``, now also an ``FSDPModule``.

    Args:
        module: a module, or a list of modules that form one group.
        mesh: a ParallelMesh; or a 1-D (shard) or 2-D (replicate, shard) DeviceMesh as torch
            takes it; by default one mesh over the whole world.
        hybrid_shard_degree: over how many ranks to shard, with replicas on the rest: 0 all,
            1 none, n a divisor. Given a ParallelMesh it may only repeat the mesh's degree.
        reshard_after_forward, shard_placement_fn, mp_policy, offload_policy, ignored_params:
            as in torch, but for one default: a policy with a 16-bit ``param_dtype`` and no
            ``reduce_dtype`` reduces in fp32. Sums over ranks and micro-batches then round once
            instead of once a term.
        comm: how gathers and reductions over the shard axis run. ``"torch"``: by its process group.
            Between the processes of one host, on CPUs: ``"shared"``, with buffers that all see;
            ``"zero_copy"``, with parameters of which a shard group has one copy in memory, not one a
            rank; ``"fp32_accumulate"``, as ``"shared"`` with gradients that travel in 16 bits and are
            summed in fp32. On GPUs: ``"symmetric"``, by torch and NCCL in symmetric memory (elsewhere as
            ``"auto"``). ``"auto"``: the first that applies of ``"zero_copy"``, ``"shared"``,
            ``"torch"``. What does not apply becomes what does, and the log says why. With
            ``"zero_copy"``, ranks must call ``optimizer.step()`` together.

    Raises:
        ValueError: a degree that does not divide, an unknown ``comm``, tensor-parallel
            parameters without their mesh, or an optimizer that already holds the parameters.
    """
    check_comm(comm)
    modules: list[nn.Module] = list(module) if isinstance(module, list | tuple) else [module]
    for each in modules:
        require_no_optimizer(each, "fully_shard")
    sharded = torch_fully_shard(
        module,
        mesh=fsdp_mesh(modules, mesh, hybrid_shard_degree),
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        mp_policy=reducing_in_fp32(mp_policy),
        offload_policy=offload_policy,
        ignored_params=ignored_params,
    )
    reduce_by_sums(modules[0])
    use_comm(modules[:1], comm)
    return sharded


def reduce_by_sums(module: nn.Module) -> None:
    """Lets FSDP divide gradients itself. A division inside the collective (PREMUL_SUM, for a divide factor of the
    user's) is unknown to gloo, and with NCCL turns gradients of 16 bits into zeros (pytorch#190745)."""
    assert isinstance(module, FSDPModule)
    module.set_force_sum_reduction_for_comms(True)


def reducing_in_fp32(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """``policy`` with fp32 as the default ``reduce_dtype`` of 16-bit parameters."""
    if policy.reduce_dtype is None and policy.param_dtype in (torch.bfloat16, torch.float16):
        return replace(policy, reduce_dtype=torch.float32)
    return policy


@contextmanager
def accumulate(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Wraps the backward of one micro-batch of an accumulation.

    Every micro-batch reduce-scatters its gradients inside the shard group, which keeps them
    sharded; only the ``last`` one adds them up over the replicas: one replicate all-reduce an
    optimizer step instead of one a micro-batch, with the same result. Without FSDP it does
    nothing. Every step needs a last micro-batch: without it ``.grad`` stays None::

        for index, batch in enumerate(micro_batches):
            with fsdp_tp.accumulate(model, last=index == len(micro_batches) - 1):
                loss(batch).backward()
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_requires_all_reduce(last, recurse=False)
        module.set_is_last_backward(last)
    try:
        yield
    finally:
        for module in sharded:
            module.set_requires_all_reduce(True, recurse=False)
            module.set_is_last_backward(True)


def fsdp_mesh(
    modules: list[nn.Module], mesh: ParallelMesh | DeviceMesh | None, hybrid_shard_degree: int | None = None
) -> DeviceMesh:
    """The mesh that torch's ``fully_shard`` takes: (replicate, shard), or without replicas (shard)."""
    if isinstance(mesh, DeviceMesh):
        if hybrid_shard_degree is not None:
            raise ValueError(
                f"hybrid_shard_degree={hybrid_shard_degree} cannot be combined with a DeviceMesh, which fixes the "
                "degree already; pass a ParallelMesh or no mesh"
            )
        return mesh
    if mesh is None:
        parameters = [parameter for each in modules for parameter in each.parameters()]
        if any(isinstance(parameter, DTensor) and not is_fsdp_sharded(parameter) for parameter in parameters):
            raise ValueError(
                "the module has DTensor parameters: pass mesh=, the ParallelMesh on whose tensor axis they are split"
            )
        mesh = _world_mesh(hybrid_shard_degree or 0)
    _check_no_rank_is_empty(modules)
    degree = mesh.shard.size()
    if hybrid_shard_degree not in (None, degree) and not (hybrid_shard_degree == 0 and mesh.replicate_size == 1):
        raise ValueError(f"hybrid_shard_degree={hybrid_shard_degree} contradicts the mesh, built for {degree}")
    return mesh.fsdp if mesh.replicate_size > 1 else mesh.shard


def _check_no_rank_is_empty(modules: list[nn.Module]) -> None:
    """torch's FSDP fails in backward on a rank that has nothing of a parameter (2.13)."""
    for module in modules:
        for name, parameter in module.named_parameters():
            if not isinstance(parameter, DTensor) or is_fsdp_sharded(parameter):
                continue
            for axis, placement in enumerate(parameter.placements):
                if not placement.is_shard():
                    continue
                size, ranks = parameter.shape[placement.dim], parameter.device_mesh.size(axis)  # type: ignore[attr-defined]
                if chunk_of(size, ranks, ranks - 1)[1] == 0:
                    raise ValueError(
                        f"{name}: {size} rows over a tensor axis of {ranks} ranks leave the last one nothing, which "
                        "FSDP cannot shard; use fewer ranks or more rows"
                    )


# One mesh for all fully_shard calls of a script that passes none, for as long as its world lives:
# building a mesh creates process groups.
_world_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[int, ParallelMesh]] = WeakKeyDictionary()


def _world_mesh(hybrid_shard_degree: int) -> ParallelMesh:
    if not dist.is_initialized():
        return init_mesh(hybrid_shard_degree=hybrid_shard_degree)
    assert dist.group.WORLD is not None
    meshes = _world_meshes.setdefault(dist.group.WORLD, {})
    if hybrid_shard_degree not in meshes:
        meshes[hybrid_shard_degree] = init_mesh(hybrid_shard_degree=hybrid_shard_degree)
    return meshes[hybrid_shard_degree]
