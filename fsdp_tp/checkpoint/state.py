"""A model, its optimizer and what else a run needs to go on, as named tensors and JSON values, and back.

Tensors have the names, global shapes and order that they have in one process, whatever the layout.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import _get_fqns, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_tp.checkpoint.chunks import local_of, require_box
from fsdp_tp.checkpoint.files import DTYPES
from fsdp_tp.checkpoint.manifest import Manifest, Stored
from fsdp_tp.checkpoint.values import from_json, to_json
from fsdp_tp.layers.canonical import arrange, arrangement_of, restore, without_values
from fsdp_tp.layers.parameter import from_local
from fsdp_tp.layers.split import Split

OPTIMIZER = "optimizer.state."
"""What names of an optimizer's tensors begin with."""

_OF_THIS_RUN = ("params", "param_names", "fused", "foreach", "capturable", "differentiable")
"""Of an optimizer's group, what a checkpoint does not change: its parameters, and how it computes."""


def model_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Its state dict, tied tensors once, and their further names.

    Raises:
        ValueError: an entry is no tensor, or some rank has no box of it.
    """
    state: dict[str, Any] = get_model_state_dict(model)
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} in the model's state dict is a {type(tensor).__name__}, not a tensor")
        require_box(name, tensor)
    aliases = {}
    for first, *others in _names(model).values():
        aliases.update({other: first for other in others if first in state and other in state})
    return {name: tensor for name, tensor in state.items() if name not in aliases}, aliases


def load_model(model: nn.Module, tensors: dict[str, Tensor], aliases: dict[str, str]) -> None:
    """Takes over what was read into the tensors of :func:`model_state`."""
    whole: dict[str, Any] = {**tensors, **{name: tensors[first] for name, first in aliases.items()}}
    set_model_state_dict(model, whole)


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What it keeps of each parameter, as ``optimizer.state.<parameter>.<key>``; and as JSON values its class, its
    ``groups``, and as ``state`` what it keeps that is no tensor.

    Raises:
        ValueError: it has a parameter that the model has not, a value that cannot be stored, or an entry for every
            stored row of a parameter that is stored in another order, but of another shape.
    """
    names, arranged = own_names(model, optimizer), _arranged(model)
    tensors: dict[str, Tensor] = {}
    others: dict[str, dict[str, Any]] = {}
    for parameter, name in names.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            entry = f"{OPTIMIZER}{name}.{key}"
            if not isinstance(key, str) or "." in key:
                raise ValueError(f"{entry}: the optimizer's key {key!r} must be a string without dots")
            if isinstance(value, Tensor):
                if parameter in arranged:
                    value = _restored(entry, value, parameter, arranged[parameter])
                require_box(entry, value)
                tensors[entry] = value.detach()
            elif value is None or isinstance(value, bool | int | float | str):
                others.setdefault(name, {})[key] = value
            else:
                raise ValueError(
                    f"{entry} is a {type(value).__name__}, which cannot be stored; of an optimizer's state tensors, "
                    "numbers, strings and None can"
                )
    groups = [
        {
            "params": [names[parameter] for parameter in group["params"]],
            **{
                key: to_json(value, f"{key!r} of the optimizer's group {index}")
                for key, value in group.items()
                if key != "params"
            },
        }
        for index, group in enumerate(optimizer.param_groups)
    ]
    return tensors, {"optimizer": type(optimizer).__name__, "groups": groups, "state": others}


def optimizer_targets(model: nn.Module, optimizer: Optimizer, manifest: Manifest) -> dict[str, Tensor]:
    """Memory for what a checkpoint has of the optimizer's parameters, laid out as they are: what the optimizer has of
    them now, where that fits."""
    targets, arranged, stored = {}, _arranged(model), _by_parameter(manifest.tensors)
    for parameter, name in own_names(model, optimizer).items():
        for key, tensor in stored.get(name, {}).items():
            like = optimizer.state.get(parameter, {}).get(key)
            if parameter in arranged:
                with without_values():
                    like = restore(parameter, *arranged[parameter])
            elif not isinstance(like, Tensor) or tuple(like.shape) != tensor.shape:
                like = parameter
            elif like.dtype == DTYPES[tensor.dtype]:
                targets[f"{OPTIMIZER}{name}.{key}"] = like
                continue
            targets[f"{OPTIMIZER}{name}.{key}"] = _memory(tensor, like, _device_of_scalars(parameter, optimizer))
    return targets


def load_optimizer(
    model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor], values: Mapping[str, Any]
) -> None:
    """Replaces the optimizer's state by what was read into :func:`optimizer_targets`, and by ``values``. A parameter of
    which the checkpoint has nothing (it was frozen, or never had a gradient) has no state then either."""
    arranged = _arranged(model)
    names = own_names(model, optimizer)
    read = _by_parameter(tensors)
    for parameter, name in names.items():
        state = read.get(name, {})
        if parameter in arranged:
            for key, value in state.items():
                if isinstance(value, DTensor):
                    state[key] = arrange(value, *arranged[parameter], parameter)
        state.update(values["state"].get(name, {}))
        optimizer.state.pop(parameter, None)
        if state:
            optimizer.state[parameter] = state
    for group, saved in zip(optimizer.param_groups, saved_groups(names, optimizer, values["groups"]), strict=True):
        for key, value in settings_of(saved[0] if saved else {}).items():
            read_value = from_json(value)
            group[key] = _as_before(read_value, group[key]) if key in group else read_value


