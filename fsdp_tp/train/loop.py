"""The reference training loop: what a user's own script would do with the library."""

from __future__ import annotations

import math
import signal
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_tp
from fsdp_tp import checkpoint, degree
from fsdp_tp.config import ParallelConfig
from fsdp_tp.determinism import use_deterministic_algorithms
from fsdp_tp.mesh import ParallelMesh
from fsdp_tp.train import config as configuration
from fsdp_tp.train import saves
from fsdp_tp.train.config import OptimizerConfig, TrainConfig
from fsdp_tp.train.data import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    PackedSequences,
    StepSampler,
    Tokenizer,
    find_files,
    write_tokens,
)
from fsdp_tp.train.lock import OutputLock
from fsdp_tp.train.metrics import CommunicationShare, Reporter, StepMetrics, peak_memory_bytes
from fsdp_tp.train.model import build_model

_PRECISION = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


@dataclass
class Job:
    """Everything that a configuration stands for, ready to run."""

    mesh: ParallelMesh
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Any
    micro_batch: int
    """Sequences that a rank computes at once."""
    first_step: int
    """Steps that a checkpoint has already done."""
    description: str
    lock: OutputLock


def train(config: TrainConfig) -> None:
    """Runs the job that ``config`` describes; every rank calls it."""
    run(config, prepare(config))


def prepare(config: TrainConfig) -> Job:
    """Data, model, optimizer and, on a resume, the checkpoint; every rank calls it. The output directory is this job's
    until :func:`run` returns, or the process ends.

    Raises:
        ValueError: a setting, a data file or the model does not fit, or another job uses the output; on every rank
            alike.
    """
    lock = OutputLock(config.output)
    try:
        return _prepare(config, lock)
    except BaseException:
        lock.release()
        raise


