"""SPMD types of tensors on the tensor axis, followed through a forward by ``spmd_types``.

``spmd_types`` types every torch operation. This module adds what it cannot know: the types of
our regions and of functional collectives, and that the product with a weight split along its
input features is a partial sum. A violation is reported and the forward goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fsdp_tp import regions
from fsdp_tp.layers import linear_loss, loss

INVARIANT, REPLICATE, VARYING, PARTIAL = NAMES = ("invariant", "replicate", "varying", "partial")

REGIONS: dict[Any, tuple[str, str, str]] = {
    regions._Copy: ("copy_to_tensor_axis", INVARIANT, REPLICATE),
    regions._Reduce: ("reduce_from_tensor_axis", PARTIAL, INVARIANT),
    regions._Split: ("split_to_tensor_axis", INVARIANT, VARYING),
    regions._Gather: ("gather_from_tensor_axis", VARYING, INVARIANT),
    regions._GatherSequence: ("gather_sequence", VARYING, REPLICATE),
    regions._ReduceScatterSequence: ("reduce_scatter_sequence", PARTIAL, VARYING),
    regions._SumGradients: ("sum_gradients", INVARIANT, REPLICATE),
    regions._GatherWeight: ("gather_weight", VARYING, REPLICATE),
    loss._VocabParallelCrossEntropy: ("vocab_parallel_cross_entropy", VARYING, INVARIANT),
    linear_loss._VocabParallelLinearCrossEntropy: ("vocab_parallel_linear_cross_entropy", INVARIANT, INVARIANT),
}
"""Each autograd function: the region's name, the type it takes and the type it gives."""

_LOSSES = (loss._VocabParallelCrossEntropy, linear_loss._VocabParallelLinearCrossEntropy)

_ops = torch.ops._c10d_functional
_COLLECTIVES: dict[Any, tuple[str, str]] = {
    _ops.all_reduce: (PARTIAL, INVARIANT),
    _ops.all_gather_into_tensor: (VARYING, INVARIANT),
    _ops.reduce_scatter_tensor: (PARTIAL, VARYING),
}
# Linear up to rounding; spmd_types holds them for nonlinear.
_KEEP_PARTIAL = {
    torch.Tensor.to,
    torch.Tensor.float,
    torch.Tensor.double,
    torch.Tensor.half,
    torch.Tensor.bfloat16,
    torch.Tensor.__getitem__,
}

Report = Callable[[str, str], None]
"""Called with an operation and what is wrong with it."""


def require_spmd_types() -> None:
    """Looks for the optional package.

    Raises:
        ValueError: it is missing; the message says what to install.
    """
    try:
        import spmd_types  # noqa: F401
    except ImportError:
        raise ValueError("the static check needs the package spmd_types: pip install spmd_types") from None


@contextmanager
def typed(group: dist.ProcessGroup, report: Report) -> Iterator[Types]:
    """Follows the types of all tensors on the axis of ``group`` and reports violations."""
    import spmd_types as spmd
    from spmd_types.checker import typecheck

    types = Types(group, report)
    with spmd.set_current_mesh({"tensor": types.axis}), typecheck(), types:
        yield types


