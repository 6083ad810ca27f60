"""The training job that is compared, and what one rank does to run it under one layout."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

import fsdp_tp
from fsdp_tp.initialize import initialize, materialize
from fsdp_tp.locate import Rows
from fsdp_tp.mesh import ParallelMesh
from fsdp_tp.modules import find_blocks
from fsdp_tp.parity import noise, trace
from fsdp_tp.parity.casts import LiftedCasts
from fsdp_tp.parity.layout import Layout
from fsdp_tp.parity.observe import Observer

Batch = Tensor | Mapping[str, Tensor]


def language_model_loss(model: nn.Module, batch: Batch, mesh: ParallelMesh, layout: Layout) -> Tensor:
    """The summed next-token loss of a causal language model.

    Args:
        model: called with token ids, or with the entries of ``batch`` but ``labels``; returns logits or an
            object that has them.
        batch: token ids ``(rows, length + 1)``, inputs and targets shifted by one; or a mapping in the
            manner of Hugging Face, where ``labels`` (by default the ``input_ids``) are shifted here and
            -100 is ignored.
    """
    if isinstance(batch, Tensor):
        inputs, targets, output = batch[:, :-1], batch[:, 1:], None
        output = model(inputs)
    else:
        output = model(**{name: value for name, value in batch.items() if name != "labels"})
        targets = _labels(batch)[:, 1:]
    logits: Tensor = getattr(output, "logits", output)
    logits = logits[:, : targets.shape[1]]
    if layout.loss_parallel:
        return fsdp_tp.vocab_parallel_cross_entropy(logits, targets, mesh=mesh, reduction="sum")
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="sum")


def language_model_tokens(batch: Batch) -> int:
    """How many tokens :func:`language_model_loss` sums over."""
    if isinstance(batch, Tensor):
        return batch[:, 1:].numel()
    return int((_labels(batch)[:, 1:] != -100).sum())


def _labels(batch: Mapping[str, Tensor]) -> Tensor:
    return batch["labels"] if "labels" in batch else batch["input_ids"]


def adamw(model: nn.Module, mesh: ParallelMesh) -> torch.optim.Optimizer:
    """AdamW with a learning rate of 1e-3."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def wrap(model: nn.Module, mesh: ParallelMesh, layout: Layout, mp_policy: MixedPrecisionPolicy, seed: int) -> nn.Module:
    """Lays ``model`` out with :func:`fsdp_tp.wrap`."""
    return fsdp_tp.wrap(
        model,
        mesh,
        sequence_parallel=layout.sequence_parallel,
        loss_parallel=layout.loss_parallel,
        activation_checkpointing="full" if layout.activation_checkpointing else "none",
        compile=layout.compile,
        mp_policy=mp_policy,
        seed=seed,
    )


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job, of functions that other processes can import.

    See :func:`fsdp_tp.parity.assert_parity` for what they get and return.
    """

    build_model: Callable[[], nn.Module]
    batches: Sequence[Batch] | Callable[[int], Batch]
    steps: int
    loss: Callable[[nn.Module, Batch, ParallelMesh, Layout], Tensor] = language_model_loss
    token_count: Callable[[Batch], int] | None = language_model_tokens
    optimizer: Callable[[nn.Module, ParallelMesh], torch.optim.Optimizer] = adamw
    wrap: Callable[..., nn.Module] = wrap
    clip: Callable[..., Tensor] = fsdp_tp.clip_grad_norm_
    max_grad_norm: float = 1.0
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        if not callable(self.batches) and self.steps > len(self.batches):
            raise ValueError(f"steps={self.steps} is more than the {len(self.batches)} batches")

    def batch(self, step: int) -> Batch:
        """The global batch of ``step``, counted from 1."""
        found = self.batches(step) if callable(self.batches) else self.batches[step - 1]
        sizes = {leaf.shape[0] for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and leaf.ndim}
        if len(sizes) != 1:
            raise ValueError(f"the batch of step {step} must hold tensors with one number of rows, not {sorted(sizes)}")
        return found


@dataclass(frozen=True, kw_only=True)
class Role:
    """What a run of the job is for."""

    layout: Layout
    plain: bool = False
    """One process that trains with torch's own functions only, none of this library's: the reference."""
    shapes: Mapping[str, tuple[int, ...]] | None = None
    """Of the activations of one process; None where this run is to find them out."""
    perturbation: int | None = None
    """Seed of a perturbation of all weights by one machine epsilon."""
    reordered: bool = False
    """Sum over one layer's features in another order."""
    disturbed: tuple[str, ...] = ()
    """Modules whose output is perturbed by an epsilon of float32."""


@dataclass(frozen=True)
class Facts:
    """What a run tells beside its steps."""

    shapes: dict[str, tuple[int, ...]]
    sources: dict[str, str]
    blocks: list[str]
    unlifted: dict[str, str]
    reordered: str | None


