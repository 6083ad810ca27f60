"""Sketches what every module of a model reads, returns and gets as gradient, on every rank, in
the coordinates of the whole tensors that one process would have.

Of several arguments or results the first floating-point tensor counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from fsdp_tp.initialize import own_part
from fsdp_tp.layers.front import OutputRegion
from fsdp_tp.locate import Rows, first_floating, locate
from fsdp_tp.mesh import ParallelMesh
from fsdp_tp.parity import trace
from fsdp_tp.parity.layout import Layout
from fsdp_tp.parity.sketch import Sketcher


class Observer:
    """Hooks on every module of a wrapped model.

    Args:
        shapes: of the whole tensors, by event, as one process has them; None where this is that process.
    """

    def __init__(
        self, model: nn.Module, mesh: ParallelMesh, rank: int, shapes: Mapping[str, tuple[int, ...]] | None
    ) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {} if shapes is None else dict(shapes)
        self.sources: dict[str, str] = {}
        self._learning = shapes is None
        self._model, self._mesh, self._rank = model, mesh, rank
        self._sketcher = Sketcher(mesh.device)
        self._rows = Rows(0, 1, 1)
        self._calls: dict[str, int] = {}
        self._outputs: list[tuple[Tensor, str, bool]] = []
        self._found: dict[tuple[str, int], Tensor] = {}
        self._starts: dict[str, tuple[int, ...]] = {}
        bound = [entry for module in model.modules() for entry in getattr(module, "_replicated_parameters", ())]
        self._summing = {entry.module for entry in bound if entry.partial}
        for path, module in _observable(model):
            # In front of FSDP's hooks, which replace what a module reads by copies.
            module.register_forward_pre_hook(self._before(path), with_kwargs=True, prepend=True)
            module.register_forward_hook(self._after(path))

    def start(self, rows: Rows) -> None:
        """The next forward computes these rows."""
        self._rows = rows
        self._calls, self._outputs = {}, []

    def batch(self, tensors: Sequence[Tensor]) -> None:
        """Notes the global batch, which every rank has."""
        for number, tensor in enumerate(tensors):
            event = trace.key(trace.BATCH, str(number))
            self._add(event, tensor.double(), tensor.shape, (0,) * tensor.ndim, self._rank)

    def parameters(self, stage: str) -> None:
        """Notes all gradients, or all weights."""
        for name, parameter in self._model.named_parameters():
            tensor = parameter if stage == trace.WEIGHT else parameter.grad
            if isinstance(tensor, DTensor):
                if tensor._local_tensor.numel():
                    if name not in self._starts:  # stays the same, and the gradient lies where the weight does
                        self._starts[name] = _starts(tensor)
                    starts, replica = self._starts[name], _replica(tensor)
                    self._add(trace.key(stage, name), tensor._local_tensor, tensor.shape, starts, replica)
            elif tensor is not None:
                self._add(trace.key(stage, name), tensor, tensor.shape, (0,) * tensor.ndim, self._rank)

    def take(self) -> tuple[list[str], np.ndarray[Any, np.dtype[np.float64]], list[int]]:
        """Events, sketches and replicas since the last call."""
        events = [event for event, _ in self._found]
        replicas = [replica for _, replica in self._found]
        sketches = torch.stack(list(self._found.values())).numpy() if self._found else np.empty((0, 0))
        self._found, self._outputs = {}, []
        return events, sketches, replicas

    def _before(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            tensor = first_floating((args, kwargs))
            if tensor is None or _in_backward():
                return
            event = trace.key(trace.INPUT, self._name(path))
            source = next((name for output, name, _ in self._outputs if output is tensor), None)
            if source is not None:
                self.sources[event] = source
            self._add_activation(event, tensor)

        return hook

    def _after(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if _in_backward():
                return
            name = self._name(path)
            self._calls[path] = self._calls.get(path, 0) + 1
            tensor = first_floating(output)
            if tensor is None:
                return
            event = trace.key(trace.OUTPUT, name)
            # Behind a gathering region, and where a weight's gradient is summed afterwards, every rank has its own
            # part of the gradient's sum.
            partial = isinstance(module, OutputRegion) or module in self._summing
            partial = partial or any(gathered for output, _, gathered in self._outputs if output is tensor)
            self._outputs.append((tensor, event, partial))
            self._add_activation(event, tensor)
            if tensor.requires_grad:
                tensor.register_hook(self._gradient(trace.key(trace.OUTPUT_GRADIENT, name), self._rows, partial))

        return hook

    def _gradient(self, event: str, rows: Rows, partial: bool) -> Any:
        def hook(gradient: Tensor) -> None:
            # FSDP averages over the data ranks, so that locally gradients are too large by their number.
            self._add_activation(event, gradient / self._mesh.data_size, rows=rows, partial=partial)

        return hook

    def _name(self, path: str) -> str:
        call = self._calls.get(path, 0)
        return f"{path}#{call}" if call else path

    def _add_activation(self, event: str, tensor: Tensor, *, rows: Rows | None = None, partial: bool = False) -> None:
        if isinstance(tensor, DTensor):
            return
        mesh, rows = self._mesh, rows or self._rows
        stage, path = trace.split_key(event)
        shape_of = trace.key(trace.OUTPUT, path) if stage == trace.OUTPUT_GRADIENT else event
        if self._learning:
            self.shapes[shape_of] = tuple(tensor.shape)
        whole = self.shapes.get(shape_of, ())
        place = locate(tensor.shape, whole, rows, mesh.data_rank, mesh.tensor_rank, mesh.tensor_size)
        if place is None:
            return
        data_replica = place.data_replica
        if data_replica is not None and stage == trace.OUTPUT_GRADIENT:
            data_replica = None  # what all rows read gets a gradient from each
        replica = (data_replica or 0) * mesh.tensor_size + (0 if partial else place.tensor_replica)
        self._add(event, tensor, whole, place.starts, replica, again=data_replica is None)

    def _add(
        self,
        event: str,
        tensor: Tensor,
        shape: Sequence[int],
        starts: Sequence[int],
        replica: int,
        *,
        again: bool = False,
    ) -> None:
        sketch, entry = self._sketcher(tensor, shape, starts), (event, replica)
        self._found[entry] = self._found[entry] + sketch if again and entry in self._found else sketch


def _observable(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules but those inside compiled ones, where a hook would break the graph."""
    compiled = [path for path, module in model.named_modules() if module._compiled_call_impl is not None]
    return [
        (path, module)
        for path, module in model.named_modules()
        if not any(path == outer or path.startswith(f"{outer}.") for outer in compiled)
    ]


