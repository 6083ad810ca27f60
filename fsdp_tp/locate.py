"""Where a rank's activations lie in those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Rows:
    """Which rows of a global batch are being computed."""

    start: int
    count: int
    total: int


class Place(NamedTuple):
    """Where a rank's part of a tensor lies in the whole, and which of several copies of the whole it belongs to."""

    starts: tuple[int, ...]
    data_replica: int | None
    """None: a part of the rows; else the rank among those that have all of them."""
    tensor_replica: int


def locate(
    local: Sequence[int], whole: Sequence[int], rows: Rows, data_rank: int, tensor_rank: int, tensor_size: int
) -> Place | None:
    """Where a rank's activation lies in that of one process, told from the shapes alone.

    Dim 0 may be the rows of this rank; one other dim may be split over the tensor axis, evenly or
    as ``torch.chunk`` does, also into fewer parts than there are ranks (kv heads that neighbouring
    ranks share). Everything else must be whole. None where that does not explain the shape, or
    something else could: a split second dim may be the rows of a model that puts them there.
    """
    if len(local) != len(whole) or 0 in local:
        return None
    starts = [0] * len(whole)
    data_replica: int | None = None if rows.count < rows.total else 0
    tensor_replica = 0
    split_over_tensor = False
    for dim, (part, size) in enumerate(zip(local, whole, strict=True)):
        if dim == 0 and size % rows.total == 0 and part * rows.total == size * rows.count and part != size:
            starts[0] = rows.start * (size // rows.total)
            continue
        if dim == 0 and rows.count < rows.total:
            data_replica = data_rank
        if part == size:
            continue
        rows_may_be_here = data_replica is not None and rows.count < rows.total
        if dim == 0 or split_over_tensor or rows_may_be_here:
            return None
        split_over_tensor = True
        pieces = size // part if size % part == 0 else 0
        chunk = -(-size // tensor_size)
        if pieces and tensor_size % pieces == 0:
            starts[dim] = (tensor_rank * pieces // tensor_size) * part
            tensor_replica = tensor_rank % (tensor_size // pieces)
        elif part == min(chunk, size - tensor_rank * chunk):
            starts[dim] = tensor_rank * chunk
        else:
            return None
    if not split_over_tensor:
        tensor_replica = tensor_rank
    return Place(tuple(starts), data_replica, tensor_replica)


def first_floating(values: Any) -> Tensor | None:
    """Of several arguments or results this one stands for all."""
    return next((leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
