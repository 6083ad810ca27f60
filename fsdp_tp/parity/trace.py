"""What a run of a job leaves behind: for each step its loss, its gradient norm and sketches of
everything that could go wrong in between. Also as a file, so that two machines can be compared."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsdp_tp.parity.files import write_whole
from fsdp_tp.parity.sketch import BUCKETS

Sketch = NDArray[np.float64]

FORMAT = "fsdp_tp parity curve 1"

# The stages of a step, in causal order. An event's key is "stage:path".
BATCH, INPUT, OUTPUT, LOSS = "batch", "input", "output", "loss"
OUTPUT_GRADIENT, GRADIENT, NORM, WEIGHT = "output gradient", "gradient", "gradient norm", "weight"


def key(stage: str, path: str = "") -> str:
    return f"{stage}:{path}"


def split_key(event: str) -> tuple[str, str]:
    stage, _, path = event.partition(":")
    return stage, path


def exact(value: float) -> Sketch:
    """The sketch of one number."""
    sketch = np.zeros(BUCKETS + 1)
    sketch[0], sketch[-1] = value, value * value
    return sketch


class RankStep(NamedTuple):
    """What one rank saw of one step."""

    step: int
    loss: float
    """Mean over the global batch; on every rank."""
    gradient_norm: float
    """Before clipping; on every rank."""
    events: list[str]
    sketches: NDArray[np.float64]
    """``(events, BUCKETS + 1)``, of the part that this rank holds."""
    replicas: list[int]
    """Parts of equal replica add up to one whole tensor; different replicas should be equal."""
    bits: int
    """Checksum of the bits of this rank's weights after the step."""


@dataclass
class Step:
    """What all ranks together saw of one step; step 0 holds the initial weights."""

    step: int
    loss: float
    gradient_norm: float
    events: dict[str, NDArray[np.float64]]
    """By key: ``(replicas, BUCKETS + 1)``. Weights after a step are what was added to the initial ones."""
    bits: tuple[int, ...] = ()


@dataclass
class Trace:
    """A run. ``shapes`` are the global shapes of what modules read and return."""

    layout: str
    steps: list[Step] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    """Which module's output an input is, by key, where it is one unchanged."""
    blocks: list[str] = field(default_factory=list)
    """Paths of the repeated layers, in order."""
    unlifted: dict[str, str] = field(default_factory=dict)
    """Modules that round to float32 in an fp64 run, with the operation."""
    reordered: str | None = None
    """The layer that sums its features in another order than usual."""

    def at(self, step: int) -> Step | None:
        """The record of one step."""
        return next((each for each in self.steps if each.step == step), None)

    @property
    def trained(self) -> list[Step]:
        """The steps after the initial weights."""
        return [step for step in self.steps if step.step > 0]


def merge(parts: Sequence[RankStep], initial: Step | None = None) -> Step:
    """The step that its parts, by rank, make.

    Given the ``initial`` weights, weights become what the optimizer has added to them: against the
    weights themselves a lost update would hardly show, and noise in them would hide it.
    """
    whole: dict[str, dict[int, Sketch]] = {}
    for rank, part in enumerate(parts):
        for event, sketch, replica in zip(part.events, part.sketches, part.replicas, strict=True):
            replicas = whole.setdefault(event, {})
            replicas[replica] = replicas[replica] + sketch if replica in replicas else sketch
        if part.step > 0:
            for stage, value in ((LOSS, part.loss), (NORM, part.gradient_norm)):
                whole.setdefault(key(stage), {})[rank] = exact(value)
    events = {event: np.stack([replicas[each] for each in sorted(replicas)]) for event, replicas in whole.items()}
    if initial is not None:
        for event, start in initial.events.items():
            if event in events and events[event].shape == start.shape:
                events[event] = events[event] - start
                events[event][:, -1] = (events[event][:, :-1] ** 2).sum(1)
    return Step(parts[0].step, parts[0].loss, parts[0].gradient_norm, events, tuple(part.bits for part in parts))


def write(path: Path, runs: dict[str, Trace], job: dict[str, Any]) -> None:
    """Writes ``runs`` (``"reference"`` and the runs that measure its noise) as JSON lines: first what the job
    was, then a line for each step of each run."""
    reference = runs["reference"]
    head = {
        "format": FORMAT,
        "job": job,
        "layout": reference.layout,
        "shapes": {event: list(shape) for event, shape in reference.shapes.items()},
        "sources": reference.sources,
        "blocks": reference.blocks,
        "unlifted": reference.unlifted,
    }
    records = (_to_json(name, step) for name, trace in runs.items() for step in trace.steps)
    write_whole(path, (json.dumps(values) + "\n" for values in chain([head], records)))


def read(path: Path) -> tuple[dict[str, Trace], dict[str, Any]]:
    """Reads what :func:`write` wrote; or a file of JSON lines with at least ``step`` and ``loss``, such as the
    trainer's ``metrics.jsonl``, of which only the curves can be compared.

    Returns:
        the runs by name, and the job.

    Raises:
        ValueError: not such a file, or cut off in the middle of a line.
    """
    steps: dict[str, dict[int, Step]] = {}
    job: dict[str, Any] = {}
    shared: dict[str, Any] = {"layout": str(path)}
    try:
        for values in _lines(path):
            if "format" in values:
                if values["format"] != FORMAT:
                    raise ValueError(f"is in the format {values['format']!r}; this version reads {FORMAT!r}")
                job = values["job"]
                shared = {name: values[name] for name in ("sources", "blocks", "unlifted")}
                shared["layout"] = f"{path} ({values['layout']})"
                shared["shapes"] = {event: tuple(shape) for event, shape in values["shapes"].items()}
                continue
            step = _from_json(values)
            # A run that was resumed may hold a step twice: the later line counts.
            steps.setdefault(values.get("run", "reference"), {})[step.step] = step
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"recorded curve {path}: {what}") from None
    runs = {name: Trace(**shared, steps=[found[step] for step in sorted(found)]) for name, found in steps.items()}
    if "reference" not in runs or not runs["reference"].trained:
        raise ValueError(f"recorded curve {path}: has no step")
    return runs, job


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} is not JSON: {error}") from None


def _to_json(run: str, step: Step) -> dict[str, Any]:
    return {
        "run": run,
        "step": step.step,
        "loss": step.loss,
        "gradient_norm": step.gradient_norm,
        "events": {event: base64.b64encode(sketches.tobytes()).decode() for event, sketches in step.events.items()},
    }


def _from_json(values: dict[str, Any]) -> Step:
    step, loss = int(values["step"]), float(values["loss"])
    norm = float(values.get("gradient_norm", math.nan))
    events: dict[str, NDArray[np.float64]] = {}
    if "events" in values:
        for event, text in values["events"].items():
            events[event] = np.frombuffer(base64.b64decode(text)).reshape(-1, BUCKETS + 1)
    elif step > 0:
        events[key(LOSS)] = exact(loss)[None]
        if not math.isnan(norm):
            events[key(NORM)] = exact(norm)[None]
    return Step(step, loss, norm, events)
