"""Where a rank's part of a parameter lies in the parameter of one process."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_tp.layers.parameter import own_part
from fsdp_tp.layers.split import Split, runs_of


class Piece(NamedTuple):
    """Rows of the part that are neighbours in the whole too."""

    dim: int
    first: int
    length: int
    starts: tuple[int, ...]
    """Where in the whole its first element is."""

    def of(self, local: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        return (local.narrow(self.dim, self.first, self.length) if local.ndim else local), self.starts


def pieces_of(parameter: DTensor, arrangement: tuple[Split, int] | None) -> list[Piece]:
    """The pieces of this rank's part of ``parameter``, which is not empty."""
    if not parameter.ndim:
        return [Piece(0, 0, 1, ())]
    indices = [_own_indices(parameter, dim) for dim in range(parameter.ndim)]
    split, dim = arrangement or (None, 0)
    rows = indices[dim] if split is None else split.stored[indices[dim]]
    starts = [int(own[0]) for own in indices]
    return [
        Piece(dim, first, length, (*starts[:dim], start, *starts[dim + 1 :])) for first, start, length in runs_of(rows)
    ]


def _own_indices(parameter: DTensor, dim: int) -> Tensor:
    """Global indices, along ``dim``, of this rank's part."""
    shape = [1] * parameter.ndim
    shape[dim] = -1
    indices = own_part(torch.arange(parameter.shape[dim]).view(shape).expand(parameter.shape), parameter)
    for other in range(parameter.ndim):
        indices = indices if other == dim else indices.narrow(other, 0, 1)
    return indices.flatten()
