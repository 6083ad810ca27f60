"""Runs that are equal to the last bit."""

from __future__ import annotations

import os

import torch

# cuBLAS must reuse one workspace, and NCCL one algorithm: a ring always adds in the order of ranks.
_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}


def use_deterministic_algorithms() -> None:
    """From now on this process computes the same bits from the same inputs, or raises.

    Call it before the first operation on CUDA and before the process group exists; what the
    environment already says is left alone. On a CPU with gloo torch is deterministic anyway for
    a fixed number of threads; operations without a deterministic form raise RuntimeError.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    # Would fill all new memory, FSDP's buffers too, for the sake of code that reads what nobody wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
