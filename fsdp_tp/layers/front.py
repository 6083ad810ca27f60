"""Changing what a module's ``forward`` does without knowing the module.

The module's class becomes a subclass of it with a mixin in front, as ``fully_shard`` does
it. Unlike a forward hook, what a mixin does lies inside ``forward``: activation
checkpointing runs it again in the recomputation, and ``torch.compile`` traces it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn


def put_in_front(module: nn.Module, mixin: type) -> None:
    """Makes ``module`` an instance of a subclass of its class whose first base is ``mixin``."""
    cls: Any = type(module)
    module.__class__ = _combined(mixin, cls)


@cache
def _combined(mixin: type, cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"{mixin.__name__}{cls.__name__}", (mixin, cls), {"__module__": cls.__module__})


def transform_first_argument(module: nn.Module, region: Callable[[Tensor], Tensor]) -> None:
    """``module.forward`` gets ``region(x)`` where it got x, its first argument, by position or name."""
    module._first_argument = next(iter(inspect.signature(module.forward).parameters))  # type: ignore[assignment]
    module._first_argument_region = region  # type: ignore[assignment]
    put_in_front(module, Region)


def transform_output(module: nn.Module, region: Callable[[Tensor], Tensor]) -> None:
    """``module.forward`` returns ``region(y)`` where it returned the tensor y."""
    module._output_region = region  # type: ignore[assignment]
    put_in_front(module, OutputRegion)


class OutputRegion:
    _output_region: Callable[[Tensor], Tensor]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._output_region(super().forward(*args, **kwargs))  # type: ignore[misc]


class Region:
    _first_argument: str
    _first_argument_region: Callable[[Tensor], Tensor]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (self._first_argument_region(args[0]), *args[1:])
        else:
            kwargs[self._first_argument] = self._first_argument_region(kwargs[self._first_argument])
        return super().forward(*args, **kwargs)  # type: ignore[misc]
