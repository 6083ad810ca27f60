"""All steps from a plain model to a sharded one, in the only order that works."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from fsdp_tp.comm.choose import check_comm, use_comm
from fsdp_tp.fsdp import fsdp_mesh, reduce_by_sums, reducing_in_fp32
from fsdp_tp.initialize import initialize, materialize
from fsdp_tp.layers import fused
from fsdp_tp.layers.sequence import SequenceLength
from fsdp_tp.mesh import ParallelMesh
from fsdp_tp.methods import support_generate
from fsdp_tp.modules import find_blocks, require_no_optimizer
from fsdp_tp.parallelize import parallelize
from fsdp_tp.plans import Plan
from fsdp_tp.verify import Verify

_ACTIVATION_CHECKPOINTING = ("none", "full")


def wrap(
    model: nn.Module,
    mesh: ParallelMesh,
    *,
    plan: str | Mapping[str, str] | Plan = "auto",
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    activation_checkpointing: str = "none",
    compile: bool = False,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    comm: str = "auto",
    seed: int = 0,
    verify: Verify = False,
) -> nn.Module:
    """Tensor-parallel, checkpointed, compiled and fully sharded: ``model``, in place.

    The order: tensor parallelism, activation checkpointing, compilation and FSDP of each
    block, FSDP of the root, and for a model on the meta device memory and initial weights.
    Build the optimizer afterwards.

    Args:
        model: real weights, the same on every rank, or built under ``torch.device("meta")``. On
            CUDA each device holds a tensor-axis share of real weights before FSDP shards it; a
            model that does not fit so must come from meta.
        mesh: from :func:`fsdp_tp.init_mesh`.
        plan, sequence_parallel, loss_parallel, verify: see :func:`fsdp_tp.parallelize`.
        activation_checkpointing: ``"none"``, or ``"full"``: blocks keep only their input and
            run their forward again in backward.
        compile: ``torch.compile`` each block.
        reshard_after_forward, mp_policy, offload_policy, comm: see :func:`fsdp_tp.fully_shard`.
        seed: of the initial weights of a meta-device model; they do not depend on the mesh.

    Returns:
        ``model``, whose ``forward`` is used as before.

    Raises:
        ValueError: as the steps do; some parameters are on the meta device and some not.
    """
    if activation_checkpointing not in _ACTIVATION_CHECKPOINTING:
        raise ValueError(
            f"activation_checkpointing={activation_checkpointing!r} must be one of "
            f"{', '.join(map(repr, _ACTIVATION_CHECKPOINTING))}"
        )
    check_comm(comm)
    for axis, size in (("pipeline", mesh.pipeline_size), ("context", mesh.context_size)):
        if size > 1:
            warnings.warn(f"no layer uses the {axis} axis yet: its {size} ranks repeat the same work", stacklevel=2)
    require_no_optimizer(model, "wrap")
    on_meta = {parameter.is_meta for parameter in model.parameters()}
    if len(on_meta) > 1:
        missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        raise ValueError(f"some parameters are on the meta device and others not; on meta: {', '.join(missing[:5])}")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError("wrap() calls fully_shard itself: remove the script's own fully_shard calls")
    parallelize(model, mesh, plan=plan, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel, verify=verify)
    if comm == "symmetric" and sequence_parallel and mesh.tensor_size > 1:
        fused.enable(mesh.tensor.get_group(), mesh.device)
    support_generate(model, mesh)
    blocks = list(find_blocks(model).values())
    length = getattr(model, "_sequence_length", None)
    recomputation = {"context_fn": length.recomputation} if isinstance(length, SequenceLength) else {}
    for block in blocks:
        if activation_checkpointing == "full":
            checkpoint(block, **recomputation)
        if compile:
            block.compile()
    if on_meta == {False}:
        model.to(mesh.device)
    for module in (*blocks, model):
        # torch's own, since ours looks for optimizers in all of the process's memory each time.
        fully_shard(
            module,
            mesh=fsdp_mesh([module], mesh),
            reshard_after_forward=reshard_after_forward,
            mp_policy=reducing_in_fp32(mp_policy),
            offload_policy=offload_policy,
        )
        reduce_by_sums(module)
    if on_meta == {True}:
        offloaded = isinstance(offload_policy, CPUOffloadPolicy)
        materialize(model, torch.device("cpu") if offloaded else mesh.device)
    use_comm((*blocks, model), comm)
    if on_meta == {True}:
        initialize(model, seed=seed)
    return model
