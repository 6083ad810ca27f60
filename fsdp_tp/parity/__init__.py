"""Convergence parity: the same training job under other layouts, and a verdict on whether it is the same.

``python -m fsdp_tp.parity --help`` on the command line; :func:`assert_parity` in a test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import fsdp_tp
from fsdp_tp.parity import job as _job
from fsdp_tp.parity.job import Batch, Job
from fsdp_tp.parity.layout import Layout
from fsdp_tp.parity.report import Report, Result
from fsdp_tp.parity.run import LEVEL_OF, compare_curves, compare_layouts
from fsdp_tp.parity.workers import RankError, WorkerDied, Workers

__all__ = [
    "Layout",
    "ParityError",
    "RankError",
    "Report",
    "Result",
    "WorkerDied",
    "Workers",
    "assert_parity",
    "compare_curves",
]


class ParityError(AssertionError):
    """A layout trains differently; the message says where, and ``report`` holds everything else."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.sentence())
        self.report = report


def assert_parity(
    build_model: Callable[[], nn.Module],
    batches: Sequence[Batch] | Callable[[int], Batch],
    *,
    layouts: Iterable[str | Layout],
    dtype: torch.dtype = torch.float32,
    steps: int | None = None,
    reference: str | Layout | Path = Layout(),
    record: Path | None = None,
    repeat: bool = False,
    loss: Callable[..., Tensor] = _job.language_model_loss,
    token_count: Callable[[Batch], int] | None = _job.language_model_tokens,
    optimizer: Callable[..., torch.optim.Optimizer] = _job.adamw,
    wrap: Callable[..., nn.Module] = _job.wrap,
    clip: Callable[..., Tensor] = fsdp_tp.clip_grad_norm_,
    max_grad_norm: float = 1.0,
    seed: int = 0,
    workers: Workers | None = None,
) -> Report:
    """Trains one job under ``reference`` and under every layout, and raises if a curve is not the same.

    The layouts run one after another on local processes (gloo on CPUs, or one GPU a rank), with
    the same initial weights and global batches. Losses, gradient norms, and sketches of every
    module's output and its gradient and of every parameter and its gradient are compared after
    each step. Functions and batches go to other processes: functions must be defined at the top
    level of a module that can be imported, and a script needs ``if __name__ == "__main__":``.

    Args:
        build_model: returns the model, the same on every call after ``torch.manual_seed(seed)``; real
            weights or on the meta device.
        batches: the global batch of each step, or a function of the step, counted from 1. A tensor
            of token ids ``(rows, length + 1)`` or a mapping of tensors whose first dim is the rows.
        layouts: such as ``"tensor=2,shard=2,sequence_parallel"``; see :class:`Layout`.
        dtype: float64 asks whether it is the same mathematics (relative gaps up to 1e-10; casts to
            float32 inside the model are lifted), float32 allows 1e-6 on tensors of the first step
            and 1e-5 on the curve, bfloat16 is mixed precision with fp32 master weights and gradient
            sums. Beyond these bounds a gap counts as noise if it is at most four times (after an
            optimizer step in fp32: sixteen times) that of reference runs whose weights were perturbed
            by one machine epsilon (arXiv 2506.09280).
        steps: by default as many as there are batches.
        reference: a layout, by default one process that runs the plain model and none of this
            library, or the path of a recorded curve.
        record: write the reference's curve to this path, to compare with later or elsewhere.
        repeat: also run each layout twice and ask for equal bits.
        loss: called as ``loss(model, batch, mesh, layout)`` with this rank's rows; returns the sum
            over its tokens, a scalar.
        token_count: of a batch; the mean is over the tokens of the global batch. None if ``loss``
            already is a mean, whose average over ranks and micro-batches is the objective.
        optimizer: ``optimizer(model, mesh)``.
        wrap: ``wrap(model, mesh, layout, mp_policy, seed)`` lays the model out and returns it.
        clip: ``clip(parameters, max_norm)`` clips the gradients and returns their norm before.
        max_grad_norm, seed: as in training.
        workers: processes to run on, which stay; by default new ones, ended afterwards.

    Returns:
        The report, whose verdict is ``"equal"`` or ``"within_noise"``.

    Raises:
        ParityError: a layout differs; names the first step and module.
        ValueError: a layout that does not fit, or a model that is not deterministic.
        RankError, WorkerDied: a run failed.
    """
    if dtype not in LEVEL_OF:
        legal = ", ".join(str(each) for each in LEVEL_OF)
        raise ValueError(f"dtype={dtype} must be one of {legal}")
    if isinstance(layouts, str):
        raise ValueError(f"layouts={layouts!r} must be a list of layouts")
    if steps is None:
        if callable(batches):
            raise ValueError("steps must be given if batches is a function")
        steps = len(batches)
    job = Job(
        build_model=build_model,
        batches=batches,
        steps=steps,
        loss=loss,
        token_count=token_count,
        optimizer=optimizer,
        wrap=wrap,
        clip=clip,
        max_grad_norm=max_grad_norm,
        dtype=dtype,
        seed=seed,
    )
    with contextlib.nullcontext(workers) if workers is not None else Workers() as on:
        report = compare_layouts(
            job,
            [Layout.parse(layout) if isinstance(layout, str) else layout for layout in layouts],
            reference=Layout.parse(reference) if isinstance(reference, str) else reference,
            repeat=repeat,
            record=record,
            workers=on,
        )
    if report.verdict == "different":
        raise ParityError(report)
    if report.errors:
        raise RankError("\n".join(report.errors))
    return report
