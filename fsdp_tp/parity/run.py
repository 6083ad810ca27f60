"""Runs a job under a reference layout, measures its noise, and compares other layouts with it."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fsdp_tp
from fsdp_tp.initialize import materialize
from fsdp_tp.mesh import ParallelMesh
from fsdp_tp.parity import static, trace
from fsdp_tp.parity.job import Facts, Job, Role, draws_random_numbers
from fsdp_tp.parity.job import run as run_on_rank
from fsdp_tp.parity.judge import BOUNDS, SAME, Bounds, Noise, compare, gap
from fsdp_tp.parity.layout import Layout
from fsdp_tp.parity.observe import probe_shapes
from fsdp_tp.parity.report import LevelReport, Report, Result
from fsdp_tp.parity.trace import RankStep, Trace, key
from fsdp_tp.parity.workers import RankError, WorkerDied, Workers, run_alone

LEVEL_OF = {torch.float64: 1, torch.float32: 2, torch.bfloat16: 3}
DTYPE_OF = {level: dtype for dtype, level in LEVEL_OF.items()}

Progress = Callable[[str, int, int], None]
"""Called with the name of a run, its step and the number of steps."""

_PERTURBATIONS = (0, 1)
_LARGE_WORLD = 2048
_MATERIALIZED = 10**9  # parameters, 4 GB in fp32
_BYTES_PER_RANK = 500 * 2**20  # of an idle process with torch and transformers, with room for a small model


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
    for layout in (*layouts, *([reference] if isinstance(reference, Layout) else [])):
        check_fits(job, layout)
    first = reference if isinstance(reference, Layout) else next(iter(layouts), Layout())
    _check_deterministic(job, first, workers)
    runs = _reference_runs(job, reference, layouts, workers, progress)
    if record is not None:
        trace.write(record, runs, _description(job))
    expected, noise = runs["reference"], _noise(runs)
    bounds = BOUNDS[level]
    made = _level_report(level, expected, noise)
    if "control" in runs:
        made.control = compare(expected, runs["control"], noise, bounds, _eps(job)).loss_gaps
    again = LevelReport(level=4, reference="the same layout, run before")
    report = Report([made, again] if repeat else [made])
    for layout in layouts:
        result = Result(str(layout), level)
        made.results.append(result)
        with _failures(result):
            actual = run_layout(job, Role(layout=layout, shapes=expected.shapes), workers, progress)
            _judge(result, expected, actual, noise, bounds, _eps(job))
            if repeat:
                second = Result(str(layout), 4)
                again.results.append(second)
                with _failures(second):
                    _repeat(second, job, layout, expected, actual, workers, progress)
        finished(report)
    return report


def check_types(job: Job, layouts: Sequence[Layout]) -> LevelReport:
    """Level 0: every layer and region type-checked in this process, on fake worlds of the layout's own size and
    of 2,048 ranks.

    Raises:
        ValueError: ``spmd_types`` is missing, or a layout does not fit the model.
    """
    made = LevelReport(level=0, reference="SPMD types")
    regions = Result("regions and collectives", 0)
    _judge_types(regions, run_alone(_region_findings))
    made.results.append(regions)
    for layout in layouts:
        result = Result(str(layout), 0)
        made.results.append(result)
        findings: dict[str, None] = {}
        group = layout.tensor * layout.shard
        for world_size in {layout.world_size, max(1, _LARGE_WORLD // group) * group} if layout.tensor > 1 else ():
            # Alone: DTensor's caches would hand the second world the first one's meshes.
            findings |= dict.fromkeys(run_alone(_type_findings, job, layout, world_size))
        _judge_types(result, list(findings))
        if layout.tensor == 1:
            result.sentence = "no tensor axis: nothing to check"
    return made


def _region_findings() -> list[str]:
    return [str(finding) for finding in static.check_regions()]


def _type_findings(job: Job, layout: Layout, world_size: int) -> list[str]:
    found = static.check(
        functools.partial(_build_for_types, job),
        job.batch(1),
        world_size=world_size,
        tensor_parallel_degree=layout.tensor,
        hybrid_shard_degree=layout.shard,
        sequence_parallel=layout.sequence_parallel,
        loss_parallel=layout.loss_parallel,
        step=functools.partial(_typed_loss, job, layout),
    )
    return [str(finding) for finding in found]


def _judge_types(result: Result, findings: Sequence[str]) -> None:
    result.verdict = "different" if findings else "equal"
    if findings:
        result.first_bad_module = findings[0].partition(":")[0]
        result.sentence = "; ".join(findings[:3])


def _build_for_types(job: Job) -> torch.nn.Module:
    """Values do not matter, but some models read some: memory for them where there is enough."""
    model = job.build_model()
    if sum(parameter.numel() for parameter in model.parameters()) < _MATERIALIZED:
        materialize(model, torch.device("cpu"))
    return model


def _typed_loss(job: Job, layout: Layout, model: torch.nn.Module, batch: Any, mesh: ParallelMesh) -> Tensor:
    return job.loss(model, batch, mesh, layout)


def compare_curves(reference: Path, curves: Sequence[Path], dtype: torch.dtype = torch.float32) -> Report:
    """Judges recorded curves without running anything.

    Args:
        reference, curves: files that ``record`` wrote, or JSON lines with ``step`` and ``loss`` such as the
            trainer's ``metrics.jsonl``, of which the curves alone are compared.
        dtype: what they were computed in, which says how far apart they may be.

    Raises:
        ValueError: a file cannot be read, or they are of different jobs.
    """
    runs, job = trace.read(reference)
    expected, noise = runs["reference"], _noise(runs)
    made = _level_report(LEVEL_OF[dtype], expected, noise)
    for path in curves:
        found, other = trace.read(path)
        if job and other:
            _check_same_job(other, job, path)
        if not {step.step for step in expected.trained} & {step.step for step in found["reference"].trained}:
            raise ValueError(f"recorded curve {path} has no step in common with {reference}")
        result = Result(str(path), made.level)
        bounds, eps = BOUNDS[made.level], torch.finfo(dtype).eps
        _judge(result, expected, found["reference"], noise, bounds, eps)
        made.results.append(result)
    return Report([made])


def _level_report(level: int, expected: Trace, noise: Noise) -> LevelReport:
    return LevelReport(
        level=level,
        reference=expected.layout,
        losses=[step.loss for step in expected.trained],
        norms=[step.gradient_norm for step in expected.trained],
        noise=[noise.of(step.step, key(trace.LOSS)) for step in expected.trained],
        notes=list(expected.notes),
    )


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
            made.steps.append(trace.merge([parts[each] for each in range(layout.world_size)]))
            progress(name or str(layout), step.step, job.steps)

    facts: Facts = workers.run(layout.world_size, run_on_rank, job, role, on_item=collect)[0]
    made.shapes, made.sources, made.blocks = facts.shapes, facts.sources, facts.blocks
    for module, operation in facts.unlifted.items():
        made.notes.append(f"{module or 'the model itself'} rounds to float32 in {operation}, which could not be lifted")
    if role.reordered and facts.reordered:
        made.notes.append(f"control: {facts.reordered} sums its features in another order")
    return made


def check_fits(job: Job, layout: Layout) -> None:
    """Raises ValueError if the batches or this machine do not allow ``layout``."""
    parts = layout.data_size * layout.micro_batches
    rows = next(leaf for leaf in tree_leaves(job.batch(1)) if isinstance(leaf, Tensor) and leaf.ndim).shape[0]
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
    try:
        memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not every system tells
        return
    if layout.world_size * _BYTES_PER_RANK > memory:
        raise ValueError(
            f"layout {layout} needs {layout.world_size} processes of about {_BYTES_PER_RANK >> 20} MiB; this machine "
            f"has {memory >> 20} MiB free, enough for {memory // _BYTES_PER_RANK}"
        )


def _reference_runs(
    job: Job, reference: Layout | Path, layouts: Iterable[Layout], workers: Workers, progress: Progress
) -> dict[str, Trace]:
    """The reference, and what measures its noise.

    Raises:
        ValueError: it cannot be read, or the job does not fit it.
    """
    if isinstance(reference, Path):
        runs, recorded = trace.read(reference)
        if recorded:
            _check_same_job(recorded, _description(job), reference)
        if len(runs) == 1:
            runs["reference"].notes.append("the recorded curve has no noise measured: only the bounds hold")
        return runs
    one = reference.world_size == 1
    shapes, notes = (None, []) if one else probe_shapes(job.build_model, job.loss, job.batch(1))
    role = Role(layout=reference, plain=reference == Layout() and job.dtype != torch.bfloat16, shapes=shapes)
    with _misfits_raised():
        runs = {"reference": run_layout(job, role, workers, progress, f"reference ({reference})")}
    runs["reference"].notes += notes
    unlifted = tuple(_unlifted(runs["reference"]))
    for seed in _PERTURBATIONS:
        disturbed = replace(role, perturbation=seed, disturbed=unlifted)
        runs[f"perturbed {seed}"] = run_layout(job, disturbed, workers, progress, "noise")
        _check_same_start(runs["reference"], runs[f"perturbed {seed}"], _eps(job))
    control = run_layout(job, replace(role, reordered=True), workers, progress, "control")
    if control.notes:
        runs["control"] = control
    return runs


def _check_same_start(reference: Trace, perturbed: Trace, eps: float) -> None:
    """Without it a job that is another one each time would have noise in which everything drowns."""
    for what, made, bound in (("initial weights", trace.WEIGHT, 2 * eps), ("batches", trace.BATCH, SAME)):
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


def _noise(runs: Mapping[str, Trace]) -> Noise:
    perturbed = [run for name, run in runs.items() if name.startswith("perturbed")]
    return Noise(runs["reference"], perturbed, runs.get("control"))


def _unlifted(reference: Trace) -> Iterable[str]:
    for note in reference.notes:
        module, rounds, _ = note.partition(" rounds to float32 in ")
        if rounds:
            yield "" if module == "the model itself" else module


def _judge(result: Result, expected: Trace, actual: Trace, noise: Noise, bounds: Bounds, eps: float) -> None:
    found = compare(expected, actual, noise, bounds, eps)
    result.comparison, result.verdict = found, found.verdict
    result.losses = [step.loss for step in actual.trained]
    result.norms = [step.gradient_norm for step in actual.trained]
    if found.first_bad is not None:
        result.first_bad_step, result.first_bad_module = found.first_bad.step, found.first_bad.module
        result.sentence = found.first_bad.sentence
    elif found.verdict == "within_noise":
        result.sentence = found.beyond


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
def _misfits_raised() -> Iterator[None]:
    """What every rank raised as ValueError is one here."""
    try:
        yield
    except RankError as error:
        if error.sentence is None:
            raise
        raise ValueError(error.sentence) from error


@contextlib.contextmanager
def _failures(result: Result) -> Iterator[None]:
    try:
        yield
    except WorkerDied as error:
        result.error = str(error)
    except RankError as error:
        result.misfit = error.sentence is not None
        result.error = error.sentence or str(error).strip()


def _check_deterministic(job: Job, layout: Layout, workers: Workers) -> None:
    with _misfits_raised():
        found = workers.run(layout.world_size, draws_random_numbers, job, layout)
    for first, second, dropout in found:
        if first != second and not (math.isnan(first) and math.isnan(second)):
            why = f"it has dropout ({', '.join(dropout[:3])})" if dropout else "something in it draws random numbers"
            raise ValueError(
                f"the model is not deterministic: the same batch gave the losses {first!r} and {second!r}; {why}. Set "
                "it to 0 for the comparison, or draw masks that depend on the position alone and not on the layout"
            )


def _description(job: Job) -> dict[str, Any]:
    return {
        "dtype": str(job.dtype).removeprefix("torch."),
        "seed": job.seed,
        "max_grad_norm": job.max_grad_norm,
        "steps": job.steps,
        "fsdp_tp": fsdp_tp.__version__,
        "torch": torch.__version__,
    }


def _check_same_job(recorded: Mapping[str, Any], ours: Mapping[str, Any], path: Path) -> None:
    for name in ("dtype", "seed", "max_grad_norm"):
        if recorded.get(name) != ours[name]:
            raise ValueError(
                f"recorded curve {path} is of another job: {name}={recorded.get(name)}, here it is {ours[name]}"
            )


def _eps(job: Job) -> float:
    return torch.finfo(job.dtype).eps
