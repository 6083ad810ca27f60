"""Checkpoints of a sharded model and its optimizer: written in parallel, complete or not there.

A checkpoint is a directory: torch distributed checkpoint's files, in global shapes and plain
names, and ``extra.json``. It is written under a temporary name and renamed when complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

__all__ = ["latest", "load", "save"]

_EXTRA = "extra.json"
# An entry is "state.<parameter name>.exp_avg", whatever the order of parameters.
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def save(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """Writes a checkpoint to the new directory ``path``; every rank must call it.

    Args:
        path: on a file system that all ranks share. Its name should end in a step number
            (``step-100``) for :func:`latest` to find it.
        model, optimizer: any layout; tensors are stored with their global shapes.
        extra: JSON-serialisable; rank 0's is stored.

    Raises:
        ValueError: ``path`` exists already: nothing saved is overwritten.
    """
    final = Path(path)
    if _agree(final.exists()):
        raise ValueError(f"checkpoint path {final} exists already; save to a new one or remove it")
    temporary = final.with_name(f".{final.name}.incomplete")
    if _rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    _barrier()
    dcp.save(_state(model, optimizer), checkpoint_id=temporary)
    if _rank() == 0:
        (temporary / _EXTRA).write_text(json.dumps(extra or {}))
        for file in temporary.iterdir():
            _fsync(file)
        temporary.rename(final)
        _fsync(final.parent)
    _barrier()


def load(
    path: str | os.PathLike[str], *, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Reads a checkpoint into ``model`` and ``optimizer``, in place; every rank must call it.

    The layout may differ from the one that saved it.

    Returns:
        What was given to :func:`save` as ``extra``.

    Raises:
        ValueError: ``path`` is not a complete checkpoint.
    """
    path = Path(path)
    if not _is_complete(path):
        raise ValueError(f"{path} is not a complete checkpoint: it has no {_EXTRA} or no .metadata file")
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=_BY_NAME)
    extra: dict[str, Any] = json.loads((path / _EXTRA).read_text())
    return extra


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint in ``directory`` whose name ends in the highest number, or None."""
    directory = Path(directory)
    if not directory.is_dir():
        return None
    numbered = [
        (int(match.group(1)), path)
        for path in directory.iterdir()
        if (match := re.search(r"(\d+)$", path.name)) and not path.name.startswith(".") and _is_complete(path)
    ]
    return max(numbered)[1] if numbered else None


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=_BY_NAME)
    return state


def _is_complete(path: Path) -> bool:
    return (path / _EXTRA).is_file() and (path / ".metadata").is_file()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _agree(condition: bool) -> bool:
    """Rank 0's answer on every rank: file systems may show a change at different times."""
    answer = [condition]
    if dist.is_initialized():
        dist.broadcast_object_list(answer, src=0)
    return answer[0]


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
