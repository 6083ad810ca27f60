"""Worker processes that the whole test session shares.

Starting eight Python processes that import torch costs more than most tests, so they start
once and are handed functions: ``run(4, function, *args)`` runs ``function`` on a fresh world
of four ranks and returns the four results. A rank that raises fails the test with its
traceback; one that hangs is killed, and the next call starts a new pool.
"""

from __future__ import annotations

import datetime
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

WORKERS = 8
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=60)
CALL_TIMEOUT_SECONDS = 300
# DTensor's caches keep the meshes of past worlds, and every gloo group has threads that poll: a
# thousand of them after a hundred worlds. New workers are forked in a moment.
WORLDS_PER_WORKER = 20


def _worker(rank: int, connection: Any) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            job = connection.recv()
        except EOFError:  # the parent is gone or stopped the pool
            return
        world_size, store_path, function, args = job
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store_path, world_size),
                rank=rank,
                world_size=world_size,
                timeout=COLLECTIVE_TIMEOUT,
            )
            torch.manual_seed(0)
            result = (True, function(*args))
        except BaseException:  # the traceback goes to the parent, which raises
            result = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        connection.send(result)


class Ranks:
    """A pool of ``WORKERS`` processes; rank r of every world runs in worker r."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Any]] = []
        self._worlds = 0

    def _start(self) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "transformers", "fsdp_tp", "torch.distributed.tensor", "tests.models"])
        for rank in range(WORKERS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        if self._worlds == WORLDS_PER_WORKER:
            self.stop()
        if not self._workers:
            self._start()
        self._worlds += 1
        with tempfile.TemporaryDirectory() as directory:
            workers = self._workers[:world_size]
            for _, connection in workers:
                connection.send((world_size, os.path.join(directory, "store"), function, args))
            results = []
            for rank, (_, connection) in enumerate(workers):
                if not connection.poll(CALL_TIMEOUT_SECONDS):
                    self.stop()
                    raise TimeoutError(f"rank {rank} of {world_size} did not answer within {CALL_TIMEOUT_SECONDS} s")
                try:
                    results.append(connection.recv())
                except EOFError:
                    self.stop()
                    raise RuntimeError(f"rank {rank} of {world_size} died") from None
        failures = [(rank, message) for rank, (passed, message) in enumerate(results) if not passed]
        if failures:
            # Other ranks often fail only because a peer did: show the one that did not wait for others.
            rank, message = next(
                (failure for failure in failures if "Connection closed by peer" not in failure[1]), failures[0]
            )
            raise RankError(f"rank {rank} of {world_size} ({len(failures)} failed):\n{message}")
        return [value for _, value in results]

    def stop(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers, self._worlds = [], 0


class RankError(AssertionError):
    """A function failed on a rank; the message holds its traceback."""


_pool = Ranks()


def run(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs ``function(*args)`` (picklable, module-level) on ``world_size`` ranks; results by rank."""
    return _pool.run(world_size, function, *args)


def stop() -> None:
    """Ends the workers."""
    _pool.stop()
