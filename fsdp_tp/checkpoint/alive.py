"""Tells rank 0, which awaits the reports of a save in the background, that a rank has died and will leave none."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from fsdp_tp.checkpoint.rank_0 import require_success


class Alive:
    """A lock in ``directory`` that a rank holds until its report is there; its end, however it comes, lets it go.

    Waiting for a report that never comes would keep the process of rank 0 from ending, and the job from starting again.
    Every rank must make one; afterwards all hold theirs.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._lock: IO[bytes] | None = None
        error = None
        try:
            self._lock = (directory / f"{rank}.alive").open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as caught:
            error = caught
        require_success(f"{directory} cannot be written to", error)

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
