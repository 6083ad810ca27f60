"""Local processes that are handed functions to run as the ranks of one world after another.

Starting processes that import torch costs seconds, so they start once. A function that
raises, dies or hangs on one rank is an error here, and the next world gets new processes.
"""

from __future__ import annotations

import datetime
import gc
import inspect
import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from fsdp_tp.comm.backend import cpu_backend
from fsdp_tp.determinism import use_deterministic_algorithms

# DTensor's caches keep the meshes of past worlds, and every gloo group has threads that poll: a
# thousand of them after a hundred worlds. New workers are forked in a moment.
_WORLDS_PER_WORKER = 20
_PRELOAD = ("torch", "torch.distributed.tensor", "fsdp_tp", "fsdp_tp.parity")
# As gloo and fsdp_tp_shm say it.
_PEER_FAILED = ("Connection closed by peer", "Connection reset by peer", "has ended", "has left", "was given up")

Result = TypeVar("Result")


class RankError(RuntimeError):
    """A function failed on a rank; the message holds its traceback.

    ``sentence`` is the message of the exception alone where this package raised ValueError on all ranks: a
    setting that does not fit. None elsewhere.
    """

    def __init__(self, message: str, sentence: str | None = None) -> None:
        super().__init__(message)
        self.sentence = sentence


class WorkerDied(RuntimeError):
    """A process ended, or did not answer in time, while it was a rank."""


class Workers:
    """Processes on this machine; rank r of every world runs in process r.

    Args:
        collective_timeout: seconds after which a collective that a rank does not join raises on the others.
        call_timeout: seconds in which some rank must have given a sign of life (an item or a result).
        preload: modules to import once, for all processes, beside torch and this package.
    """

    def __init__(
        self, *, collective_timeout: float = 600, call_timeout: float = 1200, preload: Sequence[str] = ()
    ) -> None:
        self._collective_timeout, self._call_timeout = collective_timeout, call_timeout
        self._preload = [*_PRELOAD, *preload]
        self._workers: list[tuple[Any, Connection]] = []
        self._worlds = 0

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        on_item: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Runs ``function(*args)`` on ``world_size`` ranks of a new world; returns the results by rank.

        ``function`` must be importable by name. If it is a generator function, what a rank yields
        goes to ``on_item(rank, item)`` as it comes, and its return value is the result.

        Raises:
            RankError: it raised on a rank.
            WorkerDied: a process died, or none answered in time.
            ValueError: the function or an argument cannot be sent to another process.
        """
        if self._worlds >= _WORLDS_PER_WORKER:
            self.stop()
        self._start(world_size)
        self._worlds += 1
        workers = self._workers[:world_size]
        with tempfile.TemporaryDirectory() as directory:
            job = (world_size, os.path.join(directory, "store"), self._collective_timeout, function, args)
            try:
                message = pickle.dumps(job)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise ValueError(
                    f"cannot be sent to the processes of a layout: {error}; functions must be importable by name "
                    "(defined at the top level of a module), or functools.partial of such"
                ) from None
            try:
                for rank, (_, connection) in enumerate(workers):
                    _send(connection, message, f"rank {rank} of {world_size}")
                outcomes = self._collect(workers, on_item)
            except BaseException:
                self.stop()
                raise
        failures = [(rank, *failure) for rank, (passed, failure) in enumerate(outcomes) if not passed]
        if failures:
            # A rank that failed while it joined the world counts it, and would not meet the others in the next one.
            self.stop()
            raise _rank_error(world_size, failures)
        return [value for _, value in outcomes]

    def _start(self, count: int) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(self._preload)
        while len(self._workers) < count:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(len(self._workers), theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _collect(
        self, workers: list[tuple[Any, Connection]], on_item: Callable[[int, Any], None] | None
    ) -> list[tuple[bool, Any]]:
        ranks = {connection: rank for rank, (_, connection) in enumerate(workers)}
        outcomes: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + self._call_timeout
        while len(outcomes) < len(workers):
            waiting = [connection for connection, rank in ranks.items() if rank not in outcomes]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                names = ", ".join(str(ranks[connection]) for connection in waiting)
                raise WorkerDied(f"rank {names} of {len(workers)} did not answer within {self._call_timeout:.0f} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = ranks[connection]
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionResetError):
                    workers[rank][0].join(5)
                    code = workers[rank][0].exitcode
                    raise WorkerDied(f"rank {rank} of {len(workers)} died (exit code {code})") from None
                if kind == "item":
                    deadline = time.monotonic() + self._call_timeout
                    if on_item is not None:
                        on_item(rank, value)
                else:
                    outcomes[rank] = (kind == "result", value)
        return [outcomes[rank] for rank in range(len(workers))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the processes; the next run starts new ones."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers, self._worlds = [], 0


def _rank_error(world_size: int, failures: list[tuple[int, str, str | None]]) -> RankError:
    # Other ranks often fail only because a peer did: show one that did not wait for others.
    own = [each for each in failures if not any(sign in each[1] for sign in _PEER_FAILED)]
    rank, text, sentence = (own or failures)[0]
    if len(failures) < world_size or any(each[2] is None for each in own):
        sentence = None
    return RankError(f"rank {rank} of {world_size} ({len(failures)} failed):\n{text}", sentence)


def _send(connection: Connection, message: bytes, name: str) -> None:
    try:
        connection.send_bytes(message)
    except OSError:
        raise WorkerDied(f"{name} died before it was given work") from None


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised it, and not a library or the user's code, where the place matters."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(__file__).parents[1])


def run_alone(function: Callable[..., Result], *args: Any) -> Result:
    """Runs ``function(*args)``, importable by name, in a new process without a world, and ends it."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(function, *args).result()


def _serve(rank: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    # What was imported before the fork stays: no collection goes through it, nor the search for optimizers.
    gc.freeze()
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:  # the parent is gone or stopped its workers
            return
        try:
            outcome: tuple[str, Any] = ("result", _run(rank, message, connection))
        except BaseException as error:  # the traceback goes to the parent, which raises
            sentence = str(error) if isinstance(error, ValueError) and _is_ours(error) else None
            outcome = ("failure", (traceback.format_exc(), sentence))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        try:
            connection.send(outcome)
        except BrokenPipeError:
            return


def _run(rank: int, message: bytes, connection: Connection) -> Any:
    world_size, store_path, timeout, function, args = pickle.loads(message)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    device = None
    if torch.cuda.is_available():
        use_deterministic_algorithms()
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store = dist.FileStore(store_path, world_size)
    dist.init_process_group(
        cpu_backend() if device is None else "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout),
        device_id=device,
    )
    # A rank that is quick to end would break the connections that others are still making to it.
    joined = dist.PrefixStore("joined", store)
    joined.set(str(rank), "")
    joined.wait([str(each) for each in range(world_size)])
    torch.manual_seed(0)
    if not inspect.isgeneratorfunction(function):
        return function(*args)
    items = function(*args)
    while True:
        try:
            connection.send(("item", next(items)))
        except StopIteration as end:
            return end.value
