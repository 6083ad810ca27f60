"""The trainer with slow steps and slow saves, so that a signal finds it in the middle of one, and a record of samples.

    torchrun ... -m tests.checkpoint.slow <options of fsdp_tp.train>

Each rank appends a line a step to ``<output>.samples.jsonl``: which sequences it has taken.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp_tp.checkpoint import temporary, writing
from fsdp_tp.train import config as configuration
from fsdp_tp.train import data, lock, loop, main

STEP, SYNC = 0.03, 0.02
"""Seconds before a step, and before a directory is on the disk: also between a new checkpoint and an old one's end."""
FILE = float(os.environ.get("SECONDS_OF_A_FILE", "0.03"))


def _later(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
    def later(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments, **options)

    return later


def slow_down() -> None:
    loop.train_step = _later(STEP, loop.train_step)
    writing.write_tensors = _later(FILE, writing.write_tensors)
    temporary.sync = _later(SYNC, temporary.sync)
    lock.WAIT = float(os.environ.get("SECONDS_TO_WAIT", lock.WAIT))


def record_samples(output: Path) -> None:
    step, taken, file = 0, [], output.with_name(f"{output.name}.samples.jsonl")
    job = f"{os.environ['TORCHELASTIC_RUN_ID']} {os.environ['TORCHELASTIC_RESTART_COUNT']}"
    set_learning_rate, train_step, read = loop.set_learning_rate, loop.train_step, data.PackedSequences.__getitem__

    def noting(optimizer: Any, config: Any, now: int) -> float:
        nonlocal step
        step = now
        return set_learning_rate(optimizer, config, now)

    def taking(self: Any, index: int) -> Any:
        taken.append(index)
        return read(self, index)

    def recording(*arguments: Any) -> tuple[float, float]:
        with file.open("a") as lines:
            lines.write(json.dumps({"job": job, "step": step, "samples": taken}) + "\n")
        taken.clear()
        return train_step(*arguments)

    loop.set_learning_rate, loop.train_step, data.PackedSequences.__getitem__ = noting, recording, taking


if __name__ == "__main__":
    slow_down()
    record_samples(configuration.parse(sys.argv[1:]).output)
    sys.exit(main())
