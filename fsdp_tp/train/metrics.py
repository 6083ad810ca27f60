"""What a run shows and records: a progress bar or lines, metrics.jsonl, TensorBoard."""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger("fsdp_tp")


@dataclass(frozen=True)
class StepMetrics:
    """Numbers of one optimizer step, the same on every rank but for the last."""

    step: int
    loss: float
    """Mean over all tokens of the global batch."""
    gradient_norm: float
    """Before clipping."""
    learning_rate: float
    tokens_per_second: float
    """Over all ranks."""
    peak_memory_bytes: int
    """Largest over the ranks: of the allocator on CUDA, of the whole process on a CPU."""
    communication_share: float | None
    """Share of the step's time in which rank 0 had a collective running; only on profiled steps."""

    def line(self) -> str:
        return (
            f"step {self.step}  loss {self.loss:.4f}  gradient norm {self.gradient_norm:.3f}  "
            f"{self.tokens_per_second:,.0f} tokens/s  peak {self.peak_memory_bytes / 2**20:,.0f} MiB"
        )


class Reporter:
    """Rank 0's view of a run. On other ranks every method does nothing."""

    def __init__(self, output: Path, *, total_steps: int, log_every: int, active: bool) -> None:
        self._active = active
        if not active:
            return
        self._total_steps, self._log_every = total_steps, log_every
        output.mkdir(parents=True, exist_ok=True)
        self._file = _open_lines(output / "metrics.jsonl")
        self._tensorboard = _tensorboard_writer(output)
        self._console = Console()
        self._progress: Progress | None = None
        self._share, self._failing = "", False

    def say(self, message: str) -> None:
        if self._active:
            self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def start(self, first_step: int) -> None:
        if self._active and self._console.is_terminal:
            self._progress = Progress(
                BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"),
                console=self._console,
            )  # fmt: skip
            self._progress.start()
            self._task = self._progress.add_task("", total=self._total_steps, completed=first_step)

    def step(self, metrics: StepMetrics) -> None:
        if not self._active:
            return
        self._record(metrics)
        if metrics.communication_share is not None:
            self._share = f"  communication {metrics.communication_share:.0%} of step {metrics.step}"
        if self._progress is not None:
            self._progress.update(self._task, completed=metrics.step, description=metrics.line() + self._share)
        elif metrics.step == 1 or metrics.step % self._log_every == 0 or metrics.step == self._total_steps:
            print(metrics.line() + self._share, flush=True)

    def _record(self, metrics: StepMetrics) -> None:
        """A disk that is full does not end the training; lines that it has no room for come later, as many as a buffer
        holds."""
        try:
            self._file.write(json.dumps(asdict(metrics)) + "\n")
            self._failing = False
        except OSError as error:
            if not self._failing:
                self.say(f"metrics.jsonl cannot be written: {error}")
            self._failing = True
        if self._tensorboard is None:
            return
        try:
            for name, value in asdict(metrics).items():
                if name != "step" and value is not None:
                    self._tensorboard.add_scalar(name, value, metrics.step)
        except OSError as error:  # after one its writer takes nothing more
            self.say(f"TensorBoard gets no more of this run: {error}")
            self._tensorboard = None

    def close(self) -> None:
        if not self._active:
            return
        if self._progress is not None:
            self._progress.stop()
        with suppress(OSError):  # said when it came
            if self._tensorboard is not None:
                self._tensorboard.close()
        with suppress(OSError):
            self._file.close()


def _open_lines(path: Path) -> IO[str]:
    """For more of them. Half a line at the end, for which a full disk had no room, goes."""
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - 4096))
        if size and not (last := file.read()).endswith(b"\n"):
            file.truncate(start + last.rfind(b"\n") + 1)
    return path.open("a", buffering=1)


def _tensorboard_writer(output: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning("tensorboard is not installed: metrics go to metrics.jsonl only")
        return None
    return SummaryWriter(str(output / "tensorboard"))


class CommunicationShare:
    """Profiles one step and tells in which share of its time a collective was running.

    A collective that waits for a slower rank is running too. Overlapping collectives count once.
    """

    _NAMES = ("gloo:", "nccl", "fsdp_tp:", "fsdp_tp_shm:")

    def __init__(self, *, enabled: bool) -> None:
        self._profile: Any = None
        self.share: float | None = None
        self.spans: list[tuple[float, float]] = []
        """Start and end of each collective in microseconds, by start."""
        if enabled:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, acc_events=True)

    def __enter__(self) -> CommunicationShare:
        if self._profile is not None:
            with _muted_stderr():
                self._profile.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._profile is None:
            return
        with _muted_stderr():
            self._profile.__exit__(*exception)
        events = self._profile.events()
        spans = [(event.time_range.start, event.time_range.end) for event in events]
        self.spans = sorted(
            span for event, span in zip(events, spans, strict=True) if event.name.startswith(self._NAMES)
        )
        if spans:
            whole = max(end for _, end in spans) - min(start for start, _ in spans)
            self.share = covered(self.spans) / whole if whole else 0.0


@contextmanager
def _muted_stderr() -> Iterator[None]:
    """The profiler's library writes lines of its own there, in the middle of a progress bar."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of this process: allocated tensors on CUDA, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