def _prepare(config: TrainConfig, lock: OutputLock) -> Job:
    if config.deterministic:
        use_deterministic_algorithms()
    tokenizer: Tokenizer = HuggingFaceTokenizer(config.data.tokenizer) if config.data.tokenizer else ByteTokenizer()
    model = build_model(config.model, tokenizer_size=tokenizer.size, sequence_length=config.data.sequence_length)
    parallel, table = config.parallel, ""
    if parallel.hybrid_shard_degree == "auto":
        parallel, table = _choose_degree(config, model)
    mesh = fsdp_tp.init_mesh(config=parallel, timeout=timedelta(seconds=config.timeout))
    micro_batch, micro_batches = config.micro_batches(mesh.data_size)
    lock.hold()
    start = _checkpoint_to_resume(config)
    sequences = PackedSequences(_tokens(config, tokenizer), config.data.sequence_length)
    loader = _loader(config, sequences, mesh)
    fsdp_tp.wrap(
        model,
        mesh,
        sequence_parallel=config.sequence_parallel,
        loss_parallel=config.loss_parallel,
        activation_checkpointing=config.activation_checkpointing,
        compile=config.compile,
        mp_policy=_PRECISION[config.precision],
        comm=config.comm,
        seed=config.seed,
    )
    optimizer = build_optimizer(model, config.optimizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    description = (
        f"{table}{mesh.describe()}\n{parameters / 1e6:.1f} M parameters, {len(sequences):,} sequences of "
        f"{config.data.sequence_length} tokens, {micro_batches} micro-batch(es) of {micro_batch} a rank and step"
    )
    first_step = 0
    if start is not None:
        differing = configuration.changes(_saved_config(start), configuration.to_json(config))
        other_model = [name for name in differing if name.startswith("model.") and name != "model.model"]
        if other_model:
            name, (before, now) = other_model[0], differing[other_model[0]]
            raise ValueError(
                f"output={config.output} holds a run with {name}={before}, not {now}; choose another output"
            )
    if (loaded := checkpoint.load_latest(config.output, model=model, optimizer=optimizer)) is not None:
        start, extra = loaded
        differing = configuration.changes(extra["config"], configuration.to_json(config))
        first_step = extra["step"]
        loader.load_state_dict(extra["data"])
        description += f"\nresumed from {start} after step {first_step}"
        for name, (before, now) in differing.items():
            description += f"\nchanged since: {name} {before} -> {now}"
        if first_step >= config.optimizer.steps:
            description += f"\nalready at step {first_step} of {config.optimizer.steps}: nothing to do"
    return Job(mesh, model, optimizer, loader, micro_batch, first_step, description, lock)


def _choose_degree(config: TrainConfig, model: nn.Module) -> tuple[ParallelConfig, str]:
    """The degrees with the hybrid shard degree that communicates fastest here, and the table that shows it."""
    candidates = degree.measure(
        config.parallel,
        degree.units_of(model, config.parallel.tensor_parallel_degree),
        micro_batches=lambda data_size: config.micro_batches(data_size)[1],
        param_dtype=_PRECISION[config.precision].param_dtype or torch.float32,
        comm=config.comm,
        timeout=timedelta(seconds=config.timeout),
    )
    chosen = degree.choose(candidates)
    return replace(config.parallel, hybrid_shard_degree=chosen.degree), degree.describe(candidates, chosen) + "\n"


def run(config: TrainConfig, job: Job) -> None:
    """Steps, metrics and checkpoints until the last step, ``stop_after`` or SIGTERM."""
    reporter = Reporter(
        config.output,
        total_steps=config.optimizer.steps,
        log_every=config.log_every,
        active=dist.get_rank() == 0,
    )
    if dist.get_rank() == 0:
        configuration.write(config, config.output / "config.json")
    reporter.say(job.description)
    job.model.train()
    batches = iter(job.loader)
    reporter.start(job.first_step)
    with closing(reporter), StopRequest() as stop:
        for step in range(job.first_step + 1, config.optimizer.steps + 1):
            began = time.perf_counter()
            every = config.measure_communication_every
            # The second step, since the first also pays for lazy initialisation.
            measured = every > 0 and dist.get_rank() == 0 and (step - job.first_step) % every == 2 % every
            learning_rate = set_learning_rate(job.optimizer, config.optimizer, step)
            with CommunicationShare(enabled=measured) as communication:
                batch = next(batches).to(job.mesh.device)
                loss, norm = train_step(job.model, job.optimizer, batch, job.mesh, config, job.micro_batch)
            stopping, peak = _over_ranks([float(stop.requested), peak_memory_bytes(job.mesh.device)], job.mesh.device)
            seconds = time.perf_counter() - began
            reporter.step(
                StepMetrics(
                    step=step,
                    loss=loss,
                    gradient_norm=norm,
                    learning_rate=learning_rate,
                    tokens_per_second=config.optimizer.global_batch_size * config.data.sequence_length / seconds,
                    peak_memory_bytes=int(peak),
                    communication_share=communication.share,
                )
            )
            last = step in (config.optimizer.steps, config.stop_after) or bool(stopping)
            if last or (config.save_every and step % config.save_every == 0):
                path = config.output / f"step-{step}"
                extra = {
                    "step": step,
                    "data": job.loader.state_dict(),
                    "config": configuration.to_json(config),
                }
                saves.save(
                    path, config, model=job.model, optimizer=job.optimizer, extra=extra, last=last, say=reporter.say
                )
            if stopping:
                reporter.say(f"stopped by SIGTERM after step {step}; run the same command again to continue")
            if last:
                break
    # Not after an error: what is still written in the background belongs to this job, and ends with the process.
    job.lock.release()


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Tensor,
    mesh: ParallelMesh,
    config: TrainConfig,
    micro_batch: int,
) -> tuple[float, float]:
    """One optimizer step on this rank's rows, ``(rows, length + 1)``; (global mean loss, gradient norm)."""
    pieces = batch.split(micro_batch)
    tokens = batch.shape[0] * (batch.shape[1] - 1)
    loss = torch.zeros((), device=batch.device)
    for index, piece in enumerate(pieces):
        with fsdp_tp.accumulate(model, last=index == len(pieces) - 1):
            loss_sum = _loss_sum(model, piece, mesh, config.loss_parallel)
            piece_loss = fsdp_tp.global_mean(loss_sum, tokens, mesh)
            piece_loss.backward()
        loss += piece_loss.detach()
    norm = fsdp_tp.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()


