"""Checkpoints of a sharded model and its optimizer: from any layout to any, complete or not there.

A checkpoint is a directory of safetensors files, a few for each rank that wrote it, and ``manifest.json``. Tensors have
the global shapes, names and order of the model in one process, and no trace of the layout. It is written under a
temporary name and renamed when it is complete and on the disk. Reading one executes nothing.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_tp.checkpoint.directory import newest_first
from fsdp_tp.checkpoint.fits import require_model, require_optimizer, require_parts
from fsdp_tp.checkpoint.full import load_full_state_dict
from fsdp_tp.checkpoint.hugging_face import load_hf, save_hf
from fsdp_tp.checkpoint.manifest import Damaged
from fsdp_tp.checkpoint.rank_0 import on_rank_0
from fsdp_tp.checkpoint.reading import find_problems, read_manifest, read_tensors
from fsdp_tp.checkpoint.state import (
    OPTIMIZER,
    describe_layout,
    load_model,
    load_optimizer,
    model_state,
    optimizer_state,
    optimizer_targets,
    random_state,
    set_random_state,
)
from fsdp_tp.checkpoint.values import from_json, to_json
from fsdp_tp.checkpoint.writing import Content, Saving, save_in_background, save_now
from fsdp_tp.layers.canonical import without_values

__all__ = [
    "Damaged",
    "Saving",
    "async_save",
    "latest",
    "load",
    "load_full_state_dict",
    "load_hf",
    "load_latest",
    "read_extra",
    "save",
    "save_hf",
    "wait",
]

logger = logging.getLogger("fsdp_tp")

# The save in the background whose outcome nobody has asked for yet, or whose buffers the next can use.
_last: Saving | None = None


def save(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    extra: dict[str, Any] | None = None,
    keep_last: int | None = None,
) -> None:
    """Writes a checkpoint to the new directory ``path``; every rank must call it, and it is complete on return.

    Each rank writes the part of each tensor that it has, replicas take turns.

    Args:
        path: on a file system that all ranks share. Its name should end in a step number
            (``step-100``) for :func:`latest` to find it.
        model, optimizer: any layout; tensors are stored with their global shapes and dtypes. Tensors that are no
            DTensors are taken for equal on all ranks.
        scheduler: any of torch's, or one whose ``state_dict()`` holds numbers, strings, tensors, lists, tuples and
            dicts only: it comes back as it was.
        extra: JSON-serialisable; rank 0's is stored, and tuples in it come back as lists. The states of random
            generators are stored without being asked.
        keep_last: afterwards, of this checkpoint and those beside it whose names have a lower number and else are the
            same, this many stay.

    Raises:
        ValueError: on every rank: ``path`` exists already (nothing saved is overwritten; a damaged checkpoint that is
            there gets another name), or a value cannot be stored, as ``extra`` with a tensor in it.
        OSError: on every rank: it could not be written. What was saved before is as it was.
    """
    _check(keep_last)
    wait()
    save_now(Path(path), _content(model, optimizer, scheduler, extra), keep_last)


def async_save(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    extra: dict[str, Any] | None = None,
    keep_last: int | None = None,
) -> Saving:
    """As :func:`save`, but returns as soon as this rank's parts are copied to memory of the host, and writes them in
    the background; every rank must call it.

    While an earlier one is still being written it waits for that. The copies (as large as what this rank writes;
    pinned on CUDA) are kept for the next. A process that ends waits for its save.

    Returns:
        The save, whose ``wait()`` returns when the checkpoint is complete.

    Raises:
        ValueError: as :func:`save`.
        OSError: the *earlier* save has failed; this one has not begun. A failure of this one is raised by its
            ``wait()``, or by the next call of :func:`async_save`, :func:`save`, :func:`load` or :func:`wait`.
    """
    global _last
    _check(keep_last)
    wait()
    content = _content(model, optimizer, scheduler, extra)
    buffers = _last.buffers if _last is not None else {}
    _last = save_in_background(Path(path), content, keep_last, buffers)
    return _last


def wait() -> None:
    """For the save in the background, if there is one; every rank must call it. Raises its OSError, once."""
    if _last is not None:
        _last.wait()


def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    verify: bool = True,
) -> dict[str, Any]:
    """Reads a checkpoint into ``model`` and ``optimizer``, in place; every rank must call it.

    The layout may differ from the one that saved it; each rank reads what it needs and no more. In a world of as many
    ranks, random generators go on where they were.

    Args:
        model: with memory for its parameters. Floating-point values are cast to the dtypes that it has.
        optimizer: of the same parameters; its groups take over the settings, all but how this run computes (``fused``,
            ``foreach``, ``capturable``, ``differentiable``).
        scheduler: its ``load_state_dict`` gets what was saved of one.
        verify: compares the digests of what is read meanwhile. Where another layout cuts the 16 MiB of one digest in
            two, one rank reads those again.

    Returns:
        What was given to :func:`save` as ``extra``.

    Raises:
        ValueError: on every rank, and nothing is loaded: ``path`` is not a complete checkpoint, or not one of this
            model, optimizer and scheduler; names, shapes and dtypes that do not fit are listed.
        Damaged: on every rank: (a ValueError) a file is not what was written; ``model`` and ``optimizer`` are partly
            overwritten.
    """
    wait()
    path = Path(path)
    manifest = read_manifest(path)
    with without_values():  # all of them come from the checkpoint
        tensors, aliases = model_state(model)
    require_parts(path, manifest, optimizer=optimizer, scheduler=scheduler)
    require_model(path, manifest, tensors, aliases)
    targets = dict(tensors)
    if optimizer is not None:
        require_optimizer(path, manifest, model, optimizer)
        targets.update(optimizer_targets(model, optimizer, manifest))
    count = read_tensors(path, manifest, targets, verify=verify)
    logger.info("%s: this rank read %s bytes of %s", path, count, sum(file.size for file in manifest.files.values()))
    load_model(model, tensors, aliases)
    if optimizer is not None:
        read = {name: tensor for name, tensor in targets.items() if name.startswith(OPTIMIZER)}
        load_optimizer(model, optimizer, read, manifest.values)
    if scheduler is not None:
        scheduler.load_state_dict(from_json(manifest.values["scheduler"]))
    if len(states := manifest.values["random"]) == (dist.get_world_size() if dist.is_initialized() else 1):
        set_random_state(states[dist.get_rank() if dist.is_initialized() else 0])
    return manifest.extra


def load_latest(
    directory: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
) -> tuple[Path, dict[str, Any]] | None:
    """:func:`load` of the newest checkpoint in ``directory`` that is complete and intact; every rank must call it.

    As ``load(latest(directory))``, but files are read once. A damaged checkpoint is passed over for the one
    before, with a warning that names the file.

    Returns:
        Its path, and what was given to :func:`save` as ``extra``; None if there is no checkpoint.

    Raises:
        ValueError: on every rank: as :func:`load`; ``directory`` is itself a checkpoint.
        Damaged: on every rank: there are checkpoints, and all are damaged.
    """
    wait()
    paths, problems = on_rank_0(lambda: newest_first(Path(directory))), []
    for path in paths:
        try:
            return path, load(path, model=model, optimizer=optimizer, scheduler=scheduler)
        except Damaged as damage:
            _pass_over(path, str(damage))
            problems.append(str(damage))
    if problems:
        raise Damaged(
            f"all {len(paths)} checkpoints in {directory} are damaged; mend them, or move them away to begin anew: "
            + "; ".join(problems)
        )
    return None


def read_extra(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What was given to :func:`save` as ``extra``, without loading tensors; every rank must call it.

    Raises:
        ValueError: ``path`` is not a complete checkpoint.
    """
    return read_manifest(Path(path)).extra


