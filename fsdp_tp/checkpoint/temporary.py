"""A directory in which something is made that is not there before all of it is."""

from __future__ import annotations

import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from fsdp_tp.checkpoint.files import sync
from fsdp_tp.checkpoint.locks import hold, try_to_hold
from fsdp_tp.checkpoint.rank_0 import on_rank_0

_LOCK = ".fsdp_tp.lock"
_OTHER_HOSTS = 600.0
"""Seconds without a sign of life after which what another host has left goes. Its locks may not be seen here."""
_NAME = re.compile(r"\..+\.[0-9a-f]{8}\.incomplete")


class Temporary:
    """A new directory beside ``final``, the same on all ranks, until rank 0 gives it that name.

    Rank 0 holds a lock on a file in it, so that whoever finds one that a killed job has left can tell.
    """

    def __init__(self, final: Path) -> None:
        self.final = final
        self._lock: IO[bytes] | None = None

    def open(self, before: Callable[[], None] | None = None) -> Path:
        """Every rank must call it.

        Args:
            before: rank 0 calls it first; what it raises is raised on every rank.

        Raises:
            OSError: on every rank.
        """

        def make() -> Path:
            if before is not None:
                before()
            return self._make()

        self.path = on_rank_0(make)
        return self.path

    def _make(self) -> Path:
        self.final.parent.mkdir(parents=True, exist_ok=True)
        while True:
            path = _hidden(self.final)
            path.mkdir()
            try:
                self._lock = (path / _LOCK).open("wb", buffering=0)
                hold(self._lock)
                self._lock.write(_host())
            except FileNotFoundError:
                continue  # somebody has removed it before there was a lock
            except OSError:  # nothing of it stays on a full disk
                shutil.rmtree(path, ignore_errors=True)
                if self._lock is not None:
                    self._lock.close()
                raise
            if (path / _LOCK).exists():
                return path
            self._lock.close()  # somebody has removed it before it was locked

    def complete(self) -> None:
        """Rank 0 calls it: all of it is on the disk and has its name. Raises ValueError: that is taken; OSError."""
        sync(self.path)
        try:
            self.path.rename(self.final)
        except OSError as error:
            if not self.final.exists():
                raise
            raise ValueError(f"{self.final} exists already: somebody else has saved there meanwhile") from error
        # Not before: without it others might take the directory for one that nobody makes.
        (self.final / _LOCK).unlink(missing_ok=True)
        sync(self.final.parent)

    def close(self) -> None:
        """What has no name yet goes; every rank can call it."""
        if self._lock is not None:
            _remove(self.path)
            self._lock.close()


def remove(path: Path) -> None:
    """A directory that was :meth:`Temporary.complete`: it is not there before any of it goes. Raises OSError."""
    going = _hidden(path)
    with suppress(OSError):  # a full disk is no reason to keep it
        (path / _LOCK).write_bytes(_host())
    path.rename(going)
    _remove(going)


def remove_abandoned(directory: Path) -> None:
    """What killed jobs have left in it."""
    for path in directory.iterdir():
        if not _NAME.fullmatch(path.name):
            continue
        try:
            with (path / _LOCK).open("r+b") as lock:
                if try_to_hold(lock) and (lock.read() == _host() or _age(path) > _OTHER_HOSTS):
                    _remove(path)
        except FileNotFoundError:  # nothing is in it yet, or any more; or it is not of this library, and is not empty
            with suppress(OSError):
                path.rmdir()
        except OSError:
            continue


def _remove(path: Path) -> None:
    """The lock last: without it nobody would remove the rest."""
    for each in path.glob("*"):
        if each.name != _LOCK:
            with suppress(OSError):
                each.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _host() -> bytes:
    return socket.gethostname().encode()


def _age(path: Path) -> float:
    """Seconds since anything in it was written."""
    return time.time() - max(each.stat().st_mtime for each in (path, *path.iterdir()))


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.incomplete")
