"""Cross entropy on logits whose vocabulary is split over the tensor axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_tp.comm.functional import all_reduce
from fsdp_tp.layers.parameter import tensor_axis
from fsdp_tp.mesh import ParallelMesh


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    mesh: ParallelMesh | DeviceMesh,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    r"""``torch.nn.functional.cross_entropy`` without ever holding the whole vocabulary.

    For one token with logits z over V classes, target y and smoothing s:
    loss = (1 - s) (lse(z) - z_y) + s (lse(z) - mean(z)), with lse(z) = log sum exp(z).
    Only per-token numbers cross the tensor axis: the maximum (one all-reduce), then the sum
    of exponentials, z_y and the sum of z together (one all-reduce). The gradient,
    softmax(z) - (1 - s) onehot(y) - s / V, is local.

    Args:
        logits: ``(..., V / t)``, this rank's slice of the vocabulary. 16-bit logits are
            computed in fp32.
        target: ``(...)`` int64 global ids, the same on all ranks of the axis.
        mesh: a ParallelMesh, or a DeviceMesh with a tensor axis of t ranks.
        ignore_index: targets with this value add nothing to loss or gradient.
        label_smoothing: s, in [0, 1]; spread over the whole vocabulary.
        reduction: ``"mean"`` over the targets that count, ``"sum"`` or ``"none"``.

    Returns:
        A scalar, or ``target``'s shape for ``"none"``; fp32 or wider, equal on all ranks.

    Raises:
        ValueError: unknown reduction, smoothing out of range, or shapes that do not match.
        RuntimeError: a target out of range (on CUDA, as a device-side assertion).
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} must be 'mean', 'sum' or 'none'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing} must lie between 0 and 1")
    if logits.shape[:-1] != target.shape:
        raise ValueError(f"logits of shape {tuple(logits.shape)} do not match targets of shape {tuple(target.shape)}")
    group = tensor_axis(mesh).get_group()
    counts = target != ignore_index
    classes = logits.shape[-1] * group.size()
    torch._assert_async(
        ((target >= 0) & (target < classes) | ~counts).all(), f"a target is neither ignore_index nor in [0, {classes})"
    )
    losses = _VocabParallelCrossEntropy.apply(logits, target, counts, label_smoothing, group)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / counts.sum() if reduction == "mean" else total


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Varying logits -> invariant loss a token; zero where ``counts`` is false."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, counts: Tensor, smoothing: float, group: dist.ProcessGroup
    ) -> Tensor:
        vocabulary = logits.shape[-1]
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        maximum = all_reduce(z.amax(-1), group, "max")
        z = z - maximum.unsqueeze(-1)
        index = target - group.rank() * vocabulary
        here = counts & (index >= 0) & (index < vocabulary)
        index = index.masked_fill(~here, 0).unsqueeze(-1)
        z_target = z.gather(-1, index).squeeze(-1).masked_fill(~here, 0)
        # Without smoothing a masked class, z = -inf, must not enter.
        z_sum = z.sum(-1) if smoothing else torch.zeros_like(z_target)
        exponentials = z.exp_()
        sums = all_reduce(torch.stack([exponentials.sum(-1), z_target, z_sum]), group)
        denominator, z_target, z_sum = sums
        mean_z = z_sum / (vocabulary * group.size())
        losses = denominator.log() - (1 - smoothing) * z_target - smoothing * mean_z
        ctx.save_for_backward(exponentials, denominator, index, here, counts)
        ctx.smoothing, ctx.vocabulary, ctx.dtype = smoothing, vocabulary * group.size(), logits.dtype
        return losses.masked_fill(~counts, 0)

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor, None, None, None, None]:
        exponentials, denominator, index, here, counts = ctx.saved_tensors
        grad = exponentials / denominator.unsqueeze(-1)
        grad -= ctx.smoothing / ctx.vocabulary
        grad.scatter_add_(-1, index, (here.to(grad.dtype) * (ctx.smoothing - 1)).unsqueeze(-1))
        grad *= (grad_losses * counts).unsqueeze(-1)
        return grad.to(ctx.dtype), None, None, None, None