def latest(directory: str | os.PathLike[str], *, verify: bool = True) -> Path | None:
    """The newest complete checkpoint in ``directory``, by the number at the end of its name, or None.

    Every rank must call it; all get the same. A damaged one is passed over for the one before, with a warning that
    names the file.

    Args:
        verify: reads all files of a checkpoint and compares sizes and digests, each rank its share of them
            (:func:`load_latest` reads them once instead of twice). Without it only the manifest and sizes count.
    """
    for path in on_rank_0(lambda: newest_first(Path(directory))):
        problems = find_problems(path, verify=verify)
        if not problems:
            return path
        _pass_over(path, "; ".join(problems))
    return None


def _pass_over(path: Path, why: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning("%s is passed over: %s", path, why)


def _content(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: Any, extra: dict[str, Any] | None
) -> Content:
    tensors, aliases = model_state(model)
    values: dict[str, Any] = {}
    if optimizer is not None:
        of_optimizer, values = optimizer_state(model, optimizer)
        tensors = {**tensors, **of_optimizer}
    if scheduler is not None:
        values["scheduler"] = to_json(scheduler.state_dict(), "the scheduler's state")
    return Content(extra or {}, describe_layout(tensors), tensors, aliases, values, random_state())


def _check(keep_last: int | None) -> None:
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last={keep_last} must be at least 1; None keeps all")
