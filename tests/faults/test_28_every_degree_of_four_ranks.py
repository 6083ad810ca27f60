"""A mesh of tensor ranks alone has no shard axis (accelerate#3729, #3798). Look in fsdp_tp/mesh.py: all five exist."""

import pytest

import fsdp_tp
from tests.faults import PLAN, Block, norm_of, rows
from tests.ranks import run

DEGREES = [(tensor, shard) for tensor in (1, 2, 4) for shard in (1, 2, 4) if tensor * shard <= 4]


def _norm(tensor, shard):
    # One mesh a world: torch keeps groups of past meshes by the order in which they were made.
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=tensor, hybrid_shard_degree=shard)
    assert mesh.device_mesh.mesh_dim_names == ("pipeline", "replicate", "shard", "context", "tensor")
    model = fsdp_tp.wrap(Block(), mesh, plan=PLAN)
    model(rows().chunk(mesh.data_size)[mesh.data_rank]).square().mean().backward()
    return fsdp_tp.clip_grad_norm_(model.parameters(), 1e9).item()


@pytest.mark.parametrize(("tensor", "shard"), DEGREES)
def test_every_combination_trains_as_one_process(tensor, shard):
    reference = Block()
    reference(rows()).square().mean().backward()
    expected = norm_of([parameter.grad for parameter in reference.parameters()])
    assert run(4, _norm, tensor, shard) == pytest.approx([expected] * 4, rel=1e-12)
