"""Runs a job under a reference layout, measures its noise, and compares other layouts with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fsdp_tp
from fsdp_tp.parity import trace
from fsdp_tp.parity.checks import (
    check_deterministic,
    check_finite,
    check_fits,
    check_same_job,
    check_same_start,
    misfits_raised,
)
from fsdp_tp.parity.job import Facts, Job, Role
from fsdp_tp.parity.job import run as run_on_rank
from fsdp_tp.parity.judge import BOUNDS, Bounds, Noise, compare
from fsdp_tp.parity.layout import Layout
from fsdp_tp.parity.observe import probe_shapes
from fsdp_tp.parity.report import LevelReport, Report, Result
from fsdp_tp.parity.trace import RankStep, Trace, key
from fsdp_tp.parity.workers import RankError, WorkerDied, Workers

LEVEL_OF = {torch.float64: 1, torch.float32: 2, torch.bfloat16: 3}
DTYPE_OF = {level: dtype for dtype, level in LEVEL_OF.items()}

Progress = Callable[[str, int, int], None]
"""Called with the name of a run, its step and the number of steps."""

_PERTURBATIONS = (0, 1)
_NO_NOISE = "it has no noise measured, so only the bounds of its level hold"


def compare_layouts(
    job: Job,
    layouts: Sequence[Layout],
    *,
    reference: Layout | Path = Layout(),
    repeat: bool = False,
    record: Path | None = None,
    workers: Workers,
    progress: Progress = lambda name, step, steps: None,
    finished: Callable[[Report], None] = lambda report: None,
) -> Report:
    """The level of ``job.dtype`` for every layout, and with ``repeat`` level 4 too.

    A layout whose run fails has an error in the report; the others are compared all the same.
    ``finished`` gets the report so far after each layout.

    Raises:
        ValueError: a layout does not fit the batches or the machine, the model is not
            deterministic, or the recorded curve cannot be read.
        RankError, WorkerDied: the reference itself failed.
    """
    level = LEVEL_OF[job.dtype]
    if not layouts and record is None:
        raise ValueError("layouts is empty, and there is no record to write: nothing to compare")
    for layout in (*layouts, *([reference] if isinstance(reference, Layout) else [])):
        check_fits(job, layout)
    first = reference if isinstance(reference, Layout) else next(iter(layouts), Layout())
    check_deterministic(job, first, workers)
    runs, notes = _reference_runs(job, reference, layouts, workers, progress)
    if record is not None:
        trace.write(record, runs, _description(job))
    expected, noise = runs["reference"], _noise(runs)
    bounds = BOUNDS[level]
    made = _level_report(level, runs, noise, notes)
    if "control" in runs:
        made.control = compare(expected, runs["control"], noise, bounds, _eps(job)).loss_gaps
    again = LevelReport(level=4, reference="the same layout, run before")
    report = Report([made, again] if repeat else [made])
    for layout in layouts:
        result = Result(str(layout), level)
        made.results.append(result)
        with _failures(result):
            actual = run_layout(job, Role(layout=layout, shapes=expected.shapes), workers, progress)
            made.notes += [note for note in _unlifted_notes(actual) if note not in made.notes]
            _judge(result, expected, actual, noise, bounds, _eps(job))
            if repeat:
                second = Result(str(layout), 4)
                again.results.append(second)
                with _failures(second):
                    _repeat(second, job, layout, expected, actual, workers, progress)
        finished(report)
    return report


def compare_curves(reference: Path, curves: Sequence[Path], dtype: torch.dtype | None = None) -> Report:
    """Judges recorded curves without running anything.

    Args:
        reference, curves: files that ``record`` wrote, or JSON lines with ``step`` and ``loss`` such as the
            trainer's ``metrics.jsonl``, of which the curves alone are compared.
        dtype: what they were computed in, which says how far apart they may be; by default what the
            files say, or else float32.

    Raises:
        ValueError: a file cannot be read, they are of different jobs, have no step in common, or are in
            bfloat16 without measured noise.
    """
    runs, job = trace.read(reference)
    recorded = getattr(torch, job["dtype"]) if job else None
    if dtype is not None and recorded not in (None, dtype):
        raise ValueError(f"recorded curve {reference} is in {job['dtype']}, not in {dtype}")
    dtype = dtype or recorded or torch.float32
    if dtype == torch.bfloat16 and len(runs) == 1:
        raise ValueError(f"recorded curve {reference}: {_NO_NOISE}, and for bfloat16 there are none")
    expected, noise = runs["reference"], _noise(runs)
    check_finite(expected)
    made = _level_report(LEVEL_OF[dtype], runs, noise, [_NO_NOISE] if len(runs) == 1 else [])
    for path in curves:
        found, other = trace.read(path)
        if job and other:
            check_same_job(other, job, path)
        if not {step.step for step in expected.trained} & {step.step for step in found["reference"].trained}:
            raise ValueError(f"recorded curve {path} has no step in common with {reference}")
        result = Result(str(path), made.level)
        _judge(result, expected, found["reference"], noise, BOUNDS[made.level], torch.finfo(dtype).eps)
        made.results.append(result)
    return Report([made])


def _level_report(level: int, runs: Mapping[str, Trace], noise: Noise, notes: Sequence[str]) -> LevelReport:
    expected = runs["reference"]
    made = LevelReport(
        level=level,
        reference=expected.layout,
        losses=[step.loss for step in expected.trained],
        norms=[step.gradient_norm for step in expected.trained],
        noise=[noise.of(step.step, key(trace.LOSS)) for step in expected.trained],
        notes=[*notes, *_unlifted_notes(expected)],
    )
    if "control" in runs and runs["control"].reordered:
        made.notes.append(f"control: {runs['control'].reordered} sums its features in another order")
    return made


def _unlifted_notes(run: Trace) -> list[str]:
    return [
        f"{module or 'the model itself'} rounds to float32 in {operation}, which could not be lifted"
        for module, operation in run.unlifted.items()
    ]


def run_layout(job: Job, role: Role, workers: Workers, progress: Progress, name: str | None = None) -> Trace:
    """Runs the job on as many processes as the layout has ranks."""
    layout = role.layout
    made = Trace(str(layout))
    pending: dict[int, dict[int, RankStep]] = {}

    def collect(rank: int, step: RankStep) -> None:
        parts = pending.setdefault(step.step, {})
        parts[rank] = step
        if len(parts) == layout.world_size:
            del pending[step.step]
            # By rank, not as they came: sums would not be the same bits every time.
            ordered = [parts[each] for each in range(layout.world_size)]
            made.steps.append(trace.merge(ordered, made.steps[0] if made.steps else None))
            progress(name or str(layout), step.step, job.steps)

    facts: Facts = workers.run(layout.world_size, run_on_rank, job, role, on_item=collect)[0]
    made.shapes, made.sources, made.blocks = facts.shapes, facts.sources, facts.blocks
    made.unlifted, made.reordered = facts.unlifted, facts.reordered
    return made


def _reference_runs(
    job: Job, reference: Layout | Path, layouts: Iterable[Layout], workers: Workers, progress: Progress
) -> tuple[dict[str, Trace], list[str]]:
    """The reference and what measures its noise; and notes for the report.

    Raises:
        ValueError: it cannot be read, or the job does not fit it.
    """
    if isinstance(reference, Path):
        runs, recorded = trace.read(reference)
        if recorded:
            check_same_job(recorded, _description(job), reference)
        check_finite(runs["reference"])
        return runs, [_NO_NOISE] if len(runs) == 1 else []
    one = reference.world_size == 1
    shapes, notes = (None, []) if one else probe_shapes(job.build_model, job.loss, job.batch(1))
    role = Role(layout=reference, plain=reference == Layout(), shapes=shapes)
    with misfits_raised():
        runs = {"reference": run_layout(job, role, workers, progress, f"reference ({reference})")}
    check_finite(runs["reference"])
    unlifted = tuple(runs["reference"].unlifted)
    for seed in _PERTURBATIONS:
        disturbed = replace(role, perturbation=seed, disturbed=unlifted)
        runs[f"perturbed {seed}"] = run_layout(job, disturbed, workers, progress, f"perturbed {seed}")
        check_same_start(runs["reference"], runs[f"perturbed {seed}"], _eps(job))
    control = run_layout(job, replace(role, reordered=True), workers, progress, "control")
    if control.reordered:
        runs["control"] = control
    return runs, notes


def _noise(runs: Mapping[str, Trace]) -> Noise:
    perturbed = [run for name, run in runs.items() if name.startswith("perturbed")]
    return Noise(runs["reference"], perturbed, runs.get("control"))


def _judge(result: Result, expected: Trace, actual: Trace, noise: Noise, bounds: Bounds, eps: float) -> None:
    found = compare(expected, actual, noise, bounds, eps)
    result.comparison, result.verdict = found, found.verdict
    result.losses = [step.loss for step in actual.trained]
    result.norms = [step.gradient_norm for step in actual.trained]
    if found.first_bad is not None and found.first_bad.stage == trace.BATCH:
        result.verdict, result.error, result.misfit = None, found.first_bad.sentence, True
        return
    if found.first_bad is not None:
        result.first_bad_step, result.first_bad_module = found.first_bad.step, found.first_bad.module
    result.sentence = found.sentence()


def _repeat(
    result: Result, job: Job, layout: Layout, expected: Trace, actual: Trace, workers: Workers, progress: Progress
) -> None:
    """Level 4: the same layout once more."""
    second = run_layout(job, Role(layout=layout, shapes=expected.shapes), workers, progress, f"{layout} again")
    _judge(result, actual, second, Noise(actual, []), BOUNDS[4], _eps(job))
    bits = next((a.step for a, b in zip(actual.steps, second.steps, strict=True) if a.bits != b.bits), None)
    if bits is not None and result.verdict == "equal":  # too small a difference for the sketches
        result.verdict, result.first_bad_step = "different", bits
        result.sentence = f"step {bits}: the bits of the weights differ"


@contextlib.contextmanager
def _failures(result: Result) -> Iterator[None]:
    try:
        yield
    except WorkerDied as error:
        result.error = str(error)
    except RankError as error:
        result.misfit = error.sentence is not None
        result.error = error.sentence or str(error).strip()


def _description(job: Job) -> dict[str, Any]:
    return {
        "dtype": str(job.dtype).removeprefix("torch."),
        "seed": job.seed,
        "max_grad_norm": job.max_grad_norm,
        "steps": job.steps,
        "fsdp_tp": fsdp_tp.__version__,
        "torch": torch.__version__,
    }


def _eps(job: Job) -> float:
    return torch.finfo(job.dtype).eps