def saved_groups(names: dict[Tensor, str], optimizer: Optimizer, groups: list[Any]) -> list[list[dict[str, Any]]]:
    """For every group of ``optimizer`` those of a checkpoint that have parameters of it. For one without parameters,
    that without parameters at the same place, if there is one."""
    of_name = {name: group for group in groups for name in group["params"]}
    found = []
    for index, group in enumerate(optimizer.param_groups):
        same = {id(its): its for parameter in group["params"] if (its := of_name.get(names[parameter])) is not None}
        if not group["params"] and index < len(groups) and not groups[index]["params"]:
            same = {index: groups[index]}
        found.append(list(same.values()))
    return found


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Of a stored group, what :func:`load_optimizer` takes over."""
    return {key: value for key, value in group.items() if key not in _OF_THIS_RUN}


def random_state() -> str:
    """Of this rank's generators: the CPU's, and the current accelerator's."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return ",".join(base64.b64encode(state.numpy().tobytes()).decode() for state in states)


def set_random_state(text: str) -> None:
    states = [torch.frombuffer(bytearray(base64.b64decode(each)), dtype=torch.uint8) for each in text.split(",")]
    torch.set_rng_state(states[0])
    if torch.cuda.is_available() and len(states) > 1:
        torch.cuda.set_rng_state(states[1])


def describe_layout(tensors: dict[str, Tensor]) -> str:
    """Of the ranks that hold these tensors, for humans."""
    meshes = [tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor)]
    ranks = f"{dist.get_world_size() if dist.is_initialized() else 1} rank(s)"
    if not meshes:
        return ranks
    mesh = max(meshes, key=lambda each: each.ndim)
    axes = zip(mesh.mesh_dim_names or map(str, range(mesh.ndim)), mesh.shape, strict=True)
    return f"{ranks}: {' x '.join(f'{name} {size}' for name, size in axes)}"


def _names(model: nn.Module) -> dict[Tensor, list[str]]:
    """All names of each parameter, as ``get_model_state_dict`` has them: without those of wrappers around modules."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).extend(_get_fqns(model, name))
    return names


def _arranged(model: nn.Module) -> dict[Tensor, tuple[Split, int]]:
    """How the parameters that are stored in another order are."""
    return {
        parameter: arrangement
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and (arrangement := arrangement_of(module, name)) is not None
    }


def own_names(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    """Of the optimizer's parameters. Raises ValueError for one that the model has not."""
    names, found = _names(model), {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model has not; build "
                    "the optimizer after fsdp_tp.wrap or fully_shard"
                )
            found[parameter] = names[parameter][0]
    return found


def _by_parameter(entries: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Those of an optimizer, as parameter -> key -> what is there. Names of parameters have dots, keys have none."""
    found: dict[str, dict[str, Any]] = {}
    for entry, value in entries.items():
        if entry.startswith(OPTIMIZER):
            name, _, key = entry.removeprefix(OPTIMIZER).rpartition(".")
            found.setdefault(name, {})[key] = value
    return found


def _memory(stored: Stored, like: Tensor, device_of_others: torch.device) -> Tensor:
    """Uninitialised, for a stored tensor; laid out as ``like`` if it has that shape."""
    dtype = DTYPES[stored.dtype]
    if tuple(like.shape) != stored.shape:
        return torch.empty(stored.shape, dtype=dtype, device=device_of_others)
    if not isinstance(like, DTensor):
        return torch.empty(stored.shape, dtype=dtype, device=like.device)
    local = torch.empty_like(local_of(like), dtype=dtype)
    return from_local(local, like.device_mesh, like.placements, torch.empty(like.shape, device="meta"))


def _device_of_scalars(parameter: Tensor, optimizer: Optimizer) -> torch.device:
    """torch's optimizers count steps on the CPU, unless the count is used on the device."""
    (group,) = (group for group in optimizer.param_groups if any(parameter is each for each in group["params"]))
    on_device = group.get("capturable") or group.get("fused")
    return parameter.device if on_device else torch.device("cpu")


def _restored(entry: str, value: Tensor, parameter: Tensor, arrangement: Any) -> Tensor:
    split, dim = arrangement
    if value.shape == parameter.shape:
        return restore(value, split, dim)
    if parameter.shape[dim] in value.shape:
        raise ValueError(
            f"{entry} has the shape {tuple(value.shape)}, its parameter has {tuple(parameter.shape)} and is stored in "
            f"another order along dim={dim}: of the optimizer's state only tensors of the parameter's own shape, or "
            "without that dim, can be saved and loaded in any layout (factored state cannot)"
        )
    return value


def _as_before(value: Any, before: Any) -> Any:
    """A value of a group in the type that it has there; a tensor stays the same one."""
    if isinstance(before, Tensor):
        before.detach().copy_(torch.as_tensor(value))
        return before
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(before, tuple) and isinstance(value, list | tuple) and len(value) == len(before):
        return tuple(_as_before(*both) for both in zip(value, before, strict=True))
    return value
