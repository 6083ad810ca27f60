"""State dicts of weights that are stored in another order than they have in one process.

Such a parameter (:mod:`fsdp_tp.layers.split`) leaves a state dict, and enters through one, as the DTensor that
it would be if it were stored as it is: global shape, order and name of the plain model, no padding. Making
it gathers this one parameter; every rank must join, as for every sharded state dict. A state dict that is to be
loaded into needs no values (:func:`without_values`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_tp.layers.parameter import from_local, own_part, own_slices, place_parameter
from fsdp_tp.layers.split import ZERO, Split
from fsdp_tp.paths import join_path

_WITHOUT_VALUES = ContextVar("without_values", default=False)


def place_split(module: nn.Module, name: str, split: Split, dim: int, axis: DeviceMesh) -> None:
    """Replaces the whole parameter ``name`` of ``module`` by this rank's part."""
    parameter = module._parameters[name]
    assert parameter is not None
    arranged = nn.Parameter(split.arrange(parameter.detach(), dim), requires_grad=parameter.requires_grad)
    module._parameters[name] = place_parameter(arranged, Shard(dim), axis)
    if split.is_stored_as_is or axis.size() == 1:
        return
    if "_arranged" not in module.__dict__:
        module.__dict__["_arranged"] = {}
        module._register_state_dict_hook(_restore_in_state_dict)
        module.register_load_state_dict_pre_hook(_arrange_in_state_dict)
    module.__dict__["_arranged"][name] = (split, dim)


def arrangement_of(module: nn.Module, name: str) -> tuple[Split, int] | None:
    """How the parameter ``name`` is stored, and along which dim, where that is not as it is."""
    found: tuple[Split, int] | None = getattr(module, "_arranged", {}).get(name)
    return found


def arranged_parameters(model: nn.Module) -> dict[str, tuple[Split, int]]:
    """All such parameters of ``model``, under every name that they have."""
    return {
        join_path(path, name): arrangement
        for path, module in model.named_modules(remove_duplicate=False)
        for name, arrangement in getattr(module, "_arranged", {}).items()
    }


def own_part_of(whole: Tensor, parameter: Tensor, arrangement: tuple[Split, int] | None) -> Tensor:
    """This rank's part of ``whole``, a tensor as one process would have for ``parameter``. No communication.

    Reads and copies no other rows of ``whole``; where it is stored as it is, the part is a view.
    """
    return stored_part(whole, own_slices(parameter), arrangement)


def stored_part(whole: Tensor, slices: Sequence[slice], arrangement: tuple[Split, int] | None) -> Tensor:
    """Of ``whole`` as it is stored, which may be in another order, the part at ``slices``."""
    if arrangement is None:
        return whole[tuple(slices)]
    split, dim = arrangement
    others = [slice(None) if each == dim else part for each, part in enumerate(slices)]
    return split.arrange(whole[tuple(others)], dim, slices[dim])


def put_stored_part(
    whole: Tensor, slices: Sequence[slice], part: Tensor, arrangement: tuple[Split, int] | None
) -> None:
    """The inverse of :func:`stored_part`: writes ``part`` to where its rows are in ``whole``."""
    if arrangement is None:
        whole[tuple(slices)].copy_(part)
        return
    split, dim = arrangement
    rows = split.stored[slices[dim]].to(whole.device)
    if (is_zero := rows == ZERO).any():
        part, rows = part.index_select(dim, (~is_zero).nonzero().flatten()), rows[~is_zero]
    others = [slice(None) if each == dim else its for each, its in enumerate(slices)]
    whole[tuple(others)].index_copy_(dim, rows, part)


def whole_shape(parameter: Tensor, arrangement: tuple[Split, int] | None) -> torch.Size:
    """The shape that ``parameter`` has in one process."""
    if arrangement is None:
        return parameter.shape
    split, dim = arrangement
    return torch.Size([split.size if each == dim else size for each, size in enumerate(parameter.shape)])


def restore(stored: Tensor, split: Split, dim: int) -> Tensor:
    """A parameter, gradient or optimizer state as one process would have it, sharded the same way."""
    if not isinstance(stored, DTensor):
        return split.restore(stored, dim)
    if stored.is_meta or _WITHOUT_VALUES.get():
        whole = torch.empty(whole_shape(stored, (split, dim)), dtype=stored.dtype, device="meta")
        local = torch.empty_like(own_part(whole, stored), device=stored.device)
        return from_local(local, stored.device_mesh, stored.placements, whole)
    return _distribute(split.restore(_whole(stored), dim), stored)


@contextmanager
def without_values() -> Iterator[None]:
    """While entered, :func:`restore` gives memory of the right shape, with no values and no communication."""
    token = _WITHOUT_VALUES.set(True)
    try:
        yield
    finally:
        _WITHOUT_VALUES.reset(token)


def arrange(whole: Tensor, split: Split, dim: int, like: Tensor) -> Tensor:
    """The inverse of :func:`restore`; ``whole`` may be sharded or plain."""
    arranged = split.arrange(_whole(whole) if isinstance(whole, DTensor) else whole, dim)
    return _distribute(arranged, like) if isinstance(like, DTensor) else arranged


def _whole(tensor: DTensor) -> Tensor:
    mesh = tensor.device_mesh
    moved: Any = tensor if tensor.device.type == mesh.device_type else tensor.to(mesh.device_type)  # offloaded
    whole: Tensor = moved.detach().full_tensor().to(tensor.device)
    return whole


def _distribute(whole: Tensor, like: DTensor) -> DTensor:
    return from_local(own_part(whole, like).clone(), like.device_mesh, like.placements, whole)


def accept_whole_tensors(model: nn.Module) -> None:
    """From now on ``model.load_state_dict`` takes plain whole tensors too, the same on all ranks, in any layout.

    torch's ``set_model_state_dict(full_state_dict=True)`` cannot distribute uneven parts under FSDP (2.13).
    """

    def distribute(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        arranged = arranged_parameters(module)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            whole: Any = state_dict.get(prefix + name)
            is_plain = isinstance(whole, Tensor) and not isinstance(whole, DTensor)
            if isinstance(parameter, DTensor) and is_plain and whole.shape == parameter.shape and name not in arranged:
                state_dict[prefix + name] = _distribute(whole, parameter)

    model.register_load_state_dict_pre_hook(distribute)


def _restore_in_state_dict(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name, (split, dim) in module._arranged.items():
        if (stored := state_dict.get(prefix + name)) is not None:
            state_dict[prefix + name] = restore(stored, split, dim)


def _arrange_in_state_dict(module: Any, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    for name, (split, dim) in module._arranged.items():
        whole, parameter = state_dict.get(prefix + name), module._parameters[name]
        if whole is None:
            continue
        expected = whole_shape(parameter, (split, dim))
        if whole.shape != expected:
            raise ValueError(
                f"{prefix}{name} has the shape {tuple(whole.shape)} in the state dict, not {tuple(expected)}"
            )
        state_dict[prefix + name] = arrange(whole, split, dim, parameter)
