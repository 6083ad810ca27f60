"""Every option of the trainer, once: a field of a dataclass is a flag of the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from fsdp_tp.config import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Llama-architecture decoder, or any known Hugging Face one."""

    model: Path | None = None
    """Hugging Face config.json, or a directory with one; the sizes below are then not used."""
    hidden_size: int = 384
    """Width of the residual stream."""
    intermediate_size: int = 1024
    """Width of the mlp."""
    num_layers: int = 4
    """Decoder layers."""
    num_heads: int = 8
    """Query heads."""
    num_kv_heads: int = 4
    """Key/value heads."""
    vocab_size: int = 0
    """Rows of the embedding; 0 takes the tokenizer's size, rounded up to a multiple of 64."""
    tie_embeddings: bool = False
    """Use the embedding as output projection."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where text comes from and how it becomes sequences."""

    data: tuple[Path, ...] = ()
    """Text, .jsonl or .parquet files, or directories of them; by default the source text of
    the Python standard library."""
    text_column: str = "text"
    """Field of a .jsonl or .parquet row that holds the text."""
    tokenizer: Path | None = None
    """Directory of a Hugging Face tokenizer; by default tokens are bytes."""
    sequence_length: int = 128
    """Tokens of a packed sequence."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, warm-up and cosine schedule."""

    steps: int = 200
    """Optimizer steps in all, counted from the start of the run and not from a resume."""
    global_batch_size: int = 8
    """Sequences of an optimizer step, over all ranks."""
    micro_batch_size: int = 0
    """Sequences that a rank computes at once; 0 takes its whole share, fewer accumulate gradients."""
    learning_rate: float = 1e-3
    """Peak, reached after the warm-up."""
    final_learning_rate: float = 1e-4
    """What the cosine ends at."""
    warmup_steps: int = 10
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """On matrices only; norms and biases do not decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this global norm."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Trains a decoder language model under any layout of ranks."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    sequence_parallel: bool = False
    """Split activations between blocks along the sequence, over the tensor axis."""
    loss_parallel: bool = False
    """Compute the loss on split logits."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """Recompute blocks in backward instead of keeping their activations."""
    compile: bool = False
    """torch.compile each block."""
    comm: Literal[
        "auto",
        "torch",
        "shared",
        "zero_copy",
        "symmetric",
        "fp32_accumulate",
        "fp32_accumulate:hosts",
        "int8",
        "int8:hosts",
    ] = "auto"
    """How FSDP communicates: by torch's own collectives, through shared memory, in the symmetric memory of GPUs, with
    fewer bytes on the way, or by the fastest that applies."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the computation; master weights, gradient sums and the optimizer stay fp32."""
    output: Path = Path("runs/default")
    """Checkpoints, metrics and the configuration of the run. All ranks must share it. One job at a time: a second
    waits up to a minute for the first to end, and is then refused."""
    save_every: int = 0
    """Steps between checkpoints; one is always written at the end. 0: at the end only. A failure is said (NOT SAVED)
    and the training goes on to the next; only that of the last one ends the run with its error."""
    save_in_background: bool = True
    """Train on while a checkpoint is written; takes memory for a copy of each rank's part of it. The last one is always
    waited for."""
    keep_last: int = 0
    """Checkpoints that stay, the newest ones; 0: all."""
    stop_after: int = 0
    """Step after which to stop, with a checkpoint, though the schedule goes on; 0: do not."""
    resume: bool = True
    """Continue from the latest checkpoint in output, if there is one."""
    log_every: int = 10
    """Steps between lines, where the output is not a terminal with a progress bar."""
    measure_communication_every: int = 50
    """Steps between profiled steps, which give the share of time in communication; 0: never."""
    seed: int = 0
    """Of initial weights and the order of sequences; neither depends on the layout."""
    deterministic: bool = False
    """Equal bits on every run of the same layout, or an error where an operation cannot promise them."""
    timeout: float = 600.0
    """Seconds after which a collective that a rank does not join fails on the others."""

    def __post_init__(self) -> None:
        for group, lowest in _LOWEST.items():
            for name, least in lowest.items():
                value = getattr(getattr(self, group) if group else self, name)
                if value < least:
                    raise ValueError(f"{name}={value} must be at least {least}")

        for name in ("pipeline_parallel_degree", "context_parallel_degree"):
            if getattr(self.parallel, name) != 1:
                raise ValueError(f"{name}={getattr(self.parallel, name)}: the trainer can only do 1 so far")

    def micro_batches(self, data_size: int) -> tuple[int, int]:
        """(sequences a rank computes at once, micro-batches a step) for ``data_size`` data ranks."""
        size, micro = self.optimizer.global_batch_size, self.optimizer.micro_batch_size
        if size % data_size:
            raise ValueError(f"global_batch_size={size} must be a multiple of the {data_size} data ranks")
        share = size // data_size
        micro = micro or share
        if share % micro:
            raise ValueError(f"micro_batch_size={micro} does not divide the {share} sequences of a data rank")
        return micro, share // micro