def _in_backward() -> bool:
    """Whether a module is running again for activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def _replica(tensor: DTensor) -> int:
    """A number that ranks have in common if and only if their parts belong to the same copy."""
    coordinate, replica = tensor.device_mesh.get_coordinate(), 0
    assert coordinate is not None
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            replica = replica * tensor.device_mesh.size(axis) + coordinate[axis]
    return replica


def _starts(tensor: DTensor) -> tuple[int, ...]:
    """Global indices of the first element of this rank's part, which is not empty."""
    starts = []
    for dim, size in enumerate(tensor.shape):
        shape = [1] * tensor.ndim
        shape[dim] = size
        indices = torch.arange(size).view(shape).expand(tensor.shape)
        starts.append(int(own_part(indices, tensor)[(0,) * tensor.ndim]))
    return tuple(starts)


def probe_shapes(
    build_model: Callable[[], nn.Module], loss: Callable[..., Tensor], batch: Any
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """The shapes of all activations on one process, without its memory or time; and notes of what failed.

    For a reference that one process cannot run.
    """
    shapes: dict[str, tuple[int, ...]] = {}

    def note(stage: str, path: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            shapes.setdefault(trace.key(stage, path), tuple(tensor.shape))

    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model = build_model()
            if any(parameter.is_meta for parameter in model.parameters()):
                model.to_empty(device="cpu")
            for path, module in _observable(model):
                module.register_forward_pre_hook(
                    lambda module, args, kwargs, path=path: note(trace.INPUT, path, first_floating((args, kwargs))),
                    with_kwargs=True,
                )
                module.register_forward_hook(
                    lambda module, args, output, path=path: note(trace.OUTPUT, path, first_floating(output))
                )
            fake = tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, batch)
            loss(model, fake, None, Layout())
    except Exception as error:  # whatever a user's model cannot do without values
        return {}, [f"activations are not compared: their shapes on one process are unknown ({error})"]
    return shapes, []
