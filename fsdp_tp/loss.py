"""The mean loss over a global batch whose ranks hold different numbers of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdp_tp.comm.functional import all_reduce
from fsdp_tp.mesh import ParallelMesh


def global_mean(loss_sum: Tensor, token_count: Tensor | int, mesh: ParallelMesh) -> Tensor:
    """The mean over all tokens of the global batch, ready for ``backward()``.

    Ranks may hold different numbers of tokens: a mean of the ranks' means would weigh the
    tokens of a short batch more. Here loss = sum over data ranks of ``loss_sum`` divided by
    the sum of ``token_count``. FSDP averages gradients over its D ranks, so the backward
    scales by D / total count, and what FSDP leaves is the gradient of that loss.

    Args:
        loss_sum: scalar, the sum of this rank's token losses.
        token_count: how many tokens of this rank count towards the mean. With gradient
            accumulation pass the count of all micro-batches of the step each time: the
            results of the micro-batches then add up to the mean.
        mesh: the ParallelMesh of the job.

    Returns:
        A scalar of ``loss_sum``'s dtype, equal on every rank.

    Raises:
        ValueError: no token counts anywhere (on CUDA the result is nan instead).
    """
    count = torch.as_tensor(token_count, device=loss_sum.device)
    return _GlobalMean.apply(loss_sum, count, mesh)


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss_sum: Tensor, count: Tensor, mesh: ParallelMesh) -> Tensor:
        group = mesh.data.get_group()
        # fp64 holds every token count exactly, and the loss without a second rounding.
        total_loss, total_count = all_reduce(torch.stack([loss_sum.double(), count.double()]), group)
        if total_count.device.type == "cpu" and total_count == 0:  # elsewhere a look would stall the device: nan
            raise ValueError("global_mean: token_count is 0 on every rank; a mean needs at least one token")
        ctx.scale = (group.size() / total_count).to(loss_sum.dtype)
        return (total_loss / total_count).to(loss_sum.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.scale, None, None
