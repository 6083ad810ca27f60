"""The checkpoints of a run: what to do about one that fails, and about one that is there already."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_tp import checkpoint
from fsdp_tp.checkpoint.rank_0 import on_rank_0
from fsdp_tp.checkpoint.reading import find_problems
from fsdp_tp.train.config import TrainConfig


def save(
    path: Path,
    config: TrainConfig,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: dict[str, Any],
    last: bool,
    say: Callable[[str], None],
) -> None:
    """Saves a step, ``last`` or not; every rank must call it. What fails before the last step is said, and the training
    goes on: the disk may have room again when the next one is saved.

    Raises:
        OSError: on every rank: the last one could not be written.
    """
    try:
        checkpoint.wait()
    except OSError as error:
        say(f"NOT SAVED: {error}")
    waiting = last or not config.save_in_background
    how = checkpoint.save if waiting else checkpoint.async_save
    try:
        if on_rank_0(path.exists):
            _set_aside(path)
        how(path, model=model, optimizer=optimizer, extra=extra, keep_last=config.keep_last or None)
        say(f"{'saved' if waiting else 'saving'} {path}")
    except OSError as error:
        if last:
            raise
        say(f"NOT SAVED: {error}")


def _set_aside(path: Path) -> None:
    """A damaged checkpoint, which the resume has passed over: else this step would be done. Every rank calls it."""
    if not find_problems(path, verify=True):
        raise ValueError(
            f"{path} is a complete checkpoint that this run has not begun from; start again to go on from it, or "
            "choose another output"
        )

    def rename() -> None:
        aside = (path.with_name(f"{path.name}.damaged-{number}.old") for number in itertools.count(1))
        path.rename(next(each for each in aside if not each.exists()))

    on_rank_0(rename)
