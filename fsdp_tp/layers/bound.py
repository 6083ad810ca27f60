"""Parameters of modules that know nothing of tensor parallelism.

A norm, or any module of the user's own, reads ``self.weight`` and expects a plain tensor,
but outside ``forward`` that weight is a DTensor. :func:`bind_locals` puts the local tensors
in its place for the length of a forward. Where every rank applies the weight to its own
slice of the activations (``partial``), the gradient must be summed over the tensor axis:
bound on a whole block, the weights of all its modules share one all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_tp import regions
from fsdp_tp.layers.front import Front, put_in_front
from fsdp_tp.layers.parameter import is_fsdp_sharded, to_local
from fsdp_tp.layers.split import Split


class BoundParameter(NamedTuple):
    """One parameter, ``getattr(module, name)``, that every rank has whole or, with a split, its part of."""

    module: nn.Module
    name: str
    partial: bool = False
    """Each rank's gradient is a partial sum over the tensor axis."""
    split: Split | None = None
    dim: int = 0
    """Along which it is split."""

    def local(self, group: dist.ProcessGroup) -> Tensor:
        local = to_local(self.module._parameters[self.name])  # type: ignore[arg-type]
        return local if self.split is None else self.split.local(local, self.dim, group)


def bind_locals(module: nn.Module, parameters: list[BoundParameter], group: dist.ProcessGroup) -> None:
    """From now on ``module.forward`` sees plain local tensors in place of ``parameters``.

    Bindings nest: an inner module leaves alone what an outer one has already bound.
    """
    module._bound_parameters = parameters  # type: ignore[assignment]
    module._tensor_group = group  # type: ignore[assignment]
    put_in_front(module, Bound)


def local_with_summed_gradient(parameter: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The local tensor of one ``partial`` parameter, unless an outer binding has put it in place."""
    if not isinstance(parameter, DTensor):
        return parameter
    return regions.sum_gradients([to_local(parameter)], group)[0]


class Bound(Front):
    """Swaps the locals in, and out again whatever happens."""

    _bound_parameters: list[BoundParameter]
    _tensor_group: dist.ProcessGroup

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with locals_bound(self):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


@contextmanager
def locals_bound(module: Bound) -> Iterator[None]:
    """While entered, the plain local tensors stand in place of the parameters that ``module`` binds."""
    bound: list[tuple[BoundParameter, nn.Parameter]] = []
    whole: list[Tensor] = []
    partial: list[Tensor] = []
    for entry in module._bound_parameters:
        parameter = entry.module._parameters[entry.name]
        # A plain tensor is bound already; a shard of an inner FSDP module that is gathered later binds itself.
        if isinstance(parameter, DTensor) and (entry.module is module or not is_fsdp_sharded(parameter)):
            bound.append((entry, parameter))
            (partial if entry.partial else whole).append(entry.local(module._tensor_group))
    partial = regions.sum_gradients(partial, module._tensor_group)
    in_place: list[Any] = [(partial if entry.partial else whole).pop(0) for entry, _ in bound]
    for (entry, _), tensor in zip(bound, in_place, strict=True):
        entry.module._parameters[entry.name] = tensor
    try:
        yield
    finally:
        for (entry, parameter), tensor in zip(bound, in_place, strict=True):
            # A forward inside another method may have given the parameters back to FSDP, which put its shards there.
            if entry.module._parameters[entry.name] is tensor:
                entry.module._parameters[entry.name] = parameter
