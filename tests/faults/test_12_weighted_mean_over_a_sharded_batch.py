"""Class weights or ignore_index over a sharded batch: a mean of the ranks' means (pytorch#185167).

Look in fsdp_tp/loss.py: numerator and denominator are summed over the ranks, each by itself.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp_tp
from tests.models import gather
from tests.ranks import run

TARGET = torch.tensor([1, 5, -100, 0])
INPUT = torch.arange(32, dtype=torch.float64).view(4, 8).sin() * 3
WEIGHT = torch.arange(1, 9, dtype=torch.float64)


def _linear():
    torch.manual_seed(0)
    return nn.Linear(8, 8, bias=False, dtype=torch.float64)


def _losses():
    mesh = fsdp_tp.init_mesh()
    reference, model = _linear(), _linear()
    expected = F.cross_entropy(reference(INPUT), TARGET, weight=WEIGHT)
    expected.backward()

    fsdp_tp.fully_shard(model, mesh=mesh)
    mine, target = (whole.chunk(2)[mesh.data_rank] for whole in (INPUT, TARGET))
    total = F.cross_entropy(model(mine), target, weight=WEIGHT, reduction="sum")
    weight = WEIGHT[target[target != -100]].sum()
    ours = fsdp_tp.global_mean(total, weight, mesh)
    ours.backward()
    torch.testing.assert_close(gather(model.weight.grad), reference.weight.grad, rtol=0, atol=1e-12)

    inputs, targets = (
        distribute_tensor(whole, mesh.shard, [Shard(0)]) for whole in (reference(INPUT).detach(), TARGET)
    )
    torchs = F.cross_entropy(inputs, targets, weight=distribute_tensor(WEIGHT, mesh.shard, [Replicate()]))
    return expected.item(), ours.item(), gather(torchs).item()


@functools.cache
def _results():
    return run(2, _losses)


def test_the_mean_weighs_the_whole_batch():
    for expected, ours, _ in _results():
        assert ours == pytest.approx(expected, rel=1e-12)


@pytest.mark.xfail(strict=True, reason="pytorch#185167: DTensor averages the ranks' weighted means")
def test_torch():
    for expected, _, torchs in _results():
        assert torchs == pytest.approx(expected, rel=1e-12)
