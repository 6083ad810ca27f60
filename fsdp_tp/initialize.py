"""From the meta device to initial weights that do not depend on the layout.

Every module draws its whole weights from a generator seeded by (seed, module path), and
each rank keeps its part. One process and a thousand ranks get the same global weights, and
no rank ever holds more than one module whole.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_tp.layers.canonical import arrangement_of, own_part_of, whole_shape
from fsdp_tp.paths import is_within, join_path

_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_UNSET = (
    "{} is not initialised: neither a Hugging Face _init_weights nor a reset_parameters() or init_weights() method of "
    "its module ({}) sets it; define one"
)
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_checkpoint_wrapped_module|_orig_mod)\.?")


def materialize(model: nn.Module, device: torch.device) -> None:
    """Gives every meta parameter and buffer of ``model`` memory on ``device``.

    Unlike ``nn.Module.to_empty`` it keeps tied weights tied and leaves alone what is not on
    the meta device. Buffers are filled with a mark (:func:`is_unset`), so that
    :func:`initialize` notices what nobody initialised.
    """
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    empty: Tensor = torch.empty_like(tensor, device=device)
                    if isinstance(tensor, nn.Parameter):
                        empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                    else:
                        _mark_unset(empty)
                    made[id(tensor)] = empty
                table[name] = made[id(tensor)]  # type: ignore[assignment]


@torch.no_grad()
def initialize(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Draws new initial weights for the whole of ``model``, in place, and returns it.

    Call it on one process, on a tensor-parallel or on a fully sharded model: the same seed
    gives the same global weights, bit for bit, on one kind of device. The parameters that a
    module itself owns are initialised by its Hugging Face model's ``_init_weights``, or else by
    its own ``reset_parameters`` or ``init_weights``, on whole plain tensors; tied ones by the
    first module that has them. Needs no communication.

    Args:
        model: with real (not meta) parameters; see :func:`materialize`.
        seed: of all random numbers.

    Raises:
        ValueError: a module has parameters of its own and no way to initialise them, or its
            initialiser leaves parameters, or buffers that were on meta, unset; the message names it.
    """
    done: set[int] = set()
    hugging_face = {path: module for path, module in model.named_modules() if hasattr(module, "_init_weights")}
    for path, module in model.named_modules():
        own = {
            name: parameter
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) not in done
        }
        if not own and not module._buffers:
            continue
        done.update(id(parameter) for parameter in own.values())
        initializer = _initializer(module, path, hugging_face)
        if initializer is not None:
            _initialize_module(module, path, own, initializer, seed)
        unset = [name for name, buffer in module._buffers.items() if buffer is not None and is_unset(buffer)]
        if unset or (own and initializer is None):
            raise ValueError(_UNSET.format(join_path(path, [*own, *unset][0]), type(module).__name__))
    return model


def _initialize_module(module: nn.Module, path: str, own: dict[str, nn.Parameter], initializer: Any, seed: int) -> None:
    device = next((parameter.device for parameter in own.values()), torch.device("cpu"))
    tables = dict(module._parameters)
    whole = {  # also of what is tied to an earlier module's and stays: the initialiser must not write to that
        name: nn.Parameter(
            _mark_unset(
                torch.empty(whole_shape(parameter, arrangement_of(module, name)), dtype=parameter.dtype, device=device)
            )
        )
        for name, parameter in tables.items()
        if parameter is not None
    }
    devices = [device] if device.type != "cpu" else []
    try:
        module._parameters.update(whole)
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            # On a CPU only its generator: torch.manual_seed would reach devices that are not forked.
            (torch.manual_seed if devices else torch.default_generator.manual_seed)(_seed_of(path, seed))
            initializer()
    finally:
        module._parameters.update(tables)
    for name, parameter in own.items():
        if is_unset(whole[name]):
            raise ValueError(_UNSET.format(join_path(path, name), type(module).__name__))
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
        local.copy_(own_part_of(whole[name].data, parameter, arrangement_of(module, name)))


def _initializer(module: nn.Module, path: str, hugging_face: dict[str, nn.Module]) -> Any:
    owners = [owner for owner in hugging_face if is_within(path, owner)]
    if owners:
        init_weights: Any = hugging_face[max(owners, key=len)]._init_weights
        return lambda: init_weights(module)
    for name in ("reset_parameters", "init_weights"):
        if callable(method := getattr(module, name, None)):
            return method
    return None


def _mark_unset(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(torch.iinfo(tensor.dtype).min) if tensor.dtype in _SIGNED else tensor


def is_unset(tensor: Tensor) -> bool:
    """Whether ``tensor`` still holds the mark of memory that nobody wrote: nan, or the lowest integer."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.dtype in _SIGNED and bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _seed_of(path: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}/{_WRAPPERS.sub('', path).rstrip('.')}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
