"""Each rank logs its own part of the norm (pytorch#170862, repaired there by torch 2.13).

Look in fsdp_tp/grad_norm.py: it returns a plain tensor, of which there is no local part.
"""

import pytest
import torch

import fsdp_tp
from tests.faults import PLAN, Block, norm_of, rows
from tests.ranks import run


def _norms(degrees):
    mesh = fsdp_tp.init_mesh(**degrees)
    model, reference = Block(), Block()
    fsdp_tp.wrap(model, mesh, plan=PLAN)
    model(rows().chunk(mesh.data_size)[mesh.data_rank]).square().mean().backward()
    reference(rows()).square().mean().backward()
    norm = fsdp_tp.clip_grad_norm_(model.parameters(), 1e9)
    assert type(norm) is torch.Tensor
    return norm_of([parameter.grad for parameter in reference.parameters()]), norm.item()


@pytest.mark.parametrize(("world_size", "degrees"), [(2, {}), (4, {"tensor_parallel_degree": 2})])
def test_every_rank_logs_the_global_norm(world_size, degrees):
    results = run(world_size, _norms, degrees)
    assert len({logged for _, logged in results}) == 1
    for expected, logged in results:
        assert logged == pytest.approx(expected, rel=1e-12)
