"""The ``shared`` strategy: collectives of FSDP2 in memory that all ranks of a host see.

All-gather: the output is one buffer for all ranks, at the same place for all. FSDP copies each rank's
shard into its slice of the output before it calls the collective, so that nothing is left to do but to wait.

Reduce-scatter: FSDP copies the gradients into an input that the other ranks read in place, each summing its part
straight into its output. That output becomes the live ``.grad``, so it is ordinary memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from fsdp_tp.comm.native import AVG, DTYPES, SUM
from fsdp_tp.comm.shared_memory import SharedGroup

_OPS = {dist.ReduceOp.SUM: SUM, dist.ReduceOp.AVG: AVG}


class SharedAllGather(AllGather):
    """Into one output for all ranks."""

    def __init__(self, group: SharedGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._group.buffers.take(self._group, numel_of(size), dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self._group.buffers.rendezvous(self._group)


class SharedReduceScatter(ReduceScatter):
    """Out of inputs that all ranks read in place."""

    def __init__(self, group: SharedGroup) -> None:
        self._group = group
        self._input_numel = -1

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # FSDP asks for the input and then for the output.
        numel = numel_of(size)
        if numel * self._group.size == self._input_numel:
            self._input_numel = -1
            return torch.empty(numel, dtype=self._output_dtype(dtype))
        self._input_numel = numel
        return self._group.empty(numel, self._input_dtype(dtype))

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        known = _OPS.get(op) if isinstance(op, dist.ReduceOp.RedOpType) else None
        if known is None or input_tensor.dtype not in DTYPES or output_tensor.dtype not in DTYPES:
            dist.reduce_scatter_tensor(output_tensor, input_tensor.to(output_tensor.dtype), op, group)
            return
        self._group.reduce_scatter(output_tensor, input_tensor, known)

    def _input_dtype(self, reduce_dtype: torch.dtype) -> torch.dtype:
        return reduce_dtype

    def _output_dtype(self, reduce_dtype: torch.dtype) -> torch.dtype:
        return reduce_dtype


def numel_of(size: Sequence[int | torch.SymInt]) -> int:
    return math.prod(int(each) for each in size)
