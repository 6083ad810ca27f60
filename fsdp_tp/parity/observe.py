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

from fsdp_tp.layers import ColumnParallelLinear, RowParallelLinear
from fsdp_tp.layers.canonical import arranged_parameters, whole_shape
from fsdp_tp.layers.front import OutputRegion
from fsdp_tp.layers.split import Split
from fsdp_tp.locate import Rows, first_floating, locate
from fsdp_tp.mesh import ParallelMesh
from fsdp_tp.parity import trace
from fsdp_tp.parity.layout import Layout
from fsdp_tp.parity.pieces import Piece, pieces_of
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
        self._pieces: dict[str, list[Piece]] = {}
        self._arranged = arranged_parameters(model)
        self._splits = _unusual_splits(model)
        bound = [entry for module in model.modules() for entry in getattr(module, "_bound_parameters", ())]
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
            self._add(event, [(tensor.double(), (0,) * tensor.ndim)], tensor.shape, self._rank)

    def parameters(self, stage: str) -> None:
        """Notes all gradients, or all weights."""
        for name, parameter in self._model.named_parameters():
            tensor = parameter if stage == trace.WEIGHT else parameter.grad
            if isinstance(tensor, DTensor):
                if tensor._local_tensor.numel():
                    if name not in self._pieces:  # stay the same, and the gradient lies where the weight does
                        self._pieces[name] = pieces_of(tensor, self._arranged.get(name))
                    shape = whole_shape(tensor, self._arranged.get(name))
                    pieces = [piece.of(tensor._local_tensor) for piece in self._pieces[name]]
                    self._add(trace.key(stage, name), pieces, shape, _replica(tensor))
            elif tensor is not None:
                self._add(trace.key(stage, name), [(tensor, (0,) * tensor.ndim)], tensor.shape, self._rank)

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
            self._add_activation(event, tensor, self._split_at(path, RowParallelLinear))

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
            # Where a weight's gradient is summed afterwards, every rank has its own part of the output's gradient;
            # behind a gathering region it is whole.
            partial = module in self._summing and not isinstance(module, OutputRegion)
            partial = partial or any(gathered for output, _, gathered in self._outputs if output is tensor)
            self._outputs.append((tensor, event, partial))
            split = self._split_at(path, ColumnParallelLinear)
            self._add_activation(event, tensor, split)
            if tensor.requires_grad:
                gradient = trace.key(trace.OUTPUT_GRADIENT, name)
                tensor.register_hook(self._gradient(gradient, split, self._rows, partial))

        return hook

    def _split_at(self, path: str, kind: type[nn.Module]) -> Split | None:
        """How the features of what the module at ``path`` reads (row) or returns (column) are split, if its shape
        does not tell."""
        module, split = self._splits.get(path, (None, None))
        return split if isinstance(module, kind) else None

    def _gradient(self, event: str, split: Split | None, rows: Rows, partial: bool) -> Any:
        def hook(gradient: Tensor) -> None:
            # FSDP averages over the data ranks, so that locally gradients are too large by their number.
            self._add_activation(event, gradient / self._mesh.data_size, split, rows=rows, partial=partial)

        return hook

    def _name(self, path: str) -> str:
        call = self._calls.get(path, 0)
        return f"{path}#{call}" if call else path

    def _add_activation(
        self, event: str, tensor: Tensor, split: Split | None, *, rows: Rows | None = None, partial: bool = False
    ) -> None:
        if isinstance(tensor, DTensor):
            return
        mesh, rows = self._mesh, rows or self._rows
        stage, path = trace.split_key(event)
        shape_of = trace.key(trace.OUTPUT, path) if stage == trace.OUTPUT_GRADIENT else event
        if self._learning:
            self.shapes[shape_of] = tuple(tensor.shape)
        whole = self.shapes.get(shape_of, ())
        # With a split the shape tells all but where the features lie.
        shape = tensor.shape if split is None else (*tensor.shape[:-1], *whole[-1:])
        place = locate(shape, whole, rows, mesh.data_rank, mesh.tensor_rank, mesh.tensor_size)
        if place is None or (split is None and self._is_among_unusual(path) and tensor.shape[1:] != whole[1:]):
            return
        data_replica, tensor_replica = place.data_replica, place.tensor_replica
        if data_replica is not None and stage == trace.OUTPUT_GRADIENT:
            data_replica = None  # what all rows read gets a gradient from each
        pieces = [(tensor, place.starts)]
        if split is not None:
            tensor_replica = 0
            # Of the same features on several ranks the values count once, the gradients add up.
            once = stage != trace.OUTPUT_GRADIENT
            pieces = [
                (tensor.narrow(-1, first, length), (*place.starts[:-1], start))
                for first, start, length in split.runs(mesh.tensor_rank, once=once)
            ]
        replica = (data_replica or 0) * mesh.tensor_size + (0 if partial else tensor_replica)
        self._add(event, pieces, whole, replica, again=data_replica is None)

    def _is_among_unusual(self, event_path: str) -> bool:
        """Whether a tensor in that module may hold features that are split unusually."""
        path = event_path.partition("#")[0]
        if isinstance(self._model.get_submodule(path), ColumnParallelLinear | RowParallelLinear):
            return False
        rows = [row for row, (module, _) in self._splits.items() if isinstance(module, RowParallelLinear)]
        return any(path.startswith(f"{row.rpartition('.')[0]}.") for row in rows)

    def _add(
        self,
        event: str,
        pieces: Sequence[tuple[Tensor, tuple[int, ...]]],
        shape: Sequence[int],
        replica: int,
        *,
        again: bool = False,
    ) -> None:
        entry = (event, replica)
        for piece, starts in pieces:
            with torch._C._DisableTorchDispatch():  # LiftedCasts is for the operations of the model
                sketch = self._sketcher(piece, shape, starts)
            self._found[entry] = self._found[entry] + sketch if again and entry in self._found else sketch
            again = True


def _unusual_splits(model: nn.Module) -> dict[str, tuple[nn.Module, Split]]:
    return {
        path: (module, module.split)
        for path, module in model.named_modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and not module.split.is_chunked
    }


def _observable(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules but those inside compiled ones, where a hook would break the graph, and inside experts, which
    see tokens in an order of their own."""
    opaque = [
        path
        for path, module in model.named_modules()
        if module._compiled_call_impl is not None or any(p.ndim == 3 for p in module.parameters(recurse=False))
    ]
    return [
        (path, module)
        for path, module in model.named_modules()
        if not any(path.startswith(f"{outer}.") or (path == outer and module._compiled_call_impl) for outer in opaque)
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
