"""Locks on files: the end of a process, however it comes, lets them go."""

from __future__ import annotations

import errno
import fcntl
from typing import IO

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


def hold(file: IO[bytes]) -> None:
    """Until ``file`` is closed; waits for whoever holds it. Where the file system has no locks, nothing is held."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def try_to_hold(file: IO[bytes]) -> bool | None:
    """False if somebody else holds it; None if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True
