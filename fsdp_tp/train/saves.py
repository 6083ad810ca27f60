"""The checkpoints of a run, and what to do about one that fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_tp import checkpoint
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
        how(path, model=model, optimizer=optimizer, extra=extra, keep_last=config.keep_last or None)
        say(f"{'saved' if waiting else 'saving'} {path}")
    except OSError as error:
        if last:
            raise
        say(f"NOT SAVED: {error}")
