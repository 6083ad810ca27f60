"""Tells rank 0, which awaits the reports of a save in the background, that a rank has died and will leave none."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO


class Alive:
    """A lock in ``directory`` that a rank holds until its report is there; its end, however it comes, lets it go.

    Waiting for a report that never comes would keep the process of rank 0 from ending, and the job from starting again.
    Nobody may wait before all ranks hold theirs.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._path = directory / f"{rank}.alive"
        self._lock: IO[bytes] | None = None

    def hold(self) -> None:
        """Raises OSError: ``directory`` cannot be written to."""
        self._lock = self._path.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    @staticmethod
    def is_gone(directory: Path, rank: int) -> bool:
        """Whether the rank has ended, or at least its save, without a report of success or failure."""
        try:
            with (directory / f"{rank}.alive").open("r+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return not any((directory / f"{rank}.{outcome}").exists() for outcome in ("report", "failed"))
