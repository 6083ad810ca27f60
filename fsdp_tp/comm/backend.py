"""The c10d backend ``fsdp_tp_shm``: collectives through shared memory, and between hosts through gloo.

    dist.init_process_group("fsdp_tp_shm")     after register(), which importing fsdp_tp does where it can

Groups whose ranks cannot share memory with the others of their host run on gloo under the same name.
``FSDP_TP_BACKEND=gloo`` in the environment makes everything run on gloo.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_tp.comm.rendezvous import Meeting

NAME = "fsdp_tp_shm"
_LIBRARIES = Path(__file__).parents[1] / "_lib"

logger = logging.getLogger("fsdp_tp")


def unavailable() -> str | None:
    """Why the backend cannot be used in this process; None if it can."""
    native = _native()
    return native if isinstance(native, str) else None


def register() -> None:
    """Makes the backend known to torch; does nothing where it is known or unavailable."""
    if unavailable() is None and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        atexit.register(_native().shutdown_all)


def cpu_backend() -> str:
    """What CPU tensors should be communicated with: this backend, or gloo with a warning why.

    Raises:
        ValueError: the environment asks for something else than these two.
    """
    wanted = os.environ.get("FSDP_TP_BACKEND", NAME)
    if wanted not in (NAME, "gloo"):
        raise ValueError(f"FSDP_TP_BACKEND={wanted!r} in the environment: legal are {NAME} and gloo")
    if wanted == "gloo":
        return "gloo"
    if reason := unavailable():
        _warn_once(f"communication on the CPU goes over gloo: {reason}")
        return "gloo"
    register()
    return NAME


def backend_of(group: dist.ProcessGroup) -> str:
    """The name of what really moves the CPU tensors of a group."""
    return group._get_backend(torch.device("cpu")).name()


@functools.cache
def _native() -> Any:
    """The compiled module, or a sentence why there is none."""
    try:
        native = importlib.import_module("fsdp_tp._lib.fsdp_tp_torch")
    except ImportError as error:
        recorded = _LIBRARIES / "unavailable.txt"  # setup.py wrote it
        return recorded.read_text().strip() if recorded.exists() else f"fsdp_tp's kernels cannot be loaded: {error}"
    if native.torch_version != torch.__version__:
        return (
            f"fsdp_tp's kernels were built for torch {native.torch_version} and this is {torch.__version__}; "
            "install fsdp_tp again"
        )
    return native


def _create(options: Any, wire: Any) -> Any:
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    # A store may have served a group of this name before. Groups are made by all ranks together, so they count alike.
    count = options.store.add(f"{NAME}/{rank}", 1)
    store = dist.PrefixStore(f"{NAME}/{count}", options.store)
    gloo_store = dist.PrefixStore("gloo", store)
    segment, hosts = None, [[0]]
    members = list(options.global_ranks_in_group) or list(range(size))  # none: those of the world
    if size > 1:
        meeting = Meeting(_native(), store, rank, size, timeout, members, options.group_id)
        hosts = [[each] for each in range(size)] if wire and wire.everywhere else meeting.hosts()
        segment = meeting.segment(hosts)
        if isinstance(segment, str):
            if rank == 0:
                _warn_once(f"a group of {size} ranks communicates over gloo: {segment}")
            return dist.ProcessGroupGloo(gloo_store, rank, size, timeout)
    return _native().ShmBackend(segment, gloo_store, rank, size, timeout, hosts, wire.code if wire else 0, members)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
