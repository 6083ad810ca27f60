"""Methods that compute, beside ``forward``: they see sharded parameters unless these are gathered for them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from fsdp_tp.comm.choose import finish_forward
from fsdp_tp.comm.functional import all_reduce
from fsdp_tp.layers.bound import Bound, locals_bound
from fsdp_tp.layers.front import Front, put_in_front
from fsdp_tp.mesh import ParallelMesh


def register_forward_method(module: nn.Module, name: str) -> None:
    """From now on ``module.name(...)`` computes as ``forward`` does.

    The parameters that FSDP gathers for ``module.forward`` are gathered for it too, and those that are whole
    on every rank of the tensor axis are plain tensors in it. Gradients flow as from ``forward``. As with
    ``forward``, all ranks of a shard group must call it, equally often. It may call ``module`` itself, which with
    ``reshard_after_forward=True`` gives the parameters back: use them before. Of a model with a ``generate``
    method ``wrap`` and ``parallelize`` take care themselves.

    Args:
        module: the model after ``wrap``, or one of its blocks. A module that is not wrapped itself is
            gathered with the block or model that it is part of, so its method is left as it is.
        name: of one of its methods.

    Raises:
        ValueError: there is no such method.
    """
    method = getattr(module, name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {name!r}")
    if isinstance(module, Bound):

        @functools.wraps(method)
        def bound(self: Bound, *args: Any, **kwargs: Any) -> Any:
            with locals_bound(self):
                return method(*args, **kwargs)

        setattr(module, name, MethodType(bound, module))
    register_fsdp_forward_method(module, name)


def support_generate(model: nn.Module, mesh: ParallelMesh, split_heads: Iterable[nn.Module] = ()) -> None:
    """Makes ``model.generate``, if there is one, work on all ranks of ``mesh``; call it before ``fully_shard``."""
    if callable(getattr(model, "generate", None)) and not isinstance(model, Generates):
        model._generation = (mesh, list(split_heads))  # type: ignore[assignment]
        put_in_front(model, Generates)


class Generates(Front):
    """A model whose ``generate`` calls ``forward`` once a token and chooses by the logits."""

    _generation: tuple[ParallelMesh, list[Any]]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As that of the model itself; all ranks of a shard group must call it, with prompts of any lengths.

        Ranks of one tensor axis make the same choices: before the first token they take over the random state
        of the axis's first rank. Logits that ``loss_parallel`` leaves split are whole in here.
        """
        mesh, split_heads = self._generation
        generate = super().generate  # type: ignore[misc]
        if "synced_gpus" in inspect.signature(generate).parameters:
            kwargs.setdefault("synced_gpus", False)  # see _InStep; transformers would switch it on
        if mesh.tensor_size > 1:
            _share_random_state(mesh)
        with ExitStack() as stack:
            stack.enter_context(_whole_logits(split_heads))
            if isinstance(self, FSDPModule):
                # For what runs before the first forward: an encoder. Not by unshard() alone, since the first
                # module that runs a forward becomes the root.
                _gather_methods(self)
                self._only_gather()  # type: ignore[attr-defined]
                self.unshard()
                stack.callback(self.reshard)
                if mesh.shard.size() > 1:
                    stack.enter_context(_InStep(self, mesh))
            return generate(*args, **kwargs)


def _share_random_state(mesh: ParallelMesh) -> None:
    generator = torch.default_generator
    if mesh.device_type != "cpu":
        generator = getattr(torch, mesh.device_type).default_generators[mesh.device.index]
    state = generator.get_state().to(mesh.device)
    dist.broadcast(state, group=mesh.tensor.get_group(), group_src=0)
    generator.set_state(state.cpu())


@contextmanager
def _whole_logits(heads: list[Any]) -> Iterator[None]:
    for head in heads:
        head.gather_output = True
    try:
        yield
    finally:
        for head in heads:
            head.gather_output = False


class _InStep:
    """While entered, every forward of ``model`` on one rank of the shard group meets one on all others.

    FSDP gathers in every forward, so a rank that is done would leave the others waiting. On leaving, a rank
    takes part in the gathers of the others, without computing anything, until all are done. (Generation in
    transformers has ``synced_gpus`` for this, which goes on computing: past the end of masks, static caches and
    position tables.) A rank that raises between two forwards makes the others raise too.
    """

    def __init__(self, model: Any, mesh: ParallelMesh) -> None:
        self._model, self._group, self._device = model, mesh.shard.get_group(), mesh.device
        self._order: list[nn.Module] = []
        self._inside, self._without_gradients = False, True
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        self._handles = [
            self._model.register_forward_pre_hook(self._before_forward, prepend=True),
            self._model.register_forward_hook(self._after_forward),
        ]
        for module in _gather_methods(self._model):
            if module is not self._model:
                self._handles.append(module.register_forward_pre_hook(self._before_block))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        if error is not None and not self._inside and not isinstance(error, _PeerFailed):
            self._meet(done=True, failed=True)
        with torch.no_grad():
            while error is None and not self._meet(done=True):
                self._model._only_gather(self._order)
                if self._without_gradients:
                    finish_forward(self._model)

    def _before_forward(self, *_: Any) -> None:
        self._meet(done=False)
        self._order.clear()
        self._inside, self._without_gradients = True, not torch.is_grad_enabled()

    def _before_block(self, module: nn.Module, *_: Any) -> None:
        self._order.append(module)

    def _after_forward(self, *_: Any) -> None:
        self._inside = False

    def _meet(self, *, done: bool, failed: bool = False) -> bool:
        """Whether all are done."""
        rank = dist.get_rank()
        mine = torch.tensor([not done, rank + 1 if failed else 0], dtype=torch.int64, device=self._device)
        going, failure = all_reduce(mine, self._group, "max").tolist()
        if failure and not failed:
            raise _PeerFailed(f"generate() raised on rank {failure - 1}, which shares sharded parameters with this one")
        return not going


class _PeerFailed(RuntimeError):
    pass


def _gather_methods(model: Any) -> list[Any]:
    """All modules that FSDP wraps, each now with the method ``_only_gather``."""
    sharded: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        if not hasattr(module, "_only_gather"):
            module._only_gather = MethodType(_only_gather, module)
            register_fsdp_forward_method(module, "_only_gather")
    return sharded


def _only_gather(self: nn.Module, order: tuple[Any, ...] | list[Any] = ()) -> None:
    """The gathers of a forward in which the blocks of ``order`` run one after another, and no more."""
    for module in order:
        module._only_gather()
