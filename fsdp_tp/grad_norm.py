"""The true global gradient norm, for every mix of meshes, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_tp.mesh import ParallelMesh


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    mesh: ParallelMesh | None = None,
) -> Tensor:
    """Scales the gradients so that their global norm is at most ``max_norm``; returns the norm before.

    Each element of each gradient counts once, however it is spread: a shard adds to the sum
    over the axes that it is sharded on, a replica does not, a gradient that still waits for
    its sum is summed first. Plain tensors and DTensors of different meshes may be mixed. One
    collective for each axis that anything is sharded on.

    Args:
        parameters: as in ``torch.nn.utils.clip_grad_norm_``.
        max_norm: upper bound of the norm; ``math.inf`` measures without clipping.
        norm_type: p of the p-norm; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: raise if the norm is nan or infinite.
        mesh: needed only with a pipeline axis, whose ranks hold different parameters; the norm
            then spans the axis, and every rank of it must call this.

    Returns:
        A plain fp64 scalar tensor, equal on every rank.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    gradients = [_complete_gradient(parameter) for parameter in parameters if parameter.grad is not None]
    # Ranks name their groups differently, but walk the same parameters: the order of first
    # appearance is the same on all of them, for the collectives and for the entries they add up.
    axes: dict[str, dist.ProcessGroup] = {}
    buckets: dict[frozenset[str], list[Tensor]] = {}
    for gradient, groups in gradients:
        axes |= {group.group_name: group for group in groups}
        bucket = buckets.setdefault(frozenset(group.group_name for group in groups), [])
        if gradient.numel():  # an empty shard still takes part in the collectives
            bucket.append(gradient)
    device = _device_of_collectives(list(axes.values()), gradients[0][0] if gradients else None)
    powers = [_power_sum(bucket, norm_type, device) for bucket in buckets.values()]
    sums = torch.stack(powers) if powers else torch.zeros(1, device=device, dtype=torch.float64)
    operation = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    for name, group in axes.items():
        reduced = sums.clone()
        dist.all_reduce(reduced, operation, group=group)
        sharded = torch.tensor([name in key for key in buckets], device=device)
        sums = torch.where(sharded, reduced, sums)
    total = sums.amax() if math.isinf(norm_type) else sums.sum()
    if mesh is not None and mesh.pipeline_size > 1:
        dist.all_reduce(total, operation, group=mesh.device_mesh["pipeline"].get_group())
    norm = total if math.isinf(norm_type) else total ** (1.0 / norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the gradient norm of order {norm_type} is {norm.item()}, so it cannot be clipped")
    _scale([gradient for gradient, _ in gradients], norm, max_norm)
    return norm


def _device_of_collectives(groups: list[dist.ProcessGroup], gradient: Tensor | None) -> torch.device:
    """Where the groups can reduce: offloaded gradients lie on the CPU, but NCCL reduces on the device."""
    if groups and not any(device.type == "cpu" for device in groups[0]._device_types):
        return torch.device(groups[0]._device_types[0].type, torch.accelerator.current_device_index())
    return torch.device("cpu") if gradient is None else gradient.device


def _complete_gradient(parameter: Tensor) -> tuple[Tensor, list[dist.ProcessGroup]]:
    """This rank's part of the gradient, and the groups over which its parts add up."""
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        return gradient, []
    if any(placement.is_partial() for placement in gradient.placements):
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    mesh = gradient.device_mesh
    groups = [
        mesh.get_group(axis)
        for axis, placement in enumerate(gradient.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    ]
    # Not the public to_local(): under no_grad this is the same tensor, without a dispatch each.
    return gradient._local_tensor, groups


def _power_sum(gradients: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Sum of |g|^p over all elements (their maximum for p = inf). In fp64: squares of fp32 may overflow fp32."""
    if not gradients:
        return torch.zeros((), device=device, dtype=torch.float64)
    norms = torch._foreach_norm(gradients, norm_type, dtype=torch.float64)
    stacked = torch.stack([norm.to(device) for norm in norms])
    return stacked.amax() if math.isinf(norm_type) else (stacked**norm_type).sum()


def _scale(gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), group in alike.items():
        torch._foreach_mul_(group, factor.to(device, torch.promote_types(dtype, torch.float32)))
