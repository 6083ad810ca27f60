"""If these fail, look in fsdp_tp/layers/norm.py."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import fsdp_tp
from fsdp_tp.layers.norm import check_rms_norm
from fsdp_tp.layers.split import Split
from tests.ranks import run

WIDTH = 10


class _HuggingFaceRMSNorm(nn.Module):
    """Multiplies in the input's dtype, as Llama's does."""

    def __init__(self, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.variance_epsilon = epsilon

    def forward(self, x):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normed.to(x.dtype)


class _OnePlusWeight(_HuggingFaceRMSNorm):
    """Gemma's: with weights of 1 it doubles."""

    def forward(self, x):
        return super().forward(x) + super().forward(x) / self.weight


class _EpsilonOutside(_HuggingFaceRMSNorm):
    def forward(self, x):
        return self.weight * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon))


class _Fails(_HuggingFaceRMSNorm):
    def forward(self, x):
        return super().forward(x.view(-1, WIDTH + 1))


class _NoEpsilon(_HuggingFaceRMSNorm):
    def __init__(self):
        super().__init__()
        del self.variance_epsilon


class _Renamed(_OnePlusWeight):
    """Not told apart by its name."""


RIGHT = (_HuggingFaceRMSNorm, functools.partial(nn.RMSNorm, WIDTH), functools.partial(nn.RMSNorm, WIDTH, eps=1e-3))
WRONG = {
    "_OnePlusWeight computes something else": _OnePlusWeight,
    "_EpsilonOutside computes something else": _EpsilonOutside,
    "LayerNorm computes something else": functools.partial(nn.LayerNorm, WIDTH, bias=False),
    r"LayerNorm has the parameters {.*'bias': \(10,\)}": functools.partial(nn.LayerNorm, WIDTH),
    r"RMSNorm has the parameters {}": functools.partial(nn.RMSNorm, WIDTH, elementwise_affine=False),
    r"RMSNorm has the parameters {'weight': \(2, 10\)}": functools.partial(nn.RMSNorm, (2, WIDTH)),
    r"_Fails fails on a tensor \(1, 2, 10\): shape": _Fails,
    "_NoEpsilon has no epsilon": _NoEpsilon,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_rms_norm_is_accepted_and_nothing_else(dtype):
    split = Split.even(WIDTH, 3)
    for build in RIGHT:
        check_rms_norm(build().to(dtype), split)
    for sentence, build in WRONG.items():
        with pytest.raises(ValueError, match=rf"{sentence}.*needs an RMSNorm: x \* rsqrt"):
            check_rms_norm(build().to(dtype), split)


def test_on_meta_the_name_tells():
    split = Split.even(WIDTH, 3)
    with torch.device("meta"):
        check_rms_norm(_HuggingFaceRMSNorm(), split)
        with pytest.raises(ValueError, match="_Renamed is on the meta device"):
            check_rms_norm(_Renamed(), split)


class _Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, WIDTH), norm, nn.Linear(WIDTH, 6)

    def forward(self, x):
        return self.down(self.norm(self.up(x)))


def _trains(dtype):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=3)
    plan = {"0": "shared_input", "0.up": "column", "0.norm": "over_heads", "0.down": "row"}
    x = (torch.randn(4, 6, dtype=dtype, generator=torch.Generator().manual_seed(0)),)
    for build in RIGHT:
        fsdp_tp.parallelize(nn.Sequential(_Net(build())).to(dtype), mesh, plan=plan, verify=x)
    model = nn.Sequential(_Net(nn.LayerNorm(WIDTH, bias=False))).to(dtype)
    with pytest.raises(ValueError, match="0.norm: LayerNorm computes something else"):
        fsdp_tp.parallelize(model, mesh, plan=plan)
    assert type(model[0].up) is nn.Linear, "left as it was"


def test_a_split_norm_equals_the_whole_one():
    run(3, _trains, torch.float32)
