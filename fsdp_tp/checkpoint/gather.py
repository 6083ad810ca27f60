"""A sharded tensor whole on rank 0, with no more memory than that."""

from __future__ import annotations

import itertools
import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_tp.checkpoint.full import Entry
from fsdp_tp.layers.canonical import put_stored_part
from fsdp_tp.layers.parameter import slices_at


def gather_to_rank_0(entry: Entry) -> Tensor | None:
    """The tensor of ``entry`` as one process would have it, on the CPU of rank 0; None elsewhere. Every rank must join.

    Rank 0 receives one part after another, each from one of the ranks that have it, and puts it where it belongs.
    The others need memory for a copy of their part at most. A tensor that rank 0 has whole on its CPU is not copied.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not isinstance(entry.tensor, DTensor):
        return entry.local.cpu() if rank == 0 else None
    owners = _owners(entry.tensor)
    if 0 not in owners:
        return None  # ranks with a copy of the whole model, on an axis that does not shard
    device = entry.tensor.device_mesh.device_type  # where the communication is: parameters may be offloaded
    whole = torch.empty(entry.shape, dtype=entry.tensor.dtype, device="cpu") if rank == 0 else None
    for owner, slices in owners.items():
        shape = [part.stop - part.start for part in slices]
        if not math.prod(shape):
            continue
        if owner != 0 and rank == owner:
            dist.send(_bytes(entry.local.to(device).contiguous()), dst=0)
        if whole is not None:
            part = entry.local
            if owner != 0:
                part = torch.empty(shape, dtype=whole.dtype, device=device)
                dist.recv(_bytes(part), src=owner)
            put_stored_part(whole, slices, part.cpu(), entry.arrangement)
    return whole


def _owners(tensor: DTensor) -> dict[int, tuple[slice, ...]]:
    """For each part the first rank that has it."""
    mesh, owners = tensor.device_mesh, {}
    seen = set()
    for coordinate in itertools.product(*map(range, mesh.shape)):
        slices = slices_at(coordinate, tensor.placements, tensor.shape, mesh)
        key = tuple((part.start, part.stop) for part in slices)
        if key not in seen:
            seen.add(key)
            owners[int(mesh.mesh[coordinate])] = slices
    return owners


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)  # gloo does not know every dtype
