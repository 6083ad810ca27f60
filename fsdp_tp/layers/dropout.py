"""Dropout whose masks do not depend on the layout.

Random numbers that every rank draws for itself make masks that one process would not draw. Here the number of an
element is a function of a seed and of the element's place in the global batch, as counter-based generators have it
(Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011). So a rank makes the numbers
of the part that it holds, whatever part that is.

The seed is drawn from torch's default generator anew in every forward. Ranks that are seeded alike thus agree, and
activation checkpointing, which puts the generator back, replays the mask.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_tp.comm.functional import all_reduce, chunk_of
from fsdp_tp.layers.parameter import tensor_axis
from fsdp_tp.layers.sequence import SEQUENCE_DIM, SequenceLength
from fsdp_tp.layers.split import ZERO, Split
from fsdp_tp.mesh import ParallelMesh

_BITS = 53


class Dropout(nn.Dropout):
    """``nn.Dropout`` that drops the same elements of the same global batch on every layout.

    That takes ranks that are seeded alike (``torch.manual_seed``), and data ranks with as many rows each. Of the global
    batch, rank ``mesh.data_rank`` holds that slice along the first dim; an accumulation step is a batch of its own.
    Uncompiled it takes about 15 passes of integer arithmetic over the elements, on a CPU some five times as long as
    ``nn.Dropout``; ``torch.compile`` fuses them. What is kept for backward is one byte an element.

    Args:
        p: the probability of an element to become zero; others are multiplied by 1 / (1 - p).
        mesh: a ParallelMesh, or a DeviceMesh with a tensor axis (then every rank holds the whole batch).
        sequence_parallel: the input is this rank's slice along the sequence, dim -2. All slices are as long, or the
            attribute ``sequence_length`` is set to a :class:`~fsdp_tp.layers.SequenceLength` that knows the length of
            the whole.
        split: the input is this rank's part along ``split_dim``: features after a column-parallel layer, heads.
            Without these two every rank of the tensor axis holds it whole.

    Raises:
        ValueError: in the first forward that drops, on every rank of the tensor axis, if they would draw different
            seeds.
    """

    sequence_length: SequenceLength | None = None

    def __init__(
        self,
        p: float = 0.5,
        *,
        mesh: ParallelMesh | DeviceMesh,
        sequence_parallel: bool = False,
        split: Split | None = None,
        split_dim: int = -1,
    ) -> None:
        super().__init__(p)
        assert not sequence_parallel or split is None
        axis = tensor_axis(mesh)
        self.tensor_group = axis.get_group()
        self.data_rank = mesh.data_rank if isinstance(mesh, ParallelMesh) else 0
        self.sequence_parallel, self.split, self.split_dim = sequence_parallel, split, split_dim
        self._checked = self.tensor_group.size() == 1

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        return self._drop(input, self.p, *self._place(input))

    def _drop(self, x: Tensor, p: float, coordinates: list[Tensor], shape: list[int]) -> Tensor:
        """``coordinates`` and ``shape`` as in :func:`keep_mask`."""
        seed = torch.randint(2**62, (), device=x.device)
        if not self._checked and not torch.compiler.is_compiling():
            self._check(seed)
        keep = keep_mask(seed, p, self.data_rank, coordinates, shape)
        scaled = x * (1 / (1 - p) if p < 1 else 0.0)
        return scaled.masked_fill(~keep, 0)

    def _place(self, x: Tensor) -> tuple[list[Tensor], list[int]]:
        """For every dim the places of this rank's elements in the whole, and the shape of that."""
        if self.split is not None:
            return place_in_split(x, self.split, self.split_dim, self.tensor_group.rank())
        if self.sequence_parallel:
            return place_in_sequence(x, self.sequence_length, self.tensor_group)
        return place_of_whole(x)

    def _check(self, seed: Tensor) -> None:
        self._checked = True
        largest, complement = all_reduce(torch.stack([seed, ~seed]), self.tensor_group, "max")
        if largest != ~complement:  # the smallest
            raise ValueError(
                f"dropout: the {self.tensor_group.size()} ranks of one tensor axis draw different random numbers, but "
                "compute one batch together: call torch.manual_seed with the same seed on all of them"
            )


def place_of_whole(x: Tensor) -> tuple[list[Tensor], list[int]]:
    """The coordinates and the shape that :func:`keep_mask` takes, of an ``x`` that this rank holds whole."""
    return [torch.arange(size, device=x.device) for size in x.shape], list(x.shape)


def place_in_split(x: Tensor, split: Split, dim: int, rank: int) -> tuple[list[Tensor], list[int]]:
    """Those of the part that ``rank`` has along ``dim``."""
    coordinates, shape = place_of_whole(x)
    rows = split.rows[rank]
    # A row of zeros stays zero whatever its mask.
    coordinates[dim] = rows.masked_fill(rows == ZERO, 0).to(x.device)
    shape[dim] = split.size
    return coordinates, shape


def place_in_sequence(
    x: Tensor, sequence_length: SequenceLength | None, group: dist.ProcessGroup
) -> tuple[list[Tensor], list[int]]:
    """Those of a slice along the sequence; all are as long where ``sequence_length`` does not know better."""
    coordinates, shape = place_of_whole(x)
    length = None if sequence_length is None else sequence_length.of(x, group)
    if length is None:
        length = x.shape[SEQUENCE_DIM] * group.size()
    start, _ = chunk_of(length, group.size(), group.rank())
    coordinates[SEQUENCE_DIM] = coordinates[SEQUENCE_DIM] + start
    shape[SEQUENCE_DIM] = length
    return coordinates, shape


def keep_mask(seed: Tensor, p: float, slab: int, coordinates: list[Tensor], shape: list[int]) -> Tensor:
    """Which elements stay: True with probability 1 - p, independent of each other.

    Args:
        seed: int64, of no dims.
        slab: which tensor of ``shape`` it is of many that are stacked along their first dim.
        coordinates: for every dim the places that are wanted: int64, of one dim each.
        shape: of the whole tensor.
    """
    counter = (_mixed(seed) + slab * math.prod(shape)).view([1] * len(shape))
    for dim, places in enumerate(coordinates):
        stride = math.prod(shape[dim + 1 :])
        counter = counter + (places * stride).view([-1 if each == dim else 1 for each in range(len(shape))])
    number = _mixed(counter)
    number >>= 64 - _BITS
    number &= (1 << _BITS) - 1
    return number >= round(p * 2**_BITS)


def _mixed(counter: Tensor) -> Tensor:
    """splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators; OOPSLA 2014) at ``counter``.

    Its constants as signed numbers; int64 arithmetic wraps around, and a right shift fills with the sign unless masked.
    """
    z = counter * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        shifted = z >> shift
        shifted &= (1 << (64 - shift)) - 1
        z ^= shifted
        if factor != 1:
            z *= factor
    return z