def run(job: Job, role: Role) -> Generator[trace.RankStep, None, Facts]:
    """Trains on this rank, and yields what it saw of each step; first of step 0, the initial weights."""
    mesh = fsdp_tp.init_mesh(config=role.layout.parallel)
    model = _build(job, role, mesh)
    optimizer = job.optimizer(model, mesh)
    lifting = LiftedCasts(model) if job.dtype == torch.float64 else None
    reordered = noise.reorder_a_sum(model) if role.reordered else None
    for number, path in enumerate(role.disturbed):
        seed = len(role.disturbed) * (role.perturbation or 0) + number
        noise.perturb_output(model.get_submodule(path), torch.finfo(torch.float32).eps, seed=seed)
    observer = Observer(model, mesh, dist.get_rank(), role.shapes)
    observer.parameters(trace.WEIGHT)
    yield trace.RankStep(0, math.nan, math.nan, *observer.take(), 0)
    for step in range(1, job.steps + 1):
        batch = job.batch(step)
        observer.batch([leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)])
        if role.perturbation is not None:
            batch = noise.perturb_tensors(batch, torch.finfo(job.dtype).eps, seed=role.perturbation)
        batch = tree_map(lambda leaf: leaf.to(mesh.device) if isinstance(leaf, Tensor) else leaf, batch)
        with lifting or contextlib.nullcontext():
            loss = _accumulate(job, role, model, batch, mesh, observer)
        observer.parameters(trace.GRADIENT)
        clip = torch.nn.utils.clip_grad_norm_ if role.plain else job.clip
        norm = clip(model.parameters(), job.max_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        observer.parameters(trace.WEIGHT)
        yield trace.RankStep(step, loss, float(norm), *observer.take(), _bits(model))
    return Facts(
        observer.shapes,
        observer.sources,
        list(find_blocks(model)),
        {} if lifting is None else lifting.unlifted,
        reordered,
    )


def draws_random_numbers(job: Job, layout: Layout) -> tuple[float, float, list[str]]:
    """Losses of two forwards of one batch with different seeds, and the model's dropout modules."""
    mesh = fsdp_tp.init_mesh(config=layout.parallel)
    model = _build(job, Role(layout=layout, plain=layout == Layout()), mesh)
    batch = job.batch(1)
    own = _slice(batch, _rows(batch, mesh, 0, 1))
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            losses.append(float(job.loss(model, own, mesh, layout)))
    dropout = [path for path, each in model.named_modules() if isinstance(each, nn.Dropout) and each.p > 0]
    config = getattr(model, "config", None)
    dropout += [f"config.{name}" for name in ("attention_dropout", "attn_pdrop") if getattr(config, name, 0.0)]
    return losses[0], losses[1], dropout


def _build(job: Job, role: Role, mesh: ParallelMesh) -> nn.Module:
    torch.manual_seed(job.seed)
    model = job.build_model()
    policy = MixedPrecisionPolicy()
    if job.dtype == torch.float64:
        model = model.double()
    if job.dtype == torch.bfloat16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if role.plain:
        if any(parameter.is_meta for parameter in model.parameters()):
            materialize(model, mesh.device)
            initialize(model, seed=job.seed)
        model.to(mesh.device)
        if job.dtype == torch.bfloat16:  # torch's own mixed precision, on a mesh of one rank
            for module in (*find_blocks(model).values(), model):
                fully_shard(module, mesh=mesh.shard, mp_policy=policy)
    else:
        model = job.wrap(model, mesh, role.layout, policy, job.seed)
    if role.perturbation is not None:
        noise.perturb(model, torch.finfo(job.dtype).eps, seed=role.perturbation, device=mesh.device)
    return model.train()


def _accumulate(job: Job, role: Role, model: nn.Module, batch: Batch, mesh: ParallelMesh, observer: Observer) -> float:
    """Forward and backward of this rank's rows; returns the loss of the global batch."""
    count = role.layout.micro_batches
    own = [_rows(batch, mesh, index, count) for index in range(count)]
    tokens = None
    if job.token_count is not None:
        tokens = sum(job.token_count(_slice(batch, rows)) for rows in own)
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for index, rows in enumerate(own):
        observer.start(rows)
        with fsdp_tp.accumulate(model, last=index == count - 1):
            loss = job.loss(model, _slice(batch, rows), mesh, role.layout)
            if tokens is None:  # the loss function averages by itself
                loss = loss / count
                reported = _mean(loss.detach(), mesh)
            else:
                loss = loss / tokens if role.plain else fsdp_tp.global_mean(loss, tokens, mesh)
                reported = loss.detach()
            loss.backward()
        total += reported
    return total.item()


def _mean(value: Tensor, mesh: ParallelMesh) -> Tensor:
    total = value.double()
    dist.all_reduce(total, group=mesh.data.get_group())
    return total / mesh.data_size


def count_rows(batch: Batch) -> int:
    """How many rows a global batch has."""
    return next(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim).shape[0]


def _rows(batch: Batch, mesh: ParallelMesh, index: int, count: int) -> Rows:
    total = count_rows(batch)
    size = total // (mesh.data_size * count)
    return Rows((mesh.data_rank * count + index) * size, size, total)


def _slice(batch: Batch, rows: Rows) -> Batch:
    stop = rows.start + rows.count
    sliced: Batch = tree_map(lambda leaf: leaf[rows.start : stop] if isinstance(leaf, Tensor) else leaf, batch)
    return sliced


def _bits(model: nn.Module) -> int:
    """A sum over the bits of this rank's weights: equal weights have equal sums, others hardly ever."""
    total = 0
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", parameter).detach().contiguous()
        if local.numel():
            words = local.reshape(-1).view(torch.int16 if local.element_size() == 2 else torch.int32)
            # Weighted by position, so that exchanged elements do not go unnoticed.
            weights = torch.arange(1, len(words) + 1, device=words.device)
            total = (total * 31 + int((words * weights).sum())) & (2**63 - 1)
    return total
