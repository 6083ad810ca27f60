"""Which box of a global tensor a rank has, who of those that have it writes it, and how boxes overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdp_tp.layers.parameter import own_slices


@dataclass(frozen=True)
class Box:
    """Of a tensor: from ``offset``, of ``shape``."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __and__(self, other: Box) -> Box | None:
        """What both have; None if nothing."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = tuple(map(min, self.end, other.end))
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, shape) if all(size > 0 for size in shape) else None

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where it is in a tensor that holds ``outer``."""
        return tuple(
            slice(start - origin, start - origin + size)
            for start, origin, size in zip(self.offset, outer.offset, self.shape, strict=True)
        )


def box_of(tensor: Tensor) -> Box:
    """What this rank has of a tensor for which :func:`require_box` holds; of a plain one, all."""
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.ndim, tuple(tensor.shape))
    if tensor.device_mesh.get_coordinate() is None:
        return Box((0,) * tensor.ndim, (0,) * tensor.ndim)
    if _is_cut_last_axis_first(tensor):
        slices = own_slices(tensor)
        return Box(tuple(part.start for part in slices), tuple(part.stop - part.start for part in slices))
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(tuple(offset), tuple(shape))


def require_box(name: str, tensor: Tensor) -> None:
    """Raises ValueError, on every rank, for a tensor of which a rank has something else than one box."""
    if not isinstance(tensor, DTensor) or _is_cut_last_axis_first(tensor):
        return
    if any(not placement.is_replicate() and type(placement) is not Shard for placement in tensor.placements):
        raise ValueError(
            f"{name} has the placements {tensor.placements}, with which a rank has no slice of the whole tensor; "
            "of a checkpoint they must be Shard, Replicate, or what fully_shard makes of those"
        )


def _is_cut_last_axis_first(tensor: DTensor) -> bool:
    """As fully_shard does: it shards what tensor parallelism, a later axis of the mesh, has left of a dim.

    torch computes the same boxes from the strided shard that says so, but others than FSDP's where parts are uneven.
    """
    pieces: dict[int, int] = {}  # of a dim, made by later axes
    for axis in reversed(range(tensor.device_mesh.ndim)):
        placement, size = tensor.placements[axis], tensor.device_mesh.size(axis)
        if placement.is_replicate() or (size == 1 and not placement.is_partial()):
            continue
        dim = getattr(placement, "dim", None)
        if dim is None or getattr(placement, "split_factor", 1) != pieces.get(dim, 1):
            return False
        pieces[dim] = pieces.get(dim, 1) * size
    return True


def local_of(tensor: Tensor) -> Tensor:
    """This rank's values, without their history."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def is_written_here(tensor: Tensor, index: int) -> bool:
    """Whether this rank writes its box of a state's tensor number ``index``. One of those that have it does; as
    ``index`` goes on they take turns, so that all write. Every rank knows without asking.

    Plain tensors are taken for the same on all ranks; so are DTensors on meshes that were cut from one mesh of all
    ranks.
    """
    if isinstance(tensor, DTensor):
        mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        if coordinate is None or not _is_turn_of(mesh, index):
            return False
        copies = [axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate()]
        number, count = 0, 1
        for axis in copies:
            number, count = number * mesh.size(axis) + coordinate[axis], count * mesh.size(axis)
        return number == index % count
    return not dist.is_initialized() or dist.get_rank() == index % dist.get_world_size()


def _is_turn_of(mesh: DeviceMesh, index: int) -> bool:
    """Of the meshes that were cut alike from one of all ranks, each rank is in one."""
    root = mesh._get_root_mesh()
    if root.size() == mesh.size() or root.size() != dist.get_world_size():
        return True
    return bool((mesh.mesh == root.mesh.flatten()[index % root.size()]).any())


def are_whole(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether they are together all of a tensor, and have nothing twice."""
    if sum(box.numel for box in boxes) != math.prod(shape):
        return False
    if any(end > size for box in boxes for end, size in zip(box.end, shape, strict=True)):
        return False
    # Boxes of a tensor that was cut, and its parts cut again, come apart by planes; few others are left for pairs.
    groups = [[box for box in boxes if box.numel]]
    while groups:
        group = groups.pop()
        parts = next((parts for dim in range(len(shape)) if len(parts := _apart(group, dim)) > 1), None)
        if parts is not None:
            groups += [part for part in parts if len(part) > 1]
        elif any(one & other for one, other in combinations(group, 2)):
            return False
    return True


def _apart(boxes: Sequence[Box], dim: int) -> list[list[Box]]:
    """In groups that have no coordinate along ``dim`` in common."""
    groups: list[list[Box]] = []
    reached = 0
    for box in sorted(boxes, key=lambda each: each.offset[dim]):
        if not groups or box.offset[dim] >= reached:
            groups.append([])
        groups[-1].append(box)
        reached = max(reached, box.offset[dim] + box.shape[dim])
    return groups
