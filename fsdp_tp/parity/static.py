"""Level 0 of the parity tool: does every value wait for the sums it must wait for?

No ranks run. Torch's fake process group stands in for a world of any size, one forward
passes through rank 0's part of the model, and every operation is checked for the SPMD types
of its operands on the tensor axis (the table in :mod:`fsdp_tp.regions`). Types say what
happens to gradients too, so no backward has to run: a value that is used as a replicate one
gets a partial gradient, and an invariant one must not be used so.

Not seen: a sum over a dim that is split (a norm over this rank's features only); wrong values
of the right type (another rank's slice, a wrong factor, dropout masks that differ); what only
other ranks than rank 0 do; a nonlinear function before the sum of a product that is not written
as ``F.linear``; and every axis but tensor: FSDP is not applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_map_only

import fsdp_tp
from fsdp_tp import regions
from fsdp_tp.borders import OwnHeads
from fsdp_tp.layers import linear_loss, loss
from fsdp_tp.layers.split import Split
from fsdp_tp.mesh import ParallelMesh
from fsdp_tp.parity.spmd import INVARIANT, PARTIAL, REGIONS, REPLICATE, VARYING, Types, require_spmd_types, typed

Step = Callable[[nn.Module, Any, ParallelMesh], Tensor]


@dataclass(frozen=True)
class Finding:
    """One violation: in the forward of which module, at which operation, and what is wrong."""

    module: str
    operation: str
    message: str

    def __str__(self) -> str:
        return f"{self.module or '(model)'}: {self.operation}: {self.message}"


def check(
    build_model: Callable[[], nn.Module],
    batch: Any,
    step: Step,
    *,
    world_size: int,
    tensor_parallel_degree: int,
    hybrid_shard_degree: int = 0,
    plan: str | Mapping[str, str] = "auto",
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
) -> list[Finding]:
    """Splits a model as in a world of ``world_size`` ranks and type-checks one forward and loss.

    Args:
        build_model: makes the model, on the CPU or, whatever its size, on the meta device.
        batch: tensors in any nesting, the same on all ranks of the tensor axis.
        step: ``step(model, batch, mesh)`` computes the loss.
        world_size, tensor_parallel_degree, hybrid_shard_degree: the world to check for.
        plan, sequence_parallel, loss_parallel: as in :func:`fsdp_tp.parallelize`.

    Returns:
        At most one finding a module: what follows in it may be a consequence of the first.

    Raises:
        ValueError: ``spmd_types`` is missing, a process group exists already, the tensor axis
            has one rank, or what :func:`fsdp_tp.parallelize` raises.
    """
    if tensor_parallel_degree == 1:
        raise ValueError("tensor_parallel_degree=1 leaves nothing to check")
    with _fake_world(world_size, tensor_parallel_degree, hybrid_shard_degree) as mesh:
        model = build_model()
        model = fsdp_tp.parallelize(
            model, mesh, plan=plan, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel
        )
        _forget_first_inputs(model)
        found: dict[str, Finding] = {}
        with _current_module(model) as current:

            def report(operation: str, message: str) -> None:
                found.setdefault(current[-1], Finding(current[-1], operation, message))

            device = next(model.parameters()).device
            batch = tree_map_only(Tensor, lambda x: x.clone().to(device), batch)  # types stick to a tensor
            with typed(mesh.tensor.get_group(), report) as types:
                # An integer or a buffer has no gradient: invariant then stands for replicate too.
                types.set([batch, list(model.buffers())], INVARIANT)
                types.set(_own_constants(model), VARYING)
                try:
                    value = step(model, batch, mesh)
                except RuntimeError:
                    if not found:
                        raise
                else:
                    if types.get(value) != INVARIANT:
                        report("loss", f"must be {INVARIANT} to be differentiated, but is {types.get(value)}")
        return list(found.values())


def _own_constants(model: nn.Module) -> list[Tensor]:
    """Indices and factors that our layers hold for their rank."""
    constants: list[Tensor] = []
    for module in model.modules():
        for value in vars(module).values():
            constants += value.places if isinstance(value, Split) else [value] if isinstance(value, Tensor) else []
        regions_in_front = [region for *_, region in vars(module).get("_argument_regions", ())]
        constants += [region.own for region in regions_in_front if isinstance(region, OwnHeads)]
        constants += [
            index for entry in vars(module).get("_bound_parameters", ()) if entry.split for index in entry.split.places
        ]
    return constants


def check_regions(*, world_size: int = 2, tensor_parallel_degree: int = 2) -> list[Finding]:
    """Type-checks what every region does in its forward and backward against what it declares.

    The whole-model check trusts the declarations; this one reads the collectives.
    """
    found: list[Finding] = []
    with _fake_world(world_size, tensor_parallel_degree, 0) as mesh:
        group = mesh.tensor.get_group()
        for function, (name, takes, gives) in REGIONS.items():

            def report(operation: str, message: str, name: str = name) -> None:
                found.append(Finding(name, operation, message))

            for length in (2 * group.size(), 2 * group.size() - 1):  # the last rank has as much, or less
                with torch.no_grad(), typed(group, report) as types:
                    _check_region(function, takes, gives, length, group, types, report)
    return found


_SAME_VALUE = {REPLICATE: INVARIANT}
_GRADIENT = {INVARIANT: INVARIANT, REPLICATE: PARTIAL, VARYING: VARYING, PARTIAL: INVARIANT}


def _check_region(
    function: Any,
    takes: str,
    gives: str,
    length: int,
    group: dist.ProcessGroup,
    types: Types,
    report: Callable[[str, str], None],
) -> None:
    context = SimpleNamespace()
    context.save_for_backward = lambda *tensors: setattr(context, "saved_tensors", tensors)
    x = torch.empty(2, 2 if takes == VARYING else length, 4)  # not ones: those would be typed already, as replicate
    types.set(x, takes)
    rank: Any = _TypedRank(group, types)
    y: Any
    if function is regions._SumGradients:
        y = function.forward(context, rank, x)
    elif function is loss._VocabParallelCrossEntropy:
        target = torch.zeros(x.shape[:-1], dtype=torch.int64)
        types.set(target, INVARIANT)
        y = function.forward(context, x, target, None, -100, 0.1, None, rank)
    elif function is linear_loss._VocabParallelLinearCrossEntropy:
        weight, target = torch.empty(8, 4), torch.zeros(x.shape[:-1], dtype=torch.int64)
        types.set(weight, VARYING)
        types.set(target, INVARIANT)
        context.needs_input_grad = (True, True, False)
        y = function.forward(context, x, weight, None, target, None, 8, -100, 0.1, None, rank)
    elif function in (regions._Copy, regions._Reduce):
        y = function.forward(context, x, rank)
    elif function in (regions._Gather, regions._GatherSequence, regions._GatherWeight):
        y = function.forward(context, x, 1, length, rank)
    else:
        y = function.forward(context, x, 1, rank)
    y = y[0] if isinstance(y, tuple) else y
    _expect(types.get(y), _SAME_VALUE.get(gives, gives), "forward", report)
    gradient = torch.empty(y.shape)
    types.set(gradient, _GRADIENT[gives])
    gradients = [g for g in function.backward(context, gradient) if g is not None]
    _expect(types.get(gradients[0]), _GRADIENT[takes], "backward", report)


def _expect(found: str | None, wanted: str, where: str, report: Callable[[str, str], None]) -> None:
    found = None if found is None else _SAME_VALUE.get(found, found)
    if found != wanted:
        report(where, f"gives a value that is {found or 'untyped'}, but must be {wanted}")


class _TypedRank:
    """A group whose rank is known to differ between ranks."""

    def __init__(self, group: dist.ProcessGroup, types: Types) -> None:
        self._group, self._types = group, types
        self.group_name = group.group_name
        self.size = group.size
        self._get_backend_name = group._get_backend_name

    def rank(self) -> Any:
        import spmd_types as spmd

        return spmd.Scalar(self._group.rank(), {self._types.axis: spmd.V})


@contextmanager
def _fake_world(world_size: int, tensor: int, hybrid_shard: int) -> Iterator[ParallelMesh]:
    """A mesh of ``world_size`` ranks of which only this one, rank 0, exists: collectives do nothing."""
    require_spmd_types()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("the static check makes a world of its own: call it where no process group exists")
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield fsdp_tp.init_mesh(tensor_parallel_degree=tensor, hybrid_shard_degree=hybrid_shard, device_type="cpu")
    finally:
        dist.destroy_process_group()


@contextmanager
def _current_module(model: nn.Module) -> Iterator[list[str]]:
    """A list whose last entry is the path of the module that is in its forward."""
    paths = {module: path for path, module in model.named_modules()}
    current = [""]

    def enter(module: nn.Module, args: Any) -> None:
        current.append(paths.get(module, current[-1]))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        current.pop()

    handles = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield current
    finally:
        for handle in handles:
            handle.remove()


def _forget_first_inputs(model: nn.Module) -> None:
    """Takes back the comparison of the first inputs: nobody is there to compare with, and it reads values."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook.__module__ == "fsdp_tp.inputs":
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)
