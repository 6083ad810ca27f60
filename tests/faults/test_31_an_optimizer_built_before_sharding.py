"""An optimizer built before sharding holds the old parameters and trains nothing (accelerate benchmarks).

Look in fsdp_tp/modules.py: ``require_no_optimizer``.
"""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import fsdp_tp
from tests.faults import PLAN, Block, rows
from tests.models import gather
from tests.ranks import run


def _refused():
    """By each function that makes new parameters; once the optimizer is gone, all is well."""
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    for name, shard in (
        ("wrap", lambda model: fsdp_tp.wrap(model, mesh, plan=PLAN)),
        ("parallelize", lambda model: fsdp_tp.parallelize(model, mesh, plan=PLAN)),
        ("fully_shard", lambda model: fsdp_tp.fully_shard(model, mesh=mesh)),
    ):
        model = Block()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=rf"optimizer .AdamW. was built before {name}, .* it would train nothing"):
            shard(model)
        del optimizer
        shard(model)


def test_it_is_an_error():
    run(2, _refused)


def _torch():
    model = Block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    fully_shard(model)
    before = [gather(parameter) for parameter in model.parameters()]
    model(rows()).square().mean().backward()
    optimizer.step()
    return any(not torch.equal(gather(p), b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.xfail(strict=True, reason="fully_shard takes the model as it is, and the optimizer trains nothing")
def test_torch():
    assert run(2, _torch) == [True, True]
