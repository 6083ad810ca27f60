"""Ranks in processes of their own, for tests that end or stop some of them."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist

from fsdp_tp.comm.backend import NAME, register


class Job:
    """``count`` processes that run ``function(*args)``, importable by name, as ranks of one world."""

    def __init__(self, count: int, function: Any, *args: Any, timeout: float = 30) -> None:
        context = mp.get_context("forkserver")
        self._directory = tempfile.TemporaryDirectory()
        self._ranks = []
        for rank in range(count):
            ours, theirs = context.Pipe(duplex=False)
            job = (rank, count, os.path.join(self._directory.name, "store"), timeout, theirs, function, args)
            process = context.Process(target=_be_rank, args=job, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def results(self, *, but: int | None = None, within: float = 30) -> list[Any]:
        """What the ranks returned within some seconds, and None of those that did not and of rank ``but``.

        Ends the processes.
        """
        deadline = time.monotonic() + within
        found: list[Any] = [None] * len(self._ranks)
        for rank, (_, connection) in enumerate(self._ranks):
            with contextlib.suppress(EOFError):  # it has died
                if rank != but and connection.poll(max(0.0, deadline - time.monotonic())):
                    found[rank] = connection.recv()
        for process, _ in self._ranks:
            process.kill()
            process.join()
        self._directory.cleanup()
        return found


def _be_rank(rank: int, count: int, store: str, timeout: float, connection: Any, function: Any, args: Any) -> None:
    torch.set_num_threads(1)
    register()
    dist.init_process_group(
        NAME,
        store=dist.FileStore(store, count),
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=timeout),
    )
    try:
        connection.send(function(*args))
    except Exception:
        connection.send(traceback.format_exc())
    # Whoever ends first must not be what the others report.
    time.sleep(60)
