"""The command line: ``python -m fsdp_tp.parity --help``."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fsdp_tp.parity.html import write_html
from fsdp_tp.parity.job import Job, adamw, language_model_loss, language_model_tokens, wrap
from fsdp_tp.parity.layout import Layout
from fsdp_tp.parity.level0 import check_types
from fsdp_tp.parity.report import LevelReport, Report, remarks, table, write_json
from fsdp_tp.parity.run import DTYPE_OF, compare_curves, compare_layouts
from fsdp_tp.parity.sources import find_data, find_model, load
from fsdp_tp.parity.workers import RankError, WorkerDied, Workers

LAYOUTS = (
    "tensor=2",
    "shard=2,replicate=2",
    "tensor=2,shard=2,sequence_parallel,loss_parallel",
    "shard=2",
    "tensor=2,shard=2",
    "tensor=2,shard=2,replicate=2",
)
_QUICK_LAYOUTS, _QUICK_STEPS = 3, 10
EXIT_USAGE, EXIT_DIED, EXIT_INTERRUPTED = 2, 3, 130


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    """Trains one job under a reference layout and under others, and tells whether the curve is the same.

    A layout is a comma-separated list of tensor=N, shard=N, replicate=N, sequence_parallel,
    loss_parallel, activation_checkpointing, compile and micro_batches=N. Exit status: 0 all equal
    or within noise, 1 a layout differs, 2 a setting does not fit, 3 a run failed.
    """

    layouts: tuple[str, ...] = LAYOUTS
    """What to compare, such as --layouts tensor=2 tensor=2,shard=2,replicate=2."""
    reference: str = "one process"
    """What to compare with: one process that runs the plain model, or a layout."""
    levels: tuple[Literal[0, 1, 2, 3, 4], ...] = (2,)
    """0: types, without running; 1: fp64; 2: fp32; 3: bf16; 4: each layout twice, for equal bits, at the
    first of the levels 1 to 3, by default 2."""
    model: str = ""
    """module:function that returns the model, or a Hugging Face config.json or a directory with one;
    by default a Llama of 4.9 M parameters."""
    data: str = ""
    """module:function that takes a step (from 1) and returns a global batch; or a file: text, taken as
    bytes, or .npy with token ids. By default generated sequences with something to learn."""
    loss: str = ""
    """module:function(model, batch, mesh, layout) that returns the loss summed over its tokens; by
    default that of a causal language model."""
    token_count: str = ""
    """module:function(batch) that returns the number of tokens that the loss function sums over."""
    loss_is_mean: bool = False
    """The loss function returns a mean already, whose average over ranks is the objective."""
    wrap: str = ""
    """module:function(model, mesh, layout, mp_policy, seed) that lays the model out and returns it; by
    default one that calls fsdp_tp.wrap with the options of the layout."""
    optimizer: str = ""
    """module:function(model, mesh) that returns the optimizer; by default AdamW."""
    steps: int = 50
    """Optimizer steps of every layout."""
    global_batch_size: int = 8
    """Sequences of a step, over all ranks."""
    sequence_length: int = 64
    """Tokens of a sequence."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this global norm."""
    seed: int = 0
    """Of initial weights and generated data."""
    quick: bool = False
    """10 steps of the first three layouts."""
    record: Path | None = None
    """Write the reference's curve to this file, to compare with elsewhere; the layouts may be none."""
    against: Path | None = None
    """Compare with a recorded curve instead of running a reference; or with metrics.jsonl of the trainer."""
    curves: tuple[Path, ...] = ()
    """Recorded curves, or metrics.jsonl files, to judge against the recorded one; then nothing runs."""
    json: Path | None = None
    """Write the verdicts to this file."""
    html: Path | None = Path("runs/parity/report.html")
    """Write a page with curves and tables to this file, which needs no network to be read."""
    timeout: float = 600.0
    """Seconds without a step after which a run has failed."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("global_batch_size", 1), ("sequence_length", 1), ("timeout", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.against is not None and self.record is not None:
            raise ValueError("record and against exclude each other: a recorded curve is there already")
        if self.curves and self.against is None:
            raise ValueError("curves needs against: the recorded curve to compare with")
        one_file = self.against is not None or self.record is not None
        if one_file and len(set(self.levels) & set(DTYPE_OF)) > 1:
            raise ValueError(f"levels={self.levels}: a recorded curve has one level; choose one of 1, 2, 3")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line ``arguments``; returns the exit status."""
    try:
        config = tyro.cli(ParityConfig, prog="python -m fsdp_tp.parity", args=arguments)
        return run(config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("interrupted; what had finished is in the report", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:  # an exit status of 1 would say that a layout differs
        if not isinstance(error, RankError | WorkerDied):
            traceback.print_exc()
        print(f"error: no comparison: {error}", file=sys.stderr)
        return EXIT_DIED


def run(config: ParityConfig) -> int:
    """Runs every level, shows and writes the report; returns the exit status."""
    console = Console()
    if config.curves:
        assert config.against is not None
        # The default level is not a wish: a recorded file says which it has.
        level = None if config.levels == ParityConfig.levels else config.levels[0]
        report = compare_curves(config.against, config.curves, None if level is None else DTYPE_OF.get(level))
        _write(config, report)
        _show(console, config, report)
        return report.exit_code
    layouts = [Layout.parse(text) for text in config.layouts]
    if config.quick:
        config, layouts = replace(config, steps=min(config.steps, _QUICK_STEPS)), layouts[:_QUICK_LAYOUTS]
    reference = config.against or Layout.parse(config.reference)
    job = build_job(config)
    report = Report(complete=False)
    if config.json is not None:
        write_json(report, config.json)  # one of an earlier run must not pass for one of this run
    levels = sorted(set(config.levels) - {0, 4}) or ([2] if 4 in config.levels else [])
    with Workers(
        collective_timeout=config.timeout, call_timeout=config.timeout + 60, preload=["fsdp_tp.parity.cli", *_modules()]
    ) as workers:
        if 0 in config.levels:
            report.levels.append(check_types(job, layouts))
        for level in levels:
            with _progress(console) as progress:
                found = compare_layouts(
                    replace(job, dtype=DTYPE_OF[level]),
                    layouts,
                    reference=reference,
                    repeat=4 in config.levels and level == levels[0],
                    record=config.record,
                    workers=workers,
                    progress=_bar(progress),
                    finished=functools.partial(_write_so_far, config, list(report.levels)),
                )
            report.levels += found.levels
    report.complete = True
    report.levels.sort(key=lambda level: level.level)
    _write(config, report)
    _show(console, config, report)
    return report.exit_code


def build_job(config: ParityConfig) -> Job:
    """Raises ValueError: a function or file that cannot be found or used."""
    build_model, vocabulary = find_model(config.model, config.sequence_length)
    tokens = load(config.token_count, "token_count") if config.token_count else language_model_tokens
    return Job(
        build_model=build_model,
        batches=find_data(config.data, (config.global_batch_size, config.sequence_length + 1), config.seed, vocabulary),
        steps=config.steps,
        loss=load(config.loss, "loss") if config.loss else language_model_loss,
        token_count=None if config.loss_is_mean else tokens,
        wrap=load(config.wrap, "wrap") if config.wrap else wrap,
        optimizer=load(config.optimizer, "optimizer") if config.optimizer else adamw,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
    )


def _modules() -> list[str]:
    """What building the model has imported and every process would import again."""
    return [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name]


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )


def _bar(progress: Progress) -> Callable[[str, int, int], None]:
    tasks: dict[str, Any] = {}

    def update(name: str, step: int, steps: int) -> None:
        if step == 0 or name not in tasks:
            tasks[name] = progress.add_task(name, total=steps)
        progress.update(tasks[name], completed=step)

    return update


def _write_so_far(config: ParityConfig, done: list[LevelReport], found: Report) -> None:
    _write(config, Report([*done, *found.levels], complete=False))


def _write(config: ParityConfig, report: Report) -> None:
    if config.json is not None:
        write_json(report, config.json)
    if config.html is not None:
        write_html(report, config.html)


def _show(console: Console, config: ParityConfig, report: Report) -> None:
    for level in report.levels:
        for note in level.notes:
            console.print(f"level {level.level}: {note}", highlight=False, markup=False)
    if report.results:
        console.print(table(report))
    for line in remarks(report):
        console.print(line, highlight=False, markup=False)
    if report.verdict != "different":  # whose sentence the remarks have
        console.print(report.sentence().splitlines()[-1], highlight=False, markup=False)
    if config.record is not None:
        console.print(f"recorded: {config.record}", markup=False)
    if config.html is not None:
        console.print(f"report: {config.html}", markup=False)
