"""bf16 reduce buffers round every micro-batch (pytorch#106395, PR 194628).

Look in fsdp_tp/fsdp.py: ``reducing_in_fp32``.
"""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsdp_tp
from tests.models import gather
from tests.ranks import run

INPUTS = [1.0] + [2.0**-9] * 31
"""Their sum is exact in fp32; in bf16 1 + 2^-9 rounds to 1."""


def _accumulate(policy, ours):
    mesh = fsdp_tp.init_mesh(hybrid_shard_degree=2)
    model = nn.Linear(8, 1, bias=False)
    nn.init.zeros_(model.weight)
    if ours:
        fsdp_tp.fully_shard(model, mesh=mesh, mp_policy=policy)
    else:
        fully_shard(model, mesh=mesh.fsdp, mp_policy=policy)
    for index, value in enumerate(INPUTS):
        with fsdp_tp.accumulate(model, last=index == len(INPUTS) - 1):
            output = model(torch.full((1, 8), value))
            assert output.dtype == torch.bfloat16
            output.sum().backward()
    return gather(model.weight.grad)


@functools.cache
def _results(reduce_dtype, ours):
    return run(4, _accumulate, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype), ours)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, None])
def test_micro_batches_add_up_in_fp32(reduce_dtype):
    for gradient in _results(reduce_dtype, True):
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, torch.full((1, 8), sum(INPUTS)))


@pytest.mark.xfail(strict=True, reason="torch reduces, and keeps what it has reduced, in param_dtype by default")
def test_torch():
    for gradient in _results(None, False):
        assert torch.equal(gradient, torch.full((1, 8), sum(INPUTS)))
