"""Which part of one dim of a weight each rank of the tensor axis computes with, and how it is stored.

Where every rank's part is what ``torch.chunk`` gives it (the last ranks may have less), a weight is stored
as it is. Attention cannot always be cut so: heads must stay whole, packed weights hold a rank's part in
several places, and key/value heads may be fewer than the ranks. Then

- rows that one rank computes with are stored on that rank: in another order than in the whole weight, and
  with zeros at the end where a rank has less than others. Nothing computes with those zeros, so they have no
  gradient and stay zero.
- rows that several ranks compute with are stored once, in chunks, and gathered when they are used.

So every parameter is an ordinary DTensor, whatever the shape of the model. Its own shape and order are what
a state dict shows (:mod:`fsdp_tp.layers.canonical`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_tp import regions
from fsdp_tp.comm.functional import chunk_of

ZERO = -1
"""Stands for a row of zeros."""


Function = TypeVar("Function", bound=Callable[..., Any])


def on_cpu(function: Function) -> Function:
    """Indices are made on the CPU, whatever the default device: also of a model that is built on meta."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return cast(Function, wrapper)


class Split:
    """How the rows of a weight (or its columns: one dim of it) are split over the ranks of a tensor axis.

    Args:
        size: how many rows the whole weight has.
        rows: for every rank the rows that it computes with, in its order: int64. All ranks together cover the
            weight; some may have rows in common. ``ZERO`` is a row of zeros, for a rank that would otherwise
            have none.
    """

    @on_cpu
    def __init__(self, size: int, rows: Sequence[Tensor]) -> None:
        self.size = size
        self.rows = tuple(rows)
        self._places_on: dict[torch.device, list[Tensor]] = {}
        users = torch.zeros(size, dtype=torch.int64)
        for part in self.rows:
            users[part[part != ZERO]] += 1
        assert bool((users > 0).all()), "a row that no rank computes with"
        whole = torch.arange(size)
        self.is_chunked = all(
            torch.equal(part, _chunk_of(whole, rank, len(self.rows))) for rank, part in enumerate(self.rows)
        )
        """Every rank's part is the chunk that ``torch.chunk`` gives it."""
        self._users = users
        self._shared = (users > 1).nonzero().flatten()
        self._own = [part[(part == ZERO) | (users[part] == 1)] for part in self.rows]
        self._own_length = max(own.numel() for own in self._own)
        self._is_disjoint = not self._shared.numel()
        self.places = [self._places(rank) for rank in range(len(self.rows))] if not self._is_disjoint else []
        """Where a rank's rows are in its own ones followed by all shared ones, if there are shared ones."""
        self.stored = self._stored()
        """For every stored row its place in the whole weight, or ZERO."""
        self.is_stored_as_is = torch.equal(self.stored, torch.arange(size))

    def _stored(self) -> Tensor:
        ranks = len(self.rows)
        if not self._own_length:
            return self._shared
        if self.is_chunked:
            return torch.arange(self.size)  # uneven chunks need no padding
        length = -(-self._shared.numel() // ranks)
        parts = [
            torch.cat([_padded(own, self._own_length), _padded(_chunk_of(self._shared, rank, ranks), length)])
            for rank, own in enumerate(self._own)
        ]
        return torch.cat(parts)

    @staticmethod
    @cache
    @on_cpu
    def chunks(size: int, ranks: int) -> Split:
        """As ``torch.chunk`` splits: of features that are gathered, or cut from whole ones."""
        return Split(size, [_chunk_of(torch.arange(size), rank, ranks) for rank in range(ranks)])

    @staticmethod
    @cache
    @on_cpu
    def even(size: int, ranks: int) -> Split:
        """As ``torch.chunk`` splits; where that would leave the last ranks nothing, in parts that differ by one."""
        chunks = Split.chunks(size, ranks)
        return chunks if chunks.rows[-1].numel() else Split(size, torch.arange(size).tensor_split(ranks))

    @staticmethod
    @on_cpu
    def packed(parts: Sequence[Split]) -> Split:
        """Of weights whose rows stand one after another in a single one."""
        rows: list[list[Tensor]] = [[] for _ in parts[0].rows]
        start = 0
        for part in parts:
            for rank, own in enumerate(part.rows):
                rows[rank].append(torch.where(own == ZERO, ZERO, own + start))
            start += part.size
        return Split(start, [torch.cat(own) for own in rows])

    @on_cpu
    def blocks(self, length: int) -> Split:
        """Every row stands for a block of ``length`` rows: a head for its features."""
        inside = torch.arange(length)
        rows = [torch.where(part == ZERO, ZERO, part * length)[:, None] + inside for part in self.rows]
        zero = [(part == ZERO)[:, None].expand(-1, length) for part in self.rows]
        return Split(
            self.size * length,
            [part.masked_fill(is_zero, ZERO).flatten() for part, is_zero in zip(rows, zero, strict=True)],
        )

    def arrange(self, whole: Tensor, dim: int, part: slice = slice(None)) -> Tensor:
        """The whole weight as it is stored, or only ``part`` of the stored rows."""
        if self.is_stored_as_is:
            return whole[(slice(None),) * dim + (part,)]
        stored = self.stored[part].to(whole.device)
        shape = [1] * whole.ndim
        shape[dim] = -1
        return whole.index_select(dim, stored.clamp(min=0)).masked_fill_((stored == ZERO).view(shape), 0)

    def restore(self, stored: Tensor, dim: int) -> Tensor:
        """The whole weight from how it is stored: undoes :meth:`arrange`."""
        if self.is_stored_as_is:
            return stored
        places = torch.empty(self.size, dtype=torch.int64)
        real = (self.stored != ZERO).nonzero().flatten()
        places[self.stored[real]] = real
        return stored.index_select(dim, places.to(stored.device))

    def local(self, stored: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        """What this rank computes with, from its part of the stored weight (types as in
        :mod:`fsdp_tp.regions`: varying). The gradient of rows that ranks have in common is summed."""
        rank = group.rank()
        own = self._own[rank].numel()
        if self._is_disjoint:
            return stored if stored.shape[dim] == own else stored.narrow(dim, 0, own)
        chunk = stored.narrow(dim, self._own_length, stored.shape[dim] - self._own_length)
        shared = regions.gather_weight(chunk, dim, group, None if self._own_length else self._shared.numel())
        joined = torch.cat([stored.narrow(dim, 0, own), shared], dim) if own else shared
        return joined.index_select(dim, self.places_on(stored.device)[rank])

    def places_on(self, device: torch.device) -> list[Tensor]:
        """``places`` there, copied once."""
        if device.type == "cpu":
            return self.places
        if device not in self._places_on:
            self._places_on[device] = [places.to(device) for places in self.places]
        return self._places_on[device]

    def runs(self, rank: int, *, once: bool) -> list[tuple[int, int, int]]:
        """Rows of ``rank`` that are neighbours in the whole: place among its own, place in the whole, length.

        ``once``: a row that several ranks have counts for the first of them.
        """
        part = self.rows[rank]
        if once and rank:
            part = part.masked_fill(torch.isin(part, torch.cat(self.rows[:rank])), ZERO)
        return runs_of(part)

    def shares(self, rank: int) -> Tensor:
        """For every row of ``rank`` one over the number of ranks that compute with it; 0 for rows of zeros."""
        part = self.rows[rank]
        return (1.0 / self._users[part].double()).masked_fill(part == ZERO, 0)

    def _places(self, rank: int) -> Tensor:
        part, own = self.rows[rank], self._own[rank]
        places = torch.empty_like(part)
        is_shared = torch.isin(part, self._shared)
        places[~is_shared] = torch.arange(own.numel())
        places[is_shared] = own.numel() + torch.searchsorted(self._shared, part[is_shared])
        return places

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Split) or self.size != other.size or len(self.rows) != len(other.rows):
            return False
        return all(torch.equal(mine, its) for mine, its in zip(self.rows, other.rows, strict=True))

    __hash__ = None  # type: ignore[assignment]


def runs_of(rows: Tensor) -> list[tuple[int, int, int]]:
    """Runs of consecutive numbers: their first index, first number and length. Without those of zeros."""
    breaks = (rows[1:] != rows[:-1] + 1) | (rows[1:] == ZERO) | (rows[:-1] == ZERO)
    firsts = [0, *(breaks.nonzero().flatten() + 1).tolist(), rows.numel()]
    return [
        (first, int(rows[first]), last - first)
        for first, last in pairwise(firsts)
        if last > first and rows[first] != ZERO
    ]


def _chunk_of(rows: Tensor, rank: int, ranks: int) -> Tensor:
    return rows.narrow(0, *chunk_of(rows.numel(), ranks, rank))


def _padded(rows: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, length - rows.numel()), value=ZERO)
