"""What makes a comparison impossible is said in a sentence, before it could become a false verdict."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fsdp_tp.parity import trace
from fsdp_tp.parity.job import Job, count_rows, draws_random_numbers
from fsdp_tp.parity.judge import SAME, gap
from fsdp_tp.parity.layout import Layout
from fsdp_tp.parity.trace import Trace
from fsdp_tp.parity.workers import RankError, Workers

_BYTES_PER_RANK = 500 * 2**20  # of an idle process with torch and transformers, with room for a small model


def check_fits(job: Job, layout: Layout) -> None:
    """Raises ValueError if the batches or this machine do not allow ``layout``."""
    parts = layout.data_size * layout.micro_batches
    rows = count_rows(job.batch(1))
    if rows % parts:
        raise ValueError(
            f"layout {layout}: {rows} rows of a global batch do not divide into {layout.data_size} data ranks x "
            f"{layout.micro_batches} micro-batches; legal products: "
            f"{', '.join(str(number) for number in range(1, rows + 1) if rows % number == 0)}"
        )
    if torch.cuda.is_available():
        if layout.world_size > torch.cuda.device_count():
            raise ValueError(
                f"layout {layout} needs {layout.world_size} GPUs; this machine has {torch.cuda.device_count()}"
            )
        return
    memory = _available_memory()
    if memory is not None and layout.world_size * _BYTES_PER_RANK > memory:
        raise ValueError(
            f"layout {layout} needs {layout.world_size} processes of about {_BYTES_PER_RANK >> 20} MiB; this machine "
            f"has {memory >> 20} MiB free, enough for {memory // _BYTES_PER_RANK}"
        )


def _available_memory() -> int | None:
    """Bytes that new processes can have, where the system tells."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def check_deterministic(job: Job, layout: Layout, workers: Workers) -> None:
    """Raises ValueError: two forwards of one batch with different seeds have different losses."""
    with misfits_raised():
        found = workers.run(layout.world_size, draws_random_numbers, job, layout)
    for first, second, dropout in found:
        if first != second and not (math.isnan(first) and math.isnan(second)):
            why = f"it has dropout ({', '.join(dropout[:3])})" if dropout else "something in it draws random numbers"
            raise ValueError(
                f"the model is not deterministic: the same batch gave the losses {first!r} and {second!r}; {why}. Set "
                "it to 0 for the comparison, or draw masks that depend on the position alone and not on the layout"
            )


def check_same_start(reference: Trace, perturbed: Trace, eps: float) -> None:
    """Raises ValueError: the job is another one each time, and its noise would drown everything."""
    for what, made, bound in (("initial weights", trace.WEIGHT, max(2 * eps, SAME)), ("batches", trace.BATCH, SAME)):
        for expected, found in zip(reference.steps, perturbed.steps, strict=False):
            if made == trace.WEIGHT and expected.step > 0:
                break
            for event in expected.events:
                stage, path = trace.split_key(event)
                if stage == made and gap(found.events[event], expected.events[event]) > bound:
                    where = f"{path} differs" if made == trace.WEIGHT else f"in step {expected.step}"
                    raise ValueError(
                        f"the job has other {what} on every run ({where}): draw them from torch's generator, which is "
                        "seeded before build_model, or from the step"
                    )


def check_finite(reference: Trace) -> None:
    """Raises ValueError: the reference diverged, so nothing can be compared with it."""
    for step in reference.trained:
        if not math.isfinite(step.loss):
            raise ValueError(f"the reference diverged: its loss in step {step.step} is {step.loss}")


def check_same_job(recorded: Mapping[str, Any], ours: Mapping[str, Any], path: Path) -> None:
    """Raises ValueError: the recorded curve at ``path`` is of another job."""
    for name in ("dtype", "seed", "max_grad_norm"):
        if recorded.get(name) != ours[name]:
            raise ValueError(
                f"recorded curve {path} is of another job: {name}={recorded.get(name)}, here it is {ours[name]}"
            )


@contextlib.contextmanager
def misfits_raised() -> Iterator[None]:
    """What every rank raised as ValueError is one here."""
    try:
        yield
    except RankError as error:
        if error.sentence is None:
            raise
        raise ValueError(error.sentence) from error
