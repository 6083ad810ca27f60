"""Which box of a global tensor a rank has, who of those that have it writes it, and how boxes overlap."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


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
    """What this rank has of a tensor; of a plain one, all.

    By torch's arithmetic, so of a DTensor that was cut elsewhere too (:func:`fsdp_tp.layers.parameter.own_slices` knows
    this library's cuts, and a test holds the two together).
    """
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.ndim, tuple(tensor.shape))
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(tuple(offset), tuple(shape))


def local_of(tensor: Tensor) -> Tensor:
    """This rank's values, without their history."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def is_written_here(tensor: Tensor, index: int) -> bool:
    """Whether this rank writes its box of a state's tensor number ``index``. One of those that have it does; as
    ``index`` goes on they take turns, so that all write. Every rank knows without asking.

    Plain tensors are taken for the same on all ranks.
    """
    if isinstance(tensor, DTensor):
        mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        if coordinate is None:
            return False
        copies = [axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate()]
        number, count = 0, 1
        for axis in copies:
            number, count = number * mesh.size(axis) + coordinate[axis], count * mesh.size(axis)
        return number == index % count
    return not dist.is_initialized() or dist.get_rank() == index % dist.get_world_size()
