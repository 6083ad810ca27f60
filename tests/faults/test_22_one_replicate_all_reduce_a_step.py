"""Hybrid sharding all-reduces every micro-batch (torchtitan#1929, VeOmni PR 781). Look in fsdp_tp/fsdp.py: accumulate.

Counts of whole models are in tests/test_collectives.py.
"""

import functools

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import fsdp_tp
from tests.collectives import CollectiveCounter
from tests.faults import Block, rows
from tests.models import gather
from tests.ranks import run

MICRO_BATCHES = 4


def _accumulate(ours):
    mesh = fsdp_tp.init_mesh(hybrid_shard_degree=2)
    model, reference = Block(), Block()
    # Ours would not go through torch.distributed, where collectives are counted.
    fully_shard(model, mesh=mesh.fsdp) if not ours else fsdp_tp.fully_shard(model, mesh=mesh, comm="torch")
    with CollectiveCounter(mesh) as counter:
        for index in range(MICRO_BATCHES):
            piece = rows().roll(index).chunk(4)[mesh.data_rank]
            if ours:
                with fsdp_tp.accumulate(model, last=index == MICRO_BATCHES - 1):
                    model(piece).square().mean().backward()
            else:
                model(piece).square().mean().backward()
    for index in range(MICRO_BATCHES):
        reference(rows().roll(index)).square().mean().backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(gather(parameter.grad), expected.grad, rtol=0, atol=1e-12)
    return counter.counts["all_reduce", "replicate"], counter.counts["reduce_scatter", "shard"]


@functools.cache
def _results(ours):
    return run(4, _accumulate, ours)


def test_replicas_add_up_once_with_the_gradients_of_one_process():
    assert _results(True) == [(1, MICRO_BATCHES)] * 4


@pytest.mark.xfail(strict=True, reason="torch leaves it to the script to call set_requires_all_reduce")
def test_torch():
    assert _results(False) == [(1, MICRO_BATCHES)] * 4
