"""One job at a time in an output directory."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import IO

import torch.distributed as dist

from fsdp_tp.checkpoint.locks import try_to_hold
from fsdp_tp.checkpoint.rank_0 import on_rank_0

logger = logging.getLogger("fsdp_tp")

WAIT = 60.0
"""Seconds that the job before, which was perhaps killed, may take to end: its ranks may be writing a checkpoint."""
_BETWEEN = 0.2


class OutputLock:
    """A lock that rank 0 holds on ``output/.lock``; the end of its process, however it comes, lets it go."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._file: IO[bytes] | None = None

    def hold(self) -> None:
        """Every rank must call it. Where the file system has no locks, does without.

        Raises:
            ValueError: on every rank: another job holds it and does not end, or the directory cannot be written to.
        """
        if on_rank_0(self._take):
            return
        if dist.get_rank() == 0:
            logger.warning("output=%s is in use by another job; waiting up to %.0f s for its end", self._output, WAIT)
        # Counted, and not timed, so that all ranks do the same; and no rank is long in one collective.
        for _ in range(round(WAIT / _BETWEEN)):
            time.sleep(_BETWEEN)
            if on_rank_0(self._take):
                return
        raise ValueError(
            f"output={self._output} is in use by another job, still after {WAIT:.0f} s; choose another output or end "
            "that job"
        )

    def release(self) -> None:
        if self._file is not None:
            self._file.close()

    def _take(self) -> bool:
        try:
            self._output.mkdir(parents=True, exist_ok=True)
            file = (self._output / ".lock").open("wb")
        except OSError as error:
            raise ValueError(f"output={self._output} cannot be written to: {error}") from error
        if try_to_hold(file) is False:
            file.close()
            return False
        self._file = file
        return True
