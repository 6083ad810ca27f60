"""What one rank does for all: files that it alone writes or reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


def on_rank_0(function: Callable[[], Result]) -> Result:
    """Runs ``function`` on rank 0; every rank returns its result or raises its exception. File
    systems may show a change to ranks at different times, and a rank that fails alone leaves the
    others waiting."""
    outcome: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    result: Result = outcome[0]
    return result
