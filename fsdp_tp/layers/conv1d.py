"""The tensor-parallel counterparts of transformers' ``Conv1D``: a linear layer that stores its weight transposed."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_tp.layers.linear import ColumnParallelLinear, RowParallelLinear
from fsdp_tp.mesh import ParallelMesh


class ColumnParallelConv1D(ColumnParallelLinear):
    """As :class:`ColumnParallelLinear`, with W^T ``(in_features, out_features / t)`` on each rank."""

    out_dim = 1

    def _split(self, mesh: ParallelMesh | DeviceMesh, **options: Any) -> None:
        self.in_features, self.out_features = self.weight.shape
        super()._split(mesh, **options)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.t(), bias)


class RowParallelConv1D(RowParallelLinear):
    """As :class:`RowParallelLinear`, with W^T ``(in_features / t, out_features)`` on each rank."""

    in_dim = 0

    def _split(self, mesh: ParallelMesh | DeviceMesh, **options: Any) -> None:
        self.in_features, self.out_features = self.weight.shape
        super()._split(mesh, **options)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight.t())
