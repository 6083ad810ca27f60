"""Runs of the reference that differ from it by rounding alone: how far may an equal run be away?"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from fsdp_tp.layers.canonical import arranged_parameters, own_part_of, whole_shape
from fsdp_tp.layers.front import Front, put_in_front
from fsdp_tp.modules import find_blocks
from fsdp_tp.parity.sketch import Sketcher
from fsdp_tp.paths import is_within

# Another stretch of the signs for every tensor and seed; just a prime.
_STRETCH = 7919


@torch.no_grad()
def perturb(model: nn.Module, eps: float, *, seed: int, device: torch.device) -> None:
    """Multiplies every weight by 1 + eps or 1 - eps, the same on every layout.

    After TTrace (arXiv 2506.09280), which takes what a perturbation by one machine epsilon does to a
    tensor for the error that rounding may make in it.
    """
    sketcher = Sketcher(device)
    arranged = arranged_parameters(model)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        shape = whole_shape(parameter, arranged.get(name))
        offset = _STRETCH * (seed + 1) * (number + 1)
        signs = sketcher.signs(offset + shape.numel())[offset:].view(shape)
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
        # To its dtype first: an int8 times a Python float is fp32, where 1 + eps of fp64 is 1.
        local.mul_(1 + eps * own_part_of(signs, parameter, arranged.get(name)).to(local.dtype))


def perturb_output(module: nn.Module, eps: float, *, seed: int) -> None:
    """The same for all that ``module`` returns, whenever it runs."""
    module.register_forward_hook(lambda module, args, output: perturb_tensors(output, eps, seed=seed))


def perturb_tensors(values: Any, eps: float, *, seed: int) -> Any:
    """The same for all floating-point tensors in ``values``, which are not changed."""

    def disturb(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        offset = _STRETCH * (seed + 1)
        signs = Sketcher(value.device).signs(offset + value.numel())[offset:].to(value.dtype)
        return value * (1 + eps * signs.view(value.shape))

    return tree_map(disturb, values)


def reorder_a_sum(model: nn.Module) -> str | None:
    """Lets one linear layer in the middle of ``model`` sum over its input features in another order.

    Returns:
        the layer's path, or None if there is no linear layer.
    """
    blocks = find_blocks(model)
    linears = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    candidates = [path for path in linears if any(is_within(path, block) for block in blocks)] or linears
    if not candidates:
        return None
    path = candidates[len(candidates) // 2]
    put_in_front(model.get_submodule(path), _Reordered)
    return path


class _Reordered(Front):
    """In front of a linear layer, split or not: whatever its forward does around the product stays."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _ReversedFeatures():
            return super().forward(*args, **kwargs)  # type: ignore[misc]


class _ReversedFeatures(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            args = (args[0].flip(-1), args[1].flip(-1), *args[2:])
        return func(*args, **(kwargs or {}))
