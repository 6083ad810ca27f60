"""Cross entropy on logits whose vocabulary is split over the tensor axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from fsdp_tp.layers.parameter import tensor_axis
from fsdp_tp.layers.sliced_cross_entropy import (
    SlicedCrossEntropy,
    check_arguments,
    check_class_weight,
    computed_in,
    reduce_losses,
)
from fsdp_tp.mesh import ParallelMesh


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    mesh: ParallelMesh | DeviceMesh,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    r"""``torch.nn.functional.cross_entropy`` without ever holding the whole vocabulary.

    For one token with logits z over V classes, target y, smoothing s and class weights w (all 1
    without ``weight``), with lse(z) = log sum exp(z):

        loss = (1 - s) w_y (lse(z) - z_y) + (s / V) sum over c of w_c (lse(z) - z_c)

    - Shapes per rank: rank r of t holds the V_r classes from r R up to (r + 1) R with
      R = ceil(V / t), as ``torch.chunk`` and DTensor's ``Shard`` cut them: the last ranks hold
      fewer, perhaps none.
    - Forward: only per-token numbers cross the tensor axis, for all tokens at once and in fp64:
      the maximum (one all-reduce), then the sum of exponentials, z_y and, with smoothing, the sum
      of w z (one all-reduce). The sizes of the slices travel with them.
    - Gradient: a softmax(z) - (1 - s) w_y onehot(y) - (s / V) w, with
      a = (1 - s) w_y + (s / V) sum(w): local, nothing is reduced. The softmax is computed again
      from the logits, so that nothing else of their size is kept.

    Args:
        logits: ``(..., V_r)``, this rank's slice of the vocabulary. 16-bit logits are computed in
            fp32, chunk by chunk.
        target: ``(...)`` int64 global ids, the same on all ranks of the axis.
        mesh: a ParallelMesh, or a DeviceMesh with a tensor axis of t ranks.
        weight: w, ``(V,)``, whole on every rank. It gets no gradient.
        ignore_index: targets with this value add nothing to loss or gradient.
        label_smoothing: s, in [0, 1]; spread over the whole vocabulary.
        reduction: ``"mean"``, weighted by the w_y of the targets that count, ``"sum"`` or ``"none"``.
        chunk_size: of how many tokens fp32 logits may exist at once; by default as many as take
            64 MiB (4 MiB on a CPU). Results differ by rounding only.

    Returns:
        A scalar, or ``target``'s shape for ``"none"``; fp32 or wider, equal on all ranks.

    Raises:
        ValueError: unknown reduction, smoothing out of range, a chunk_size below 1, or shapes
            that do not match.
        RuntimeError: a target out of range, or slices that are not cut as above (on CUDA, as a
            device-side assertion).
    """
    check_arguments(logits, target, reduction, label_smoothing, chunk_size, "logits")
    group = tensor_axis(mesh).get_group()
    weight = check_class_weight(weight, logits.shape[-1], group)
    losses = _VocabParallelCrossEntropy.apply(logits, target, weight, ignore_index, label_smoothing, chunk_size, group)
    return reduce_losses(losses, target, weight, ignore_index, reduction)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Varying logits -> invariant loss a token; zero where the target is ``ignore_index``."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
        chunk_size: int | None,
        group: dist.ProcessGroup,
    ) -> Tensor:
        options = (ignore_index, smoothing, logits.shape[-1], group)
        sliced = SlicedCrossEntropy(target.flatten(), weight, *options)
        chunks = sliced.chunks(chunk_size)
        statistics = torch.cat([sliced.statistics(_rows(logits, chunk)) for chunk in chunks], 1)
        maximum, size = sliced.maximum(statistics)
        z_target = torch.zeros_like(maximum)
        if sliced.classes:
            index, here = sliced.own_targets(size)
            z_target = logits.gather(-1, index.view(target.shape).unsqueeze(-1)).flatten().to(maximum.dtype)
            z_target = z_target.masked_fill(~here, 0)
        losses, denominator, vocabulary = sliced.losses(statistics, maximum, size, z_target)
        ctx.save_for_backward(logits, target, weight, maximum, denominator, size, vocabulary)
        ctx.options, ctx.chunks = options, chunks
        return losses.to(computed_in(logits)).view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        logits, target, weight, *saved = ctx.saved_tensors
        sliced = SlicedCrossEntropy(target.flatten(), weight, *ctx.options)
        terms = sliced.gradient_terms(grad_losses.flatten(), *saved, dtype=computed_in(logits))
        grad = logits.new_empty(target.numel(), sliced.classes)
        for chunk in ctx.chunks:
            grad[chunk] = sliced.gradient(_rows(logits, chunk), chunk, *terms)
        return grad.view(logits.shape), None, None, None, None, None, None


def _rows(logits: Tensor, chunk: slice) -> Tensor:
    """The logits of the tokens of a chunk: a view, or a copy where the tokens are no single dim."""
    tokens = logits.shape[:-1].numel()
    if logits.is_contiguous():
        return logits.view(tokens, logits.shape[-1])[chunk]
    places = torch.arange(tokens, device=logits.device)[chunk]
    return logits[torch.unravel_index(places, logits.shape[:-1])]