class Types(TorchFunctionMode):
    """The mode in front of ``spmd_types``' own."""

    def __init__(self, group: dist.ProcessGroup, report: Report) -> None:
        import spmd_types as spmd

        super().__init__()
        self.axis = spmd.normalize_axis(group)
        self._group_name = group.group_name
        self._report = report
        self._letters = dict(zip(NAMES, (spmd.I, spmd.R, spmd.V, spmd.P), strict=True))
        self._names = {letter: name for name, letter in self._letters.items()}
        self._split_inputs: dict[int, Tensor] = {}  # weights split along their input features; kept alive for the id

    def get(self, x: Tensor) -> str | None:
        """The type of ``x``, or None where nothing is known of it."""
        from spmd_types import maybe_get_axis_local_type

        letter = maybe_get_axis_local_type(x, self.axis)
        return None if letter is None else self._names[letter]

    def set(self, value: Any, name: str) -> None:
        """Gives a type to all tensors in ``value`` that have none."""
        from spmd_types import assert_type

        for x in _tensors(value):
            if self.get(x) is None:
                assert_type(x, {self.axis: self._letters[name]})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from spmd_types import SpmdTypeError

        kwargs = kwargs or {}
        # Before the call: an operation in place changes the type of its operand.
        operands = _tensors((args, kwargs))
        found = [self.get(x) for x in operands]
        described = ", ".join(f"{name or 'untyped'} {list(x.shape)}" for name, x in zip(found, operands, strict=True))
        operation = f"{_name(func)}({described})"
        try:
            return self._call(func, args, kwargs)
        except SpmdTypeError as error:
            self._report(operation, _explain(found, str(error.args[0])))
            recovered = next((name for name in (VARYING, INVARIANT, REPLICATE) if name in found), INVARIANT)
            return self._known(func, args, kwargs, operation, (), (), recovered)
        except RuntimeError as error:
            if VARYING in found or PARTIAL in found:  # shapes that do not fit for want of a collective
                self._report(operation, str(error))
            raise

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        from spmd_types import SpmdTypeError, register_local_autograd_function

        function = _autograd_function(func)
        if function in REGIONS:
            name, takes, gives = REGIONS[function]
            operands = args[:1] if function in _LOSSES else args
            return self._known(func, args, kwargs, name, operands, (takes,), gives)
        if func in _COLLECTIVES and args[-1] == self._group_name:
            takes, gives = _COLLECTIVES[func]
            legal = NAMES if args[1] in ("max", "min") else (takes,)
            return self._known(func, args, kwargs, _name(func), args, legal, gives)
        pads_with_zeros = func is F.pad and kwargs == {"mode": "constant", "value": None}
        keeps_partial = func in _KEEP_PARTIAL or pads_with_zeros
        if func is _ops.wait_tensor or (keeps_partial and self.get(args[0]) == PARTIAL):
            return self._known(func, args, kwargs, _name(func), (), (), self.get(args[0]) or INVARIANT)
        if func is F.linear and id(args[1] if len(args) > 1 else kwargs.get("weight")) in self._split_inputs:
            if (len(args) > 2 and args[2] is not None) or kwargs.get("bias") is not None:
                self._report("linear", "the bias is added on every rank, before the sum over the tensor axis")
            return self._known(func, args, kwargs, "linear", args[:1], (VARYING,), PARTIAL)
        if function is not None:
            func = function.apply  # enters spmd_types' mode, which func itself would pass by
        try:
            result = func(*args, **kwargs)
        except SpmdTypeError as error:
            if function is None or "not registered" not in str(error):
                raise
            # A function of the user's own is taken for one that works on what a rank has, without collectives.
            register_local_autograd_function(function)
            result = func(*args, **kwargs)
        if function is not None and args and isinstance(args[0], DTensor) and _is_split_by_input(args[0]):
            self._split_inputs[id(result)] = result
        return result

    def _known(
        self, func: Any, args: Any, kwargs: Any, name: str, operands: Any, takes: tuple[str, ...], gives: str
    ) -> Any:
        """Calls ``func``, whose types are known, without ``spmd_types``."""
        from spmd_types import no_typecheck

        for x in _tensors(operands):
            found = self.get(x)
            if not any(_fits(found, wanted, x.requires_grad) for wanted in takes):
                self._report(name, f"takes a value that is {' or '.join(takes)}, but this one is {found or 'untyped'}")
        with no_typecheck():
            result = func(*args, **kwargs)
        self.set(result, gives)
        return result


def _fits(found: str | None, wanted: str, requires_grad: bool) -> bool:
    # A slice may be summed, as each rank's term. Invariant and replicate differ in their gradients only.
    return (
        found == wanted
        or (found, wanted) == (VARYING, PARTIAL)
        or (not requires_grad and {found, wanted} == {INVARIANT, REPLICATE})
    )


def _explain(found: list[str | None], otherwise: str) -> str:
    if PARTIAL in found:
        return "a partial sum is used before it is summed over the tensor axis"
    if INVARIANT in found and (VARYING in found or REPLICATE in found):
        return (
            "an invariant value meets one that is not: its gradient would differ between ranks, or count several "
            "times. Either it misses copy_to_tensor_axis, gather_sequence or sum_gradients, or the other misses its sum"
        )
    return otherwise.partition("\n")[0]


def _is_split_by_input(weight: DTensor) -> bool:
    return any(isinstance(placement, Shard) and placement.dim == 1 for placement in weight.placements)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)]


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _autograd_function(func: Any) -> Any:
    """The class C if ``func`` is ``C.apply``."""
    owner = getattr(func, "__self__", None)
    is_function = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    return owner if is_function and _name(func) == "apply" else None
