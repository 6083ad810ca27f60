"""The command line: ``python -m fsdp_tp.parity --help``."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from fsdp_tp.parity.html import write_html
from fsdp_tp.parity.job import Job, adamw, language_model_loss, language_model_tokens, wrap
from fsdp_tp.parity.layout import Layout
from fsdp_tp.parity.report import LevelReport, Report, table, write_json
from fsdp_tp.parity.run import DTYPE_OF, check_types, compare_curves, compare_layouts
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
_BYTES = 256
EXIT_USAGE, EXIT_DIED = 2, 3


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
    """0: types, without running; 1: fp64; 2: fp32; 3: bf16; 4: each layout twice, for equal bits."""
    model: str = ""
    """module:function that returns the model, or a Hugging Face config.json or a directory with one;
    by default a Llama of 4.9 M parameters."""
    data: str = ""
    """module:function that takes a step (from 1) and returns a global batch; or a file: text, taken as
    bytes, or .npy with token ids. By default generated sequences with something to learn."""
    loss: str = ""
    """module:function(model, batch, mesh, layout) that returns the loss summed over its tokens; by
    default that of a causal language model."""
    loss_is_mean: bool = False
    """The loss function returns a mean already, whose average over ranks is the objective."""
    wrap: str = ""
    """module:function(model, mesh, layout, mp_policy, seed) that lays the model out and returns it;
    by default fsdp_tp.wrap."""
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
        if self.against is not None and len(set(self.levels) & set(DTYPE_OF)) > 1:
            raise ValueError(f"levels={self.levels}: a recorded curve has one level; choose one of 1, 2, 3")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line ``arguments``; returns the exit status."""
    try:
        config = tyro.cli(ParityConfig, prog="python -m fsdp_tp.parity", args=arguments)
        return run(config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (RankError, WorkerDied) as error:
        print(f"error: the reference did not finish: {error}", file=sys.stderr)
        return EXIT_DIED


def run(config: ParityConfig) -> int:
    """Runs every level, shows and writes the report; returns the exit status."""
    console = Console()
    if config.curves:
        assert config.against is not None
        level = next((level for level in config.levels if level in DTYPE_OF), 2)
        report = compare_curves(config.against, config.curves, DTYPE_OF[level])
        _write(config, report)
        _show(console, config, report)
        return report.exit_code
    layouts = [Layout.parse(text) for text in config.layouts]
    if config.quick:
        config, layouts = replace(config, steps=min(config.steps, _QUICK_STEPS)), layouts[:_QUICK_LAYOUTS]
    reference = config.against or Layout.parse(config.reference)
    job = build_job(config)
    report = Report()
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
    _write(config, report)
    _show(console, config, report)
    return report.exit_code


def build_job(config: ParityConfig) -> Job:
    """Raises ValueError: a function or file that cannot be found or used."""
    build_model, vocabulary = _model(config)
    return Job(
        build_model=build_model,
        batches=_data(config, vocabulary),
        steps=config.steps,
        loss=load(config.loss, "loss") if config.loss else language_model_loss,
        token_count=None if config.loss_is_mean else language_model_tokens,
        wrap=load(config.wrap, "wrap") if config.wrap else wrap,
        optimizer=load(config.optimizer, "optimizer") if config.optimizer else adamw,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
    )


def load(name: str, setting: str) -> Any:
    """The object behind ``module:name``, also of a module in the working directory."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"{setting}={name!r} must be module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{setting}={name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"{setting}={name!r} must be a function, not a {type(found).__name__}")
    return found


def _model(config: ParityConfig) -> tuple[Callable[[], nn.Module], int | None]:
    """The function that builds the model, and its vocabulary where that is known."""
    if ":" in config.model:
        return load(config.model, "model"), None
    values: dict[str, Any]
    if config.model:
        path = Path(config.model)
        file = path / "config.json" if path.is_dir() else path
        try:
            values = json.loads(file.read_text())
            vocabulary = int(values["vocab_size"])
            values["model_type"]
        except (OSError, UnicodeDecodeError, ValueError, TypeError) as error:
            raise ValueError(f"model={config.model} is not module:function and not a config.json: {error}") from None
        except KeyError as error:
            raise ValueError(f"model={config.model} has no {error}") from None
    else:
        vocabulary = _BYTES
        values = {
            "model_type": "llama",
            "vocab_size": vocabulary,
            "hidden_size": 320,
            "intermediate_size": 896,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": config.sequence_length,
        }
    build = functools.partial(hugging_face, json.dumps(values))
    try:
        build()
    except Exception as error:  # configurations are checked by libraries with exceptions of their own
        raise ValueError(f"model={config.model or 'llama'} cannot be built: {error}") from error
    return build, vocabulary


def hugging_face(config: str) -> nn.Module:
    """A causal language model on the meta device, from a config in JSON."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = json.loads(config)
    made = AutoConfig.for_model(values.pop("model_type"), **values)
    made.use_cache = False
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(made)
    return model


def _data(config: ParityConfig, vocabulary: int | None) -> Callable[[int], Any]:
    shape = (config.global_batch_size, config.sequence_length + 1)
    if ":" in config.data and not Path(config.data).exists():
        found: Callable[[int], Any] = load(config.data, "data")
        return found
    if not config.data:
        return functools.partial(counting, shape, vocabulary or _BYTES, config.seed)
    path = Path(config.data)
    try:
        tokens = np.load(path).reshape(-1) if path.suffix == ".npy" else np.frombuffer(path.read_bytes(), np.uint8)
    except (OSError, ValueError) as error:
        raise ValueError(f"data={path} cannot be read: {error}") from None
    if len(tokens) < shape[0] * shape[1]:
        raise ValueError(f"data={path} holds {len(tokens)} tokens, fewer than the {shape[0] * shape[1]} of one batch")
    if vocabulary is not None and int(tokens.max()) >= vocabulary:
        raise ValueError(f"data={path} has the token {tokens.max()}; the model's vocab_size is {vocabulary}")
    return functools.partial(windows, torch.from_numpy(tokens.astype(np.int64)), shape)


def counting(shape: tuple[int, int], vocabulary: int, seed: int, step: int) -> Tensor:
    """Rows that count up by a step of their own, from a start of their own: something to learn."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    first = torch.randint(0, vocabulary, (shape[0], 1), generator=generator)
    stride = torch.randint(1, 4, (shape[0], 1), generator=generator)
    return (first + stride * torch.arange(shape[1])) % vocabulary


def windows(tokens: Tensor, shape: tuple[int, int], step: int) -> Tensor:
    """The next rows of ``tokens``, from the start again when they end."""
    rows = len(tokens) // shape[1]
    index = (torch.arange(shape[0]) + (step - 1) * shape[0]) % rows
    return tokens[: rows * shape[1]].view(rows, shape[1])[index]


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
    _write(config, Report([*done, *found.levels]))


def _write(config: ParityConfig, report: Report) -> None:
    if config.json is not None:
        write_json(report, config.json)
    if config.html is not None:
        write_html(report, config.html)


def _show(console: Console, config: ParityConfig, report: Report) -> None:
    for level in report.levels:
        for note in level.notes:
            console.print(f"level {level.level}: {note}", highlight=False)
    if report.results:
        console.print(table(report))
    for line in report.sentence().splitlines():
        console.print(line, highlight=False, markup=False)
    if config.record is not None:
        console.print(f"recorded: {config.record}")
    if config.html is not None:
        console.print(f"report: {config.html}")
