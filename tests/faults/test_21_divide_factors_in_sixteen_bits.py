"""A divide factor with bf16 gradients goes through PREMUL_SUM, which zeroes them (pytorch#190745; gloo refuses it).

Look in fsdp_tp/fsdp.py: ``reduce_by_sums``.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsdp_tp
from tests.faults import outcome
from tests.models import gather
from tests.ranks import run

FACTORS = (4.0, 3.0)


def _gradient(model, factor):
    """Two ranks with three rows of ones each."""
    model.set_gradient_divide_factor(factor)
    model.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    return gather(model.weight.grad)


def _gradients(reduce_dtype):
    mesh = fsdp_tp.init_mesh()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    models = [nn.Linear(4, 2, bias=False) for _ in range(3)]
    fsdp_tp.fully_shard(models[0], mesh=mesh, mp_policy=policy)
    fsdp_tp.wrap(models[1], mesh, plan={}, mp_policy=policy)
    over_gloo = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    fully_shard(models[2], mesh=over_gloo, mp_policy=policy)
    return [[outcome(_gradient, model, factor) for factor in FACTORS] for model in models]


@functools.cache
def _results(reduce_dtype):
    return run(2, _gradients, reduce_dtype)


@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32])
def test_the_sum_is_divided_by_the_factor(reduce_dtype):
    for results in _results(reduce_dtype):
        for gradients in results[:2]:
            for factor, gradient in zip(FACTORS, gradients, strict=True):
                assert torch.equal(gradient, torch.full((2, 4), 6 / factor))


@pytest.mark.xfail(strict=True, reason="on gloo an error; with NCCL, pytorch#190745")
def test_torch():
    for results in _results(torch.bfloat16):
        for factor, gradient in zip(FACTORS, results[2], strict=True):
            assert torch.equal(gradient, torch.full((2, 4), 6 / factor))
