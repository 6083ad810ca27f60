"""All-gather outputs that all ranks of a host share, in turns."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdp_tp.comm.native import Memory

if TYPE_CHECKING:
    from fsdp_tp.comm.shared_memory import SharedGroup

_MOST = 64  # the bits of SharedGroup.all_agree


class SharedBuffers:
    """Buffers that all ranks of a group map, each used by all ranks at a time or by none.

    A rank may still copy out of a buffer when others begin the next all-gather. So at the rendezvous of each
    all-gather every rank tells which buffers it no longer uses, and only what is free on all of them is used
    from then on. All ranks know the same and make the same choice, even if one frees a tensor later than others
    do, and it costs no rendezvous of its own.
    """

    def __init__(self) -> None:
        self._memories: list[Memory] = []
        self._used: list[bool] = []  # by this rank
        self._free = 0  # on all ranks, as bits

    def take(self, group: SharedGroup, numel: int, dtype: torch.dtype) -> Tensor:
        """Of memory that no rank uses, the same on all; used until the last tensor that has its storage is gone."""
        size = numel * dtype.itemsize
        free = [index for index in range(len(self._memories)) if self._free >> index & 1]
        fitting = [index for index in free if self._memories[index].bytes >= size]
        if fitting:
            index = min(fitting, key=lambda each: self._memories[each].bytes)
        elif free and len(self._memories) == _MOST:
            index = free[0]
            self._memories[index] = group.map(size)
        else:
            assert len(self._memories) < _MOST, "too many all-gathers at once"
            index = len(self._memories)
            self._memories.append(group.map(size))
            self._used.append(False)
        self._free &= ~(1 << index)
        self._used[index] = True
        tensor, buffer = self._memories[index].tensor(dtype, numel)
        weakref.finalize(buffer, self._used.__setitem__, index, False).atexit = False
        return tensor

    def rendezvous(self, group: SharedGroup) -> None:
        """A barrier that also finds out what is free."""
        self._free = group.all_agree(sum(1 << index for index, used in enumerate(self._used) if not used))
