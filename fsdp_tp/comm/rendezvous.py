"""How the ranks of a group find out, through their store, whether they can share memory.

Rank 0 offers a segment; every rank of the same host attaches it, says how that went, and waits for
all others to have spoken. So all come to the same conclusion, and a rank that never comes is named.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

# The first has no name that could be left behind; the second also works where ranks cannot see each other in /proc.
SEGMENT_KINDS = ("memfd", "named")


class Meeting:
    """One attempt of the ranks of a group to meet.

    Args:
        native: the compiled module.
        store: of the group; must be new to this group.
        members: the global ranks, or the empty list where they are the group's.
        group: its name, for errors.
    """

    def __init__(
        self, native: Any, store: dist.Store, rank: int, size: int, timeout: timedelta, members: list[int], group: str
    ) -> None:
        self._native, self._store, self._rank, self._size = native, store, rank, size
        self._timeout, self._members, self._group = timeout, members, group

    def segment(self) -> Any:
        """The segment that all ranks have attached or, where they cannot, a sentence why: the same kind on all."""
        why = ""
        for kind in SEGMENT_KINDS:
            store = dist.PrefixStore(kind, self._store)
            segment, problem = self._offer(store, kind) if self._rank == 0 else self._accept(store)
            if problem:
                store.set("problem", f"{self._name(self._rank)}: {problem}")
            # With the host: what a hierarchy of groups would be built from.
            store.set(f"arrived/{self._rank}", self._native.host())
            self._wait(store, {rank: f"arrived/{rank}" for rank in range(self._size)})
            if not store.check(["problem"]):
                segment.unlink()
                return segment
            why = store.get("problem").decode()
            if store.check(["elsewhere"]):
                break
        return why

    def _offer(self, store: dist.Store, kind: str) -> tuple[Any, str]:
        segment, problem = None, ""
        try:
            segment = self._native.Segment.create(self._size, named=kind == "named")
        except RuntimeError as error:
            problem = str(error)
        store.set("offer", f"{self._native.host()}\n{segment.handle if segment else ''}")
        return segment, problem

    def _accept(self, store: dist.Store) -> tuple[Any, str]:
        self._wait(store, {0: "offer"})
        host, handle = store.get("offer").decode().split("\n")
        if host != self._native.host():
            store.set("elsewhere", "")
            return None, f"it runs on another host, user or namespace than {self._name(0)}"
        if not handle:
            return None, f"{self._name(0)} has no segment"
        try:
            return self._native.Segment.attach(handle), ""
        except RuntimeError as error:
            return None, str(error)

    def _wait(self, store: dist.Store, keys: dict[int, str]) -> None:
        try:
            store.wait(list(keys.values()), self._timeout)
        except RuntimeError as error:
            missing = [self._name(rank) for rank, key in keys.items() if not store.check([key])]
            seconds = f"{self._timeout.total_seconds():g} s"
            raise dist.DistBackendError(
                f"fsdp_tp_shm: {', '.join(missing) or 'no rank'} of {self._size} did not come to group {self._group} "
                f"within {seconds}; has it failed, or does it use another backend?"
            ) from error

    def _name(self, rank: int) -> str:
        elsewhere = self._members and self._members[rank] != rank
        return f"rank {rank}" + (f" (global rank {self._members[rank]})" if elsewhere else "")
