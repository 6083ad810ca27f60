"""What one rank does for all, and what fails on one and must fail on all."""

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


def from_all_ranks(value: Result) -> list[Result]:
    """The ``value`` of every rank, in their order."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def to_rank_0(value: Result) -> list[Result]:
    """On rank 0 the ``value`` of every rank, in their order; nothing elsewhere."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values or []


def require_success(what: str, error: Exception | None) -> None:
    """Raises, on every rank, if this or another rank has failed; every rank must call it."""
    errors = from_all_ranks(error)
    failed = [(rank, each) for rank, each in enumerate(errors) if each is not None]
    if failed:
        rank, first = failed[0]
        kind = ValueError if isinstance(first, ValueError) else OSError
        also = f" ({len(failed)} of {len(errors)} ranks failed)" if len(failed) > 1 else ""
        where = f"rank {rank}: " if len(errors) > 1 else ""
        raise kind(f"{what}: {where}{first}{also}") from error
