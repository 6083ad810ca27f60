"""Process groups whose ranks share the memory of one host.

Works with a process group of any backend: that only carries a few bytes once, with which the ranks find
each other. Afterwards they meet in memory.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import c_void_p
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.profiler import record_function

from fsdp_tp.comm.buffers import SharedBuffers
from fsdp_tp.comm.hosts import hosts_of
from fsdp_tp.comm.native import DTYPES, MEMFD, NAMED, Library, Memory, load, tensor_at


class NotShared(Exception):
    """These ranks cannot share memory; the message is the reason, the same on all of them."""


class SharedGroup:
    """The ranks of a process group, in shared memory.

    As with any process group, all ranks call the same methods in the same order. A rank that ends or stops
    makes the others raise ``torch.distributed.DistBackendError``, which names it, within the timeout of the
    process group.
    """

    def __init__(self, library: Library, handle: c_void_p, ranks: list[int], rank: int) -> None:
        self.size, self.rank = len(ranks), rank
        self._library, self._ranks = library, ranks
        self._handle: c_void_p | None = handle
        self.buffers = SharedBuffers()
        self._said = (ctypes.c_uint64 * self.size)()
        address = ctypes.addressof(self._said)
        self._say = (c_void_p * self.size)(*(address + 8 * peer for peer in range(self.size)))
        self._word = ctypes.c_uint64()

    @staticmethod
    def join(group: dist.ProcessGroup) -> SharedGroup:
        """The shared group of ``group``: made by the first call, which all its ranks make together. It is left when
        the process group is garbage, or has been destroyed and the next group is joined.

        Raises:
            NotShared: on all ranks, where any two of them cannot share memory.
        """
        if group not in _groups:
            _close_destroyed()
            try:
                _groups[group] = _join(group)
            except NotShared as reason:
                _groups[group] = str(reason)  # not the exception, whose traceback refers to the group
        found = _groups[group]
        if isinstance(found, str):
            raise NotShared(found)
        return found

    def barrier(self) -> None:
        """Returns when all ranks have called it; what they wrote before is visible afterwards."""
        self._call("barrier")

    def all_agree(self, bits: int) -> int:
        """The bits (of 64) that all ranks have set. A barrier too."""
        self._word.value = bits
        self._call("all_gather", self._say, ctypes.addressof(self._word), 8)
        for said in self._said:
            bits &= said
        return bits

    def map(self, size: int) -> Memory:
        """``size`` bytes that all ranks see, zero at first."""
        segment = c_void_p()
        self._call("group_map", max(size, 1), ctypes.byref(segment))
        return Memory(self._library, segment, max(size, 1))

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of this rank that its peers read in place when it is passed to :meth:`reduce_scatter`."""
        address = self._library.alloc(numel * dtype.itemsize)
        if not address:
            return torch.empty(numel, dtype=dtype)
        tensor, buffer = tensor_at(address, dtype, numel)
        weakref.finalize(buffer, self._library.free, address).atexit = False
        return tensor

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: int) -> None:
        """``out`` becomes this rank's part of the sum or mean (SUM or AVG) of all ranks' ``tensor``, in the order
        of ranks. 16-bit types are summed in fp32 and rounded once, or not at all into an fp32 ``out``."""
        count = out.numel()
        assert tensor.numel() == count * self.size
        start, step = tensor.data_ptr(), count * tensor.itemsize
        parts = (c_void_p * self.size)(*(start + step * rank for rank in range(self.size)))
        self._call(
            "reduce_scatter", out.data_ptr(), DTYPES[out.dtype], parts, count, DTYPES[tensor.dtype], op, 1.0
        )  # fmt: skip

    def close(self) -> None:
        """Leaves the group; peers that still wait for this rank raise."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self.buffers = SharedBuffers()
            self._library.group_leave(handle)
            self._library.trim()

    def _call(self, name: str, *arguments: Any) -> None:
        if torch.autograd._profiler_enabled():
            with record_function(f"fsdp_tp:{name}"):  # the prefix by which metrics know communication
                status = self._run(name, *arguments)
        else:
            status = self._run(name, *arguments)
        if status != 0:
            message = self._library.group_error(self._handle).decode(errors="replace")
            if self._ranks != list(range(self.size)):
                message += f" (rank r of this group is rank {self._ranks}[r] of the world)"
            raise dist.DistBackendError(message)

    def _run(self, name: str, *arguments: Any) -> int:
        if self._handle is None:
            raise RuntimeError(f"{name}: the process group of this shared memory has been destroyed")
        status: int = getattr(self._library, name)(self._handle, *arguments)
        return status


# The value must not refer to its key, or neither would ever go.
_groups: WeakKeyDictionary[dist.ProcessGroup, SharedGroup | str] = WeakKeyDictionary()


def _close_destroyed() -> None:
    """A destroyed group may live on for long: FSDP2 modules refer to it."""
    for group, shared in list(_groups.items()):
        if isinstance(shared, SharedGroup) and group not in dist.distributed_c10d._world.pg_map:
            shared.close()


def _join(group: dist.ProcessGroup) -> SharedGroup:
    if group.size() == 1:
        raise NotShared("a group of one rank does not communicate")
    if "cpu" not in (devices := {device.type for device in group._device_types}):
        raise NotShared(f"the process group serves {', '.join(sorted(devices))} and not the CPU")
    if (backend := dist.get_backend(group)) == "fake":
        raise NotShared(f"the process group's backend is {backend!r}")
    library = load()
    _require_none(_of_all(group, library if isinstance(library, str) else None), "")
    assert isinstance(library, Library)
    if (count := len(set(hosts_of(group) or ()))) > 1:
        raise NotShared(f"its {group.size()} ranks are on {count} hosts")
    try:
        segment = _common_segment(library, group, MEMFD)
    except NotShared:  # /proc of a peer cannot be seen
        segment = _common_segment(library, group, NAMED)
    handle, message = c_void_p(), ctypes.create_string_buffer(1024)
    status = library.group_join(
        segment, group.rank(), group.size(), timeout_of(group).total_seconds(), ctypes.byref(handle), message, 1024
    )
    if status != 0:
        raise dist.DistBackendError(message.value.decode(errors="replace"))
    shared = SharedGroup(library, handle, dist.get_process_group_ranks(group), group.rank())
    weakref.finalize(group, shared.close).atexit = False
    return shared


def _common_segment(library: Library, group: dist.ProcessGroup, kind: int) -> c_void_p:
    """One that rank 0 makes and the others attach to."""
    segment, status = c_void_p(), 0
    if group.rank() == 0:
        status = library.segment_create(library.group_bytes(group.size()), kind, ctypes.byref(segment))
    name = library.segment_handle(segment) if segment else None
    handle = _of_all(group, name)[0]
    if group.rank() != 0 and handle is not None:
        status = library.segment_attach(handle, ctypes.byref(segment))
    problems = _of_all(group, library.last_error().decode(errors="replace") if status != 0 else None)
    if segment and (group.rank() == 0 or any(problems)):
        library.segment_unlink(segment)  # all have it now, or nobody will
    if any(problems) and segment:
        library.segment_close(segment)
    _require_none(problems, "mapping shared memory failed: ")
    return segment


def _of_all(group: dist.ProcessGroup, value: Any) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _require_none(problems: list[str | None], prefix: str) -> None:
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise NotShared(f"{prefix}rank {rank}: {problem}")


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """After which a collective of the group on the CPU gives up."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    timeout: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return timeout
