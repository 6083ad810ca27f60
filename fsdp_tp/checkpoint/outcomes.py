"""How ranks tell rank 0, without communicating, how their part of a save in the background has ended."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import IO, Any

from fsdp_tp.checkpoint.files import bytes_in
from fsdp_tp.checkpoint.locks import hold, try_to_hold


class Outcome:
    """A file in ``directory`` that is locked until it says how the part of ``rank`` has ended.

    Whoever gets the lock and reads nothing knows that the rank has died: waiting for it would keep the process of
    rank 0 from ending, and the job from starting again. (A file of its own beside the lock would not do: network file
    systems may show it later.)
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._path = _path(directory, rank)
        self._file: IO[bytes] | None = None

    def open(self) -> None:
        """Raises OSError: ``directory`` cannot be written to."""
        self._file = self._path.open("wb")
        hold(self._file)
        self._file.write(b" " * _ROOM)
        self._file.flush()

    def write(self, value: Any) -> None:
        """JSON. Raises OSError."""
        assert self._file is not None
        self._file.seek(0)
        self._file.write(json.dumps(value).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


_GONE = "gone"
_ROOM = 4096  # bytes, so that an error can be written to a disk that is full


def are_locks_seen(directory: Path, size: int) -> bool:
    """Whether rank 0, which calls it when all ranks hold theirs, sees that. Some network file systems lock for the
    processes of one host only."""
    return all(_read(directory, rank) is not _GONE for rank in range(size))


def await_outcomes(directory: Path, size: int, *, locks_seen: bool, stalled: float) -> list[Any]:
    """Of all ranks, in their order, as soon as all are there.

    Args:
        locks_seen: :func:`are_locks_seen`; without them a rank that has died is not told from one that is slow.
        stalled: after so many seconds in which no file has grown nobody is waited for any more.

    Raises:
        OSError: one is gone, or nothing happens any more.
    """
    outcomes: dict[int, Any] = {}
    before, since, pause = -1, time.monotonic(), 0.01
    while True:
        for rank in (rank for rank in range(size) if rank not in outcomes):
            outcome = _read(directory, rank)
            if outcome is _GONE and locks_seen:
                raise OSError(f"rank {rank} has ended before its part was written")
            if outcome not in (None, _GONE):
                outcomes[rank] = outcome
        if len(outcomes) == size:
            return [outcomes[rank] for rank in range(size)]
        written = bytes_in(directory)
        if written != before:
            before, since, pause = written, time.monotonic(), 0.01
        elif time.monotonic() - since > stalled:
            missing = next(rank for rank in range(size) if rank not in outcomes)
            raise OSError(f"rank {missing} has written nothing for {stalled:.0f} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


def _read(directory: Path, rank: int) -> Any:
    """None: it is still at work."""
    with _path(directory, rank).open("r+b") as file:
        is_free = try_to_hold(file)
        try:
            return json.loads(file.read())
        except ValueError:  # nothing, or not all of it
            return _GONE if is_free else None


def _path(directory: Path, rank: int) -> Path:
    return directory / f"{rank}.outcome"


def remove_outcomes(directory: Path) -> None:
    for path in directory.glob("*.outcome"):
        path.unlink()
