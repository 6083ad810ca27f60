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
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from fsdp_tp.checkpoint.full import load_full_state_dict
from fsdp_tp.checkpoint.rank_0 import on_rank_0
from fsdp_tp.layers.canonical import arrange, arranged_parameters, restore, whole_shape, without_values

__all__ = ["latest", "load", "load_full_state_dict", "read_extra", "save"]

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
    temporary = final.with_name(f".{final.name}.incomplete")

    def prepare() -> None:
        json.dumps(extra)  # fails now rather than after the tensors are written
        if final.exists():
            raise ValueError(f"checkpoint path {final} exists already; save to a new one or remove it")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def complete() -> None:
        (temporary / _EXTRA).write_text(json.dumps(extra or {}))
        for file in temporary.iterdir():
            _fsync(file)
        temporary.rename(final)
        _fsync(final.parent)

    on_rank_0(prepare)
    dcp.save(_state(model, optimizer), checkpoint_id=temporary)
    on_rank_0(complete)


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
    extra = read_extra(path)
    with without_values():  # all of them come from the checkpoint
        state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        stored = _convert(model, state["optimizer"], as_stored=True)
        set_optimizer_state_dict(model, optimizer, stored, options=_BY_NAME)
    return extra


def read_extra(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What was given to :func:`save` as ``extra``, without loading tensors; every rank must call it.

    Raises:
        ValueError: ``path`` is not a complete checkpoint.
    """
    path = Path(path)

    def read() -> dict[str, Any]:
        if not _is_complete(path):
            raise ValueError(f"{path} is not a complete checkpoint: it has no {_EXTRA} or no .metadata file")
        found: dict[str, Any] = json.loads((path / _EXTRA).read_text())
        return found

    return on_rank_0(read)


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint in ``directory`` whose name ends in the highest number, or None.

    Every rank must call it; all get what rank 0 sees.
    """

    def find() -> Path | None:
        if not Path(directory).is_dir():
            return None
        numbered = [
            (int(match.group(1)), path)
            for path in Path(directory).iterdir()
            if (match := re.search(r"(\d+)$", path.name)) and not path.name.startswith(".") and _is_complete(path)
        ]
        return max(numbered)[1] if numbered else None

    return on_rank_0(find)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        stored = get_optimizer_state_dict(model, optimizer, options=_BY_NAME)
        state["optimizer"] = _convert(model, stored, as_stored=False)
    return state


def _convert(model: nn.Module, state: dict[str, Any], *, as_stored: bool) -> dict[str, Any]:
    """An optimizer's state between the order in which some parameters are stored and that of one process, which
    a model's own state dict has already (:mod:`fsdp_tp.layers.canonical`).

    Raises:
        ValueError: an entry holds something for every stored row, but has not the parameter's shape.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    converted = dict(state)
    for name, (split, dim) in arranged_parameters(model).items():
        like = parameters[name]
        before = whole_shape(like, (split, dim)) if as_stored else like.shape
        for entry, value in state.items():
            if not entry.startswith(f"state.{name}.") or not isinstance(value, Tensor):
                continue
            if value.shape == before:
                converted[entry] = arrange(value, split, dim, like) if as_stored else restore(value, split, dim)
            elif before[dim] in value.shape:
                raise ValueError(
                    f"{entry} has the shape {tuple(value.shape)}, {name} has {tuple(like.shape)} and is stored in "
                    f"another order along dim={dim}: of the optimizer's state only tensors of the parameter's own "
                    "shape, or without that dim, can be saved and loaded in any layout (factored state cannot)"
                )
    return converted


def _is_complete(path: Path) -> bool:
    return (path / _EXTRA).is_file() and (path / ".metadata").is_file()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
