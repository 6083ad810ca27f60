"""One file for each fault that people have reported of FSDP with tensor parallelism or hybrid sharding.

Each shows the right value, asserts that fsdp_tp gives it, and keeps what plain torch (or transformers) still
gets wrong as an ``xfail(strict=True)``: when one of those passes, it was fixed there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_tp.layers.canonical import arranged_parameters, restore
from tests.models import gather


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result, or the sentence of the exception, so that a rank returns instead of ending its world."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def norm_of(gradients: list[Tensor]) -> float:
    """By brute force in fp64."""
    return torch.cat([gradient.detach().flatten().double() for gradient in gradients]).norm().item()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole and in the order of one process, however the parameters are split and stored."""
    arranged = arranged_parameters(model)
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = gather(restore(parameter.grad, *arranged[name]) if name in arranged else parameter.grad)
    return found


def assert_gradients_equal(ours: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """``tolerance`` is relative to the whole gradient of a parameter."""
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (ours[name] - gradient).norm().item()
        assert difference <= tolerance * gradient.norm().item(), (name, difference)


class Block(nn.Sequential):
    """A norm, which stays whole, and two linears, which are split. fp64."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        layers = [nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)]
        super().__init__(*(layer.double() for layer in layers))


PLAN = {"0": "sequence", "1": "column", "3": "row"}


def rows() -> Tensor:
    """The global batch of :class:`Block`."""
    return torch.randn(8, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
