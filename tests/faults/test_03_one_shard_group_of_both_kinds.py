"""Split and replicated parameters in one flat buffer: a norm off by sqrt(tensor degree) (DeepSpeed PR 5411).

Look in fsdp_tp/grad_norm.py, and in fsdp_tp/layers/parameter.py for the placements it reads.
"""

import math

import pytest

import fsdp_tp
from tests.faults import PLAN, Block, norm_of, rows
from tests.ranks import run


def _norms():
    """One FSDP group over everything: whole model, only what is split, only what is replicated."""
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2, hybrid_shard_degree=2)
    model, reference = Block(), Block()
    fsdp_tp.parallelize(model, mesh, plan=PLAN)
    fsdp_tp.fully_shard(model, mesh=mesh)
    model(rows().chunk(mesh.data_size)[mesh.data_rank]).square().mean().backward()
    reference(rows()).square().mean().backward()
    found = []
    for names in (["0", "1", "3"], ["1"], ["0"]):
        parts = [[p for name in names for p in each.get_submodule(name).parameters()] for each in (model, reference)]
        found.append((fsdp_tp.clip_grad_norm_(parts[0], math.inf).item(), norm_of([p.grad for p in parts[1]])))
    return found


def test_the_norm_of_each_kind_is_that_of_one_process():
    for found in run(8, _norms):
        for ours, expected in found:
            assert ours == pytest.approx(expected, rel=1e-12)
