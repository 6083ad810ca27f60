"""The length of a sequence whose slices the ranks of a tensor axis hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist
from torch import Tensor

from fsdp_tp import regions
from fsdp_tp.comm.functional import chunk_of

SEQUENCE_DIM = -2


class SequenceLength:
    """Tells those who gather a sequence how long it is: a slice does not (5 is a part of 17 to 20 on 4 ranks).

    Layers that split a sequence ``note`` its length, those that gather it ask for it. One object
    serves a model, whose forwards run one after another.
    """

    def __init__(self) -> None:
        # A tensor's size, not an int: an int that a module leads to is a constant to torch.compile, which would
        # compile every length anew.
        self._noted: Tensor | None = None

    def note(self, whole: Tensor) -> None:
        """From now on slices are those of a sequence as long as this one."""
        self._noted = whole.new_empty((whole.shape[SEQUENCE_DIM], 0))

    @property
    def noted(self) -> int | None:
        """The length of the latest sequence."""
        return None if self._noted is None else self._noted.shape[0]

    def of(self, part: Tensor, group: dist.ProcessGroup) -> int | None:
        """The length of the sequence of which ``part`` is this rank's slice; None if no length was noted.

        Raises:
            ValueError: ``part`` belongs to another sequence than the one whose length was noted.
        """
        if self._noted is None:
            return None
        noted, length = self._noted.shape[0], part.shape[SEQUENCE_DIM]
        expected = chunk_of(noted, group.size(), group.rank())[1]
        if length != expected:
            raise ValueError(
                f"a slice of {length} tokens, but rank {group.rank()} of {group.size()} has {expected} of the "
                f"{noted} of the latest forward. Activation checkpointing of an earlier forward of another "
                "length? Let wrap(activation_checkpointing='full') do it, or run backward before the next forward"
            )
        return noted

    def recomputation(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For activation checkpointing, as its ``context_fn``: a later recomputation sees the length of now."""
        return nullcontext(), self._as_of_now(self._noted)

    @contextmanager
    def _as_of_now(self, noted: Tensor | None) -> Iterator[None]:
        latest, self._noted = self._noted, noted
        try:
            yield
        finally:
            self._noted = latest


def enter_tensor_axis(
    x: Tensor, group: dist.ProcessGroup, *, sequence_parallel: bool, length: SequenceLength | None
) -> Tensor:
    """x as the input of column-parallel products; with ``sequence_parallel`` from this rank's slice, of ``length``."""
    if sequence_parallel:
        return regions.gather_sequence(x, SEQUENCE_DIM, group, None if length is None else length.of(x, group))
    return regions.copy_to_tensor_axis(x, group)
