"""A forward without numbers: which module reads what, told from a run on fake tensors.

It needs neither the memory nor the time of the model, real or on the meta device.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module: its first argument, and the first tensor that it returned."""

    path: str
    input: Any
    output: Any


@dataclass(frozen=True, eq=False)
class Read:
    """An operation that made a tensor from ``tensor``, run by the forward of the module ``path``."""

    path: str
    operation: str
    tensor: Tensor


@dataclass
class Recording:
    calls: list[Call] = field(default_factory=list)
    """In the order in which they ended."""
    reads: list[Read] = field(default_factory=list)

    def of(self, path: str) -> list[Call]:
        return [call for call in self.calls if call.path == path]


@dataclass(frozen=True, kw_only=True)
class Slices:
    """One of ``size`` ranks: the layers of which it has a part, and where sequences are cut and joined."""

    size: int
    columns: Sequence[str]
    rows: Sequence[str]
    cut_input: Sequence[str] = ()
    join_input: Sequence[str] = ()
    cut_output: Sequence[str] = ()
    join_output: Sequence[str] = ()


def rehearse(model: nn.Module, ids_shape: tuple[int, int], slices: Slices | None = None) -> Recording:
    """Runs a Hugging Face model, which stays as it is, on token ids of a shape.

    Args:
        slices: run with one rank's part of these weights and sequences.

    Raises:
        Exception: whatever the model's forward raises.
    """
    recorder = _Recorder()
    handles = []
    log = logging.getLogger("torch._subclasses.fake_tensor")  # prints a traceback of what is raised anyway
    was_disabled, log.disabled = log.disabled, True
    for path, module in model.named_modules():
        for on_output, change in _changes(path, slices):
            if on_output:
                handles.append(module.register_forward_hook(_changed_output(change)))
            else:
                handles.append(module.register_forward_pre_hook(_changed_input(change), with_kwargs=True))
        handles.append(module.register_forward_pre_hook(recorder.enter(path), with_kwargs=True))
        handles.append(module.register_forward_hook(recorder.leave(path), with_kwargs=True))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), recorder, torch.no_grad():
            state = {
                name: torch.empty(_own_shape(name, tensor.shape, slices), dtype=tensor.dtype)
                for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            }
            ids = torch.zeros(ids_shape, dtype=torch.long)
            functional_call(model, state, (), {"input_ids": ids, "use_cache": False})
    finally:
        log.disabled = was_disabled
        for handle in handles:
            handle.remove()
    return recorder.recording


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self._stack: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            path = self._stack[-1] if self._stack else ""
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    self.recording.reads.append(Read(path, getattr(func, "__name__", str(func)), leaf))
        return result

    def enter(self, path: str) -> Any:
        return lambda module, args, kwargs: self._stack.append(path)

    def leave(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._stack.pop()
            first = args[0] if args else kwargs.get(_first_parameter(module))
            tensor = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
            self.recording.calls.append(Call(path, first, tensor))

        return hook


def _own_shape(name: str, shape: Sequence[int], slices: Slices | None) -> list[int]:
    owner, _, kind = name.rpartition(".")
    own = list(shape)
    if slices is not None and owner in slices.columns:
        own[0] //= slices.size
    elif slices is not None and owner in slices.rows and kind == "weight":
        own[1] //= slices.size
    return own


def _changes(path: str, slices: Slices | None) -> list[tuple[bool, Callable[[Tensor], Tensor]]]:
    """What happens to the sequence, dim -2, at a module: ``(of its output, what)``."""
    if slices is None:
        return []
    size = slices.size

    def cut(x: Tensor) -> Tensor:
        return x.chunk(size, -2)[0]

    def join(x: Tensor) -> Tensor:
        return torch.cat([x] * size, -2)

    places = (
        (slices.cut_input, False, cut),
        (slices.join_input, False, join),
        (slices.cut_output, True, cut),
        (slices.join_output, True, join),
    )
    return [(on_output, change) for paths, on_output, change in places if path in paths]


def _changed_input(change: Callable[[Tensor], Tensor]) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        first = _first_parameter(module)
        return args, {**kwargs, first: change(kwargs[first])}

    return hook


def _changed_output(change: Callable[[Tensor], Tensor]) -> Any:
    return lambda module, args, output: change(output)


def _first_parameter(module: nn.Module) -> str:
    return next(iter(inspect.signature(module.forward).parameters), "")
