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


class Front:
    """Base of the mixins, whose ``forward`` takes whatever the module's own does."""


def put_in_front(module: nn.Module, mixin: type[Front]) -> None:
    """Makes ``module`` an instance of a subclass of its class whose first base is ``mixin``."""
    first: Any = mixin
    cls: Any = type(module)
    module.__class__ = _combined(first, cls)


@cache
def _combined(mixin: type, cls: type[nn.Module]) -> type[nn.Module]:
    # Under the name of the model's own class, by which others may know it (a config's "architectures").
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def own_forward(module: nn.Module) -> Any:
    """The ``forward`` of the module's own class, whatever stands in front of it."""
    own: Any = next(cls for cls in type(module).__mro__ if "forward" in vars(cls) and not issubclass(cls, Front))
    return own.forward


def argument_names(module: nn.Module) -> list[str]:
    """Of the module's own ``forward``."""
    return list(inspect.signature(own_forward(module)).parameters)[1:]


def transform_first_argument(module: nn.Module, region: Callable[[Tensor], Tensor]) -> None:
    """``module.forward`` gets ``region(x)`` where it got x, its first argument, by position or name."""
    transform_argument(module, argument_names(module)[0], region)


def transform_argument(module: nn.Module, name: str, region: Callable[[Tensor], Tensor]) -> None:
    """The same for the argument ``name``, unless it is None or not given."""
    if not isinstance(module, Region):
        module.__dict__["_argument_regions"] = []
        put_in_front(module, Region)
    module.__dict__["_argument_regions"].append((name, argument_names(module).index(name), region))


def transform_output(module: nn.Module, region: Callable[[Tensor], Tensor]) -> None:
    """``module.forward`` returns ``region(y)`` where it returned the tensor y."""
    module.__dict__["_output_region"] = region
    put_in_front(module, OutputRegion)


class OutputRegion(Front):
    _output_region: Callable[[Tensor], Tensor]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._output_region(super().forward(*args, **kwargs))  # type: ignore[misc]


class Region(Front):
    _argument_regions: list[tuple[str, int, Callable[[Tensor], Tensor]]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for name, position, region in self._argument_regions:
            if position < len(args):
                if args[position] is not None:
                    args = (*args[:position], region(args[position]), *args[position + 1 :])
            elif kwargs.get(name) is not None:
                kwargs[name] = region(kwargs[name])
        return super().forward(*args, **kwargs)  # type: ignore[misc]
