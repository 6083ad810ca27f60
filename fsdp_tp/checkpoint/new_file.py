"""A new file, written past the page cache."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np

_BUFFER = 16 << 20
_BLOCK = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)


class NewFile:
    """Takes bytes one after another. They go to the disk from a buffer, without a copy in the page cache, which would
    be written only after everything else, and would push out what others read; where a file system has no such
    way, through the page cache. On the way out without an exception it waits until all is on the disk.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with suppress(OSError):
            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) | _DIRECT)
        self._buffer = np.frombuffer(mmap.mmap(-1, _BUFFER), np.uint8)  # at the start of a page, as it must be
        self._used = 0
        self.size = 0

    def __enter__(self) -> NewFile:
        return self

    def append(self, data: np.ndarray) -> None:
        """Bytes."""
        at = 0
        while at < len(data):
            count = min(len(data) - at, _BUFFER - self._used)
            self._buffer[self._used : self._used + count] = data[at : at + count]
            self._used += count
            at += count
            if self._used == _BUFFER:
                self._write(_BUFFER)
        self.size += len(data)

    def _write(self, count: int) -> None:
        rest = memoryview(self._buffer)[:count]  # type: ignore[arg-type]
        while rest:
            try:
                rest = rest[os.write(self._file, rest) :]
            except OSError as error:
                flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & _DIRECT:
                    raise
                # Blocks are larger here, or the write before ended inside of one.
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~_DIRECT)
        self._used = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._write(-(-self._used // _BLOCK) * _BLOCK)
                os.ftruncate(self._file, self.size)
                os.fsync(self._file)
        finally:
            os.close(self._file)
