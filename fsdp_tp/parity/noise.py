"""Runs of the reference that differ from it by rounding alone: how far may an equal run be away?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_tp.initialize import own_part
from fsdp_tp.modules import find_blocks
from fsdp_tp.parity.sketch import Sketcher


@torch.no_grad()
def perturb(model: nn.Module, eps: float, *, seed: int, device: torch.device) -> None:
    """Multiplies every weight by 1 + eps or 1 - eps, the same on every layout.

    After TTrace (arXiv 2506.09280), which takes what a perturbation by one machine epsilon does to a
    tensor for the error that rounding may make in it.
    """
    sketcher = Sketcher(device)
    for number, parameter in enumerate(model.parameters()):
        # Another stretch of the signs for every parameter and seed; 7919 is just a prime.
        offset = 7919 * (seed + 1) * (number + 1)
        signs = sketcher.signs(offset + parameter.numel())[offset:].view(parameter.shape)
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
        local.mul_(1 + eps * own_part(signs, parameter))


def perturb_output(module: nn.Module, eps: float, *, seed: int) -> None:
    """The same for what ``module`` returns, whenever it runs."""
    sketcher: Sketcher | None = None

    def disturb(tensor: Tensor) -> Tensor:
        nonlocal sketcher
        sketcher = sketcher or Sketcher(tensor.device)
        signs = sketcher.signs(seed * 7919 + tensor.numel())[seed * 7919 :].view(tensor.shape)
        return tensor * (1 + eps * signs)

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return disturb(output)
        if isinstance(output, tuple) and all(isinstance(each, Tensor) for each in output):
            return tuple(disturb(each) for each in output)
        return output

    module.register_forward_hook(hook)


def reorder_a_sum(model: nn.Module) -> str | None:
    """Lets one linear layer in the middle of ``model`` sum over its input features in another order.

    Returns:
        the layer's path, or None if there is no linear layer.
    """
    blocks = find_blocks(model)
    inside = [path for path, module in model.named_modules() if _is_linear(module) and _is_inside(path, blocks)]
    candidates = inside or [path for path, module in model.named_modules() if _is_linear(module)]
    if not candidates:
        return None
    path = candidates[len(candidates) // 2]

    def hook(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        order = torch.arange(module.in_features - 1, -1, -1, device=output.device)
        weight = module.weight.to(output.dtype)
        bias = None if module.bias is None else module.bias.to(output.dtype)
        return F.linear(args[0].to(output.dtype)[..., order], weight[:, order], bias)

    model.get_submodule(path).register_forward_hook(hook)
    return path


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def _is_inside(path: str, blocks: Iterable[str]) -> bool:
    return any(path.startswith(f"{block}.") for block in blocks)
