"""The tensor-parallel counterparts of transformers' ``Conv1D``: a linear layer that stores its weight transposed."""

from __future__ import annotations

from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_tp.layers.linear import ColumnParallelLinear, RowParallelLinear


def is_conv1d(module: nn.Module) -> bool:
    """Without an import of transformers."""
    return (type(module).__module__, type(module).__name__) == ("transformers.pytorch_utils", "Conv1D")


class ColumnParallelConv1D(ColumnParallelLinear):
    """As :class:`ColumnParallelLinear`, with W^T ``(in_features, out_features / t)`` on each rank."""

    out_dim = 1

    @classmethod
    def from_linear(cls, linear: Any, **options: Any) -> Self:
        return super().from_linear(_with_sizes(linear), **options)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.t(), bias)


class RowParallelConv1D(RowParallelLinear):
    """As :class:`RowParallelLinear`, with W^T ``(in_features / t, out_features)`` on each rank."""

    in_dim = 0

    @classmethod
    def from_linear(cls, linear: Any, **options: Any) -> Self:
        return super().from_linear(_with_sizes(linear), **options)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight.t())


def _with_sizes(conv: Any) -> Any:
    """The names that ``nn.Linear`` has for what ``Conv1D`` calls nx and nf."""
    conv.in_features, conv.out_features = conv.weight.shape
    return conv
