"""RMSNorm (arXiv 1910.07467) over features of which each rank of the tensor axis has its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_tp import regions
from fsdp_tp.layers.canonical import place_split
from fsdp_tp.layers.front import Front, put_in_front
from fsdp_tp.layers.parameter import to_local
from fsdp_tp.layers.split import Split

_LEGAL = (
    "over_heads needs an RMSNorm: x * rsqrt(mean(x^2) + eps) * weight, with one parameter weight (features,), and "
    "eps as variance_epsilon or eps"
)


def check_rms_norm(module: nn.Module, split: Split) -> None:
    """Whether :func:`split_rms_norm` computes what ``module``, still whole, does. No communication.

    Raises:
        ValueError: it has other parameters, no epsilon, or another formula. Of a module on the meta device
            only its name tells.
    """
    kind = type(module).__name__
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if shapes != {"weight": (split.size,)}:
        raise ValueError(f"{kind} has the parameters {shapes}, for {split.size} features; {_LEGAL}")
    if not _has_epsilon(module):
        raise ValueError(f"{kind} has no epsilon; {_LEGAL}")
    weight = module.get_parameter("weight")
    if weight.is_meta:
        if "rmsnorm" not in kind.lower():
            raise ValueError(f"{kind} is on the meta device, so its name must tell that it is an RMSNorm; {_LEGAL}")
        return
    eps = epsilon(module, weight.dtype)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, split.size, generator=generator) + 1  # a norm that subtracts the mean shows
    x[:, 1] *= max(eps, 1e-8) ** 0.5  # where epsilon counts
    x = x.to(weight)
    other = torch.randn(split.size, generator=generator).to(weight)  # initial weights, often ones, would hide much
    with torch.no_grad():
        try:
            theirs = torch.func.functional_call(module, {"weight": other}, (x,))
        except Exception as error:  # whatever the module's forward raises
            raise ValueError(f"{kind} fails on a tensor {tuple(x.shape)}: {error}; {_LEGAL}") from error
        ours = rms_norm(x, other, eps, lambda squares: squares.mean(-1, keepdim=True))
    # A few roundings an element; modules compute in fp32 at most, whatever their dtype.
    bound = 8 * max(torch.finfo(weight.dtype).eps, torch.finfo(torch.float32).eps)
    gap = float((theirs - ours).abs().max() / ours.abs().max()) if theirs.shape == ours.shape else torch.inf
    if not gap <= bound:
        raise ValueError(f"{kind} computes something else (relative gap {gap:.1e}); {_LEGAL}")


def split_rms_norm(module: nn.Module, split: Split, axis: DeviceMesh) -> None:
    """From now on ``module`` norms this rank's features by the mean square of all ranks' features, in place.

    For the query and key norms of models that norm all heads together (OLMo 2). Forward and backward
    all-reduce one number a token.

    Args:
        module: one that :func:`check_rms_norm` accepts.
        split: of the features, as the column-parallel layer before splits its output.
    """
    place_split(module, "weight", split, 0, axis)
    module.__dict__["_split"] = split
    module.__dict__["_shares"] = split.shares(axis.get_local_rank())
    module.__dict__["_tensor_group"] = axis.get_group()
    put_in_front(module, SplitRMSNorm)


def _has_epsilon(module: Any) -> bool:
    """``nn.RMSNorm`` has None where it takes that of the dtype."""
    found = getattr(module, "variance_epsilon", getattr(module, "eps", ""))
    return found is None or isinstance(found, float | int)


def epsilon(module: Any, dtype: torch.dtype) -> float:
    found = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    # nn.RMSNorm computes sixteen bits in fp32, and takes the epsilon of that.
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps if found is None else float(found)


def rms_norm(x: Tensor, weight: Tensor, eps: float, mean: Callable[[Tensor], Tensor]) -> Tensor:
    """``mean``: over the last dim of all ranks, kept with size 1."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (weight * (wide * torch.rsqrt(mean(wide.square()) + eps))).to(x.dtype)


class SplitRMSNorm(Front):
    weight: Tensor
    _split: Split
    _shares: Tensor
    _tensor_group: dist.ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        weight = self._split.local(to_local(self.weight), 0, self._tensor_group)
        return rms_norm(x, weight, epsilon(self, x.dtype), self._mean)

    def _mean(self, squares: Tensor) -> Tensor:
        # Features that several ranks have count once in all.
        own = (squares * self._shares.to(squares)).sum(-1, keepdim=True)
        total = regions.reduce_from_tensor_axis(own, self._tensor_group)
        return regions.copy_to_tensor_axis(total, self._tensor_group) / self._split.size
