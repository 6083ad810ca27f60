"""How the ranks of a group find out, through their store, who shares memory with whom.

Every rank says on which host it is. On each host the first rank offers a segment; the others attach it, say how
that went, and wait for all others to have spoken. So all come to the same conclusion, and a rank that never comes is
named.
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

    def hosts(self) -> list[list[int]]:
        """The ranks of each host, hosts in the order of their first ranks."""
        self._store.set(f"host/{self._rank}", self._native.host())
        self._wait(self._store, {rank: f"host/{rank}" for rank in range(self._size)})
        found: dict[bytes, list[int]] = {}
        for rank in range(self._size):
            found.setdefault(self._store.get(f"host/{rank}"), []).append(rank)
        return list(found.values())

    def segment(self, hosts: list[list[int]]) -> Any:
        """The segment that all ranks of this host have attached, None where there is only one, or a sentence why not:
        on all ranks of the group, where it is so on any host."""
        [here] = (ranks for ranks in hosts if self._rank in ranks)
        result = self._attach(here) if len(here) > 1 else None
        self._store.set(f"ready/{self._rank}", result if isinstance(result, str) else "")
        self._wait(self._store, {rank: f"ready/{rank}" for rank in range(self._size)})
        problems = filter(None, (self._store.get(f"ready/{rank}").decode() for rank in range(self._size)))
        return next(problems, result)

    def _attach(self, here: list[int]) -> Any:
        why = ""
        for kind in SEGMENT_KINDS:
            store = dist.PrefixStore(f"{here[0]}/{kind}", self._store)
            segment, problem = (
                self._offer(store, kind, len(here)) if self._rank == here[0] else self._accept(store, here)
            )
            if problem:
                store.set("problem", f"{self._name(self._rank)}: {problem}")
            store.set(f"arrived/{self._rank}", "")
            self._wait(store, {rank: f"arrived/{rank}" for rank in here})
            if not store.check(["problem"]):
                segment.unlink()
                return segment
            why = store.get("problem").decode()
        return why

    def _offer(self, store: dist.Store, kind: str, size: int) -> tuple[Any, str]:
        segment, problem = None, ""
        try:
            segment = self._native.Segment.create(size, named=kind == "named")
        except RuntimeError as error:
            problem = str(error)
        store.set("offer", segment.handle if segment else "")
        return segment, problem

    def _accept(self, store: dist.Store, here: list[int]) -> tuple[Any, str]:
        self._wait(store, {here[0]: "offer"})
        handle = store.get("offer").decode()
        if not handle:
            return None, f"{self._name(here[0])} has no segment"
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
