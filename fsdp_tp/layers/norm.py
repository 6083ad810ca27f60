"""RMSNorm (arXiv 1910.07467) over features of which each rank of the tensor axis has its part."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_tp import regions
from fsdp_tp.layers.canonical import place_split
from fsdp_tp.layers.front import Front, put_in_front
from fsdp_tp.layers.parameter import to_local
from fsdp_tp.layers.split import Split


def split_rms_norm(module: nn.Module, split: Split, axis: DeviceMesh) -> None:
    """From now on ``module`` norms this rank's features by the mean square of all ranks' features, in place.

    For the query and key norms of models that norm all heads together (OLMo 2). Forward and backward
    all-reduce one number a token.

    Args:
        module: with ``weight (features,)`` and ``variance_epsilon``, as Hugging Face RMSNorms have them.
        split: of the features, as the column-parallel layer before splits its output.
    """
    place_split(module, "weight", split, 0, axis)
    module.__dict__["_split"] = split
    module.__dict__["_shares"] = split.shares(axis.get_local_rank())
    module.__dict__["_tensor_group"] = axis.get_group()
    put_in_front(module, SplitRMSNorm)


class SplitRMSNorm(Front):
    weight: Tensor
    variance_epsilon: float
    _split: Split
    _shares: Tensor
    _tensor_group: dist.ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # Features that several ranks have count once in all.
        squares = (wide.square() * self._shares.to(wide)).sum(-1, keepdim=True)
        total = regions.reduce_from_tensor_axis(squares, self._tensor_group)
        total = regions.copy_to_tensor_axis(total, self._tensor_group)
        normed = wide * torch.rsqrt(total / self._split.size + self.variance_epsilon)
        return (self._split.local(to_local(self.weight), 0, self._tensor_group) * normed).to(x.dtype)