def _loss_sum(model: nn.Module, piece: Tensor, mesh: ParallelMesh, loss_parallel: bool) -> Tensor:
    logits: Tensor = model(piece[:, :-1]).logits
    targets = piece[:, 1:]
    if loss_parallel:
        return fsdp_tp.vocab_parallel_cross_entropy(logits, targets, mesh=mesh, reduction="sum")
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; only matrices decay."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, config: OptimizerConfig, step: int) -> float:
    """Linear warm-up, then a cosine to ``final_learning_rate`` at the last step (steps from 1)."""
    if step <= config.warmup_steps:
        rate = config.learning_rate * step / config.warmup_steps
    else:
        passed = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
        span = config.learning_rate - config.final_learning_rate
        rate = config.final_learning_rate + 0.5 * span * (1 + math.cos(math.pi * passed))
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


class StopRequest:
    """While entered, SIGTERM asks for a stop instead of ending the process."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> StopRequest:
        self._before = signal.signal(signal.SIGTERM, self._request)
        return self

    def _request(self, number: int, frame: Any) -> None:
        self.requested = True

    def __exit__(self, *exception: Any) -> None:
        signal.signal(signal.SIGTERM, self._before)


def _checkpoint_to_resume(config: TrainConfig) -> Path | None:
    found = checkpoint.latest(config.output, verify=False)
    if found is not None and not config.resume:
        raise ValueError(
            f"output={config.output} holds the checkpoint {found.name} and resume is off; choose another output "
            "or remove it"
        )
    return found


def _saved_config(path: Path) -> dict[str, Any]:
    saved: dict[str, Any] = checkpoint.read_extra(path)["config"]
    return saved


def _tokens(config: TrainConfig, tokenizer: Tokenizer) -> Path:
    """Rank 0 tokenises in a thread, while all ranks meet every second: however long it takes, no
    collective waits long. An error there is raised on all ranks."""
    work: Future[Path] | None = None
    if dist.get_rank() == 0:
        work = ThreadPoolExecutor(1).submit(_write_tokens, config, tokenizer)
    outcome: list[Any] = [None]
    while outcome[0] is None:
        if work is not None:
            try:
                outcome = [work.result(timeout=1)]
            except FutureTimeout:
                outcome = [None]
            except Exception as error:
                outcome = [error]
        dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    path: Path = outcome[0]
    return path


def _write_tokens(config: TrainConfig, tokenizer: Tokenizer) -> Path:
    return write_tokens(
        find_files(config.data.data),
        tokenizer,
        config.output / "cache",
        text_column=config.data.text_column,
        progress=_show_tokenising,
    )


def _show_tokenising(files: Sequence[Path]) -> Iterable[Path]:
    return track(files, description=f"tokenising {len(files)} files", transient=True)


def _loader(config: TrainConfig, sequences: PackedSequences, mesh: ParallelMesh) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    warnings.filterwarnings("ignore", message="'set_vital' is deprecated", module="torchdata")
    sampler = StepSampler(
        len(sequences),
        config.optimizer.global_batch_size,
        data_rank=mesh.data_rank,
        data_size=mesh.data_size,
        seed=config.seed,
    )
    # Beginning to iterate draws a random number: from the global generator, a resume would draw one more than a run
    # that was not interrupted, and its dropout would differ.
    return StatefulDataLoader(sequences, batch_sampler=sampler, generator=torch.Generator())


def _over_ranks(values: list[float], device: torch.device) -> list[float]:
    """The largest of each value over all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    result: list[float] = tensor.tolist()
    return result
