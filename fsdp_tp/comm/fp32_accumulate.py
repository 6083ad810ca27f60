"""The ``fp32_accumulate`` strategy: gradients travel in 16 bits and are summed in fp32, in the order of ranks."""

from __future__ import annotations

import torch

from fsdp_tp.comm.shared import SharedReduceScatter
from fsdp_tp.comm.shared_memory import SharedGroup

_HALF = (torch.bfloat16, torch.float16)


class FP32AccumulateReduceScatter(SharedReduceScatter):
    """Half the traffic of an fp32 reduction.

    For gradients of 16-bit parameters it is the same sum bit for bit, as they have no more than 16 bits before the
    first addition. Others are rounded once, to the 16-bit type of the parameters or else to bf16: fp32 gradients, and
    sums over micro-batches (``set_requires_gradient_sync(False)``), which in fp16 must stay below 65,504.
    """

    def __init__(self, group: SharedGroup, param_dtype: torch.dtype | None) -> None:
        super().__init__(group)
        self._wire = param_dtype if param_dtype in _HALF else torch.bfloat16

    def _input_dtype(self, reduce_dtype: torch.dtype) -> torch.dtype:
        return self._wire if reduce_dtype in (torch.float32, *_HALF) else reduce_dtype

    def _output_dtype(self, reduce_dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if reduce_dtype in (torch.float32, *_HALF) else reduce_dtype