_LOWEST: dict[str, dict[str, float]] = {
    "": {"save_every": 0, "stop_after": 0, "log_every": 1, "measure_communication_every": 0, "timeout": 1},
    "model": {
        "vocab_size": 0,
        "num_layers": 1,
        "hidden_size": 1,
        "intermediate_size": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
    },
    "data": {"sequence_length": 1},
    "optimizer": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 0, "warmup_steps": 0, "max_grad_norm": 0},
}


def parse(arguments: list[str] | None = None) -> TrainConfig:
    """The configuration of a command line. ``--config FILE`` gives other defaults: the
    ``config.json`` of an earlier run, or a part of one."""
    import sys

    arguments = [
        part
        for argument in (sys.argv[1:] if arguments is None else arguments)
        for part in (argument.split("=", 1) if argument.startswith("--config=") else [argument])
    ]
    default = TrainConfig()
    if "--config" in arguments:
        at = arguments.index("--config")
        if at + 1 == len(arguments):
            raise ValueError("--config needs the path of a JSON file")
        default = read(Path(arguments[at + 1]))
        del arguments[at : at + 2]
    return tyro.cli(
        TrainConfig,
        prog="python -m fsdp_tp.train",
        args=arguments,
        default=default,
        config=(tyro.conf.OmitArgPrefixes,),
        description=f"{TrainConfig.__doc__} --config FILE takes defaults from the config.json of an earlier run.",
    )


def to_json(config: TrainConfig) -> dict[str, Any]:
    """``config`` as plain JSON values."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    return values


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs between two results of :func:`to_json` in the job itself, not in its layout or output."""
    differing = {}
    for group in ("model", "data", "optimizer"):
        for name, value in after[group].items():
            if before[group].get(name) != value:
                differing[f"{group}.{name}"] = (before[group].get(name), value)
    for name in ("precision", "seed"):
        if before[name] != after[name]:
            differing[name] = (before[name], after[name])
    return differing


def write(config: TrainConfig, path: Path) -> None:
    """Writes ``config`` as JSON, for :func:`read`."""
    path.write_text(json.dumps(to_json(config), indent=2) + "\n")


def read(path: Path) -> TrainConfig:
    """Reads a JSON file of (some of) the fields of :class:`TrainConfig`.

    Raises:
        ValueError: not readable, not JSON, an unknown field or a value of the wrong type.
    """
    try:
        values = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"config file {path} cannot be read: {error}") from None
    return _from_json(TrainConfig, values, str(path))


def _from_json(cls: type[Any], values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected an object with fields of {cls.__name__}, not {type(values).__name__}")
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise ValueError(f"{where}: unknown field {', '.join(unknown)}; legal: {', '.join(sorted(hints))}")
    return cls(**{name: _convert(hints[name], value, f"{where}: {name}") for name, value in values.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _from_json(typing.cast(type[Any], hint), value, where)
    if origin is Literal:
        if value in inner:
            return value
        raise ValueError(f"{where}={value!r} must be one of {', '.join(map(repr, inner))}")
    if origin is tuple and isinstance(value, list):
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else list(inner)
        if len(kinds) == len(value):
            return tuple(_convert(kind, item, where) for kind, item in zip(kinds, value, strict=True))
    if type(None) in inner:
        return None if value is None else _convert(inner[0], value, where)
    if origin in (types.UnionType, typing.Union) and type(None) not in inner:
        for each in inner:
            with contextlib.suppress(ValueError):
                return _convert(each, value, where)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and type(value) is hint:
        return value
    raise ValueError(f"{where}={value!r} must be of type {getattr(hint, '__name__', hint)}")
