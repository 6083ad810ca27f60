"""A mesh of tensor ranks alone has no shard axis (accelerate#3729, #3798). Look in fsdp_tp/mesh.py: all five exist."""

import pytest

import fsdp_tp
from tests.faults import PLAN, Block, norm_of, rows
from tests.ranks import run


def _every_degree():
    reference = Block()
    reference(rows()).square().mean().backward()
    expected = norm_of([parameter.grad for parameter in reference.parameters()])
    norms = {}
    for tensor in (1, 2, 4):
        for shard in (degree for degree in (0, 1, 2, 4) if degree <= 4 // tensor):
            mesh = fsdp_tp.init_mesh(tensor_parallel_degree=tensor, hybrid_shard_degree=shard)
            assert mesh.device_mesh.mesh_dim_names == ("pipeline", "replicate", "shard", "context", "tensor")
            model = fsdp_tp.wrap(Block(), mesh, plan=PLAN)
            model(rows().chunk(mesh.data_size)[mesh.data_rank]).square().mean().backward()
            norms[tensor, shard] = fsdp_tp.clip_grad_norm_(model.parameters(), 1e9).item()
    return expected, norms


def test_every_combination_trains_as_one_process():
    for expected, norms in run(4, _every_degree):
        assert len(norms) == 4 + 3 + 2
        assert norms == pytest.approx(dict.fromkeys(norms, expected), rel=1e-12)
