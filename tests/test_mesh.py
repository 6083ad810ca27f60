"""If these fail, look in fsdp_tp/mesh.py: which rank is where, and with whom it forms groups."""

import subprocess
import sys

import pytest
import torch.distributed as dist

import fsdp_tp
from fsdp_tp.config import MeshShape
from tests.ranks import run


def _positions(degrees):
    mesh = fsdp_tp.init_mesh(**degrees)
    groups = {
        "tensor": dist.get_process_group_ranks(mesh.tensor.get_group()),
        "shard": dist.get_process_group_ranks(mesh.shard.get_group()),
        "data": dist.get_process_group_ranks(mesh.data.get_group()),
    }
    return tuple(mesh.coordinate), mesh.data_rank, mesh.data_size, groups, tuple(mesh.fsdp.shape), mesh.describe()


@pytest.mark.parametrize(
    ("degrees", "shape"),
    [
        ({}, (1, 1, 8, 1, 1)),
        ({"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}, (1, 2, 2, 1, 2)),
        ({"hybrid_shard_degree": 1}, (1, 8, 1, 1, 1)),
        ({"tensor_parallel_degree": 8}, (1, 1, 1, 1, 8)),
        ({"hybrid_shard_degree": 4, "context_parallel_degree": 2}, (1, 2, 2, 2, 1)),
        ({"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "hybrid_shard_degree": 1}, (2, 2, 1, 1, 2)),
    ],
)
def test_positions_and_groups_equal_arithmetic(degrees, shape):
    shape = MeshShape(*shape)
    at = [shape.coordinate(rank) for rank in range(8)]

    def peers(rank, *axes):
        fixed = [name for name in MeshShape._fields if name not in axes]
        return [r for r in range(8) if all(getattr(at[r], n) == getattr(at[rank], n) for n in fixed)]

    for rank, (position, data_rank, data_size, groups, fsdp_shape, _) in enumerate(run(8, _positions, degrees)):
        assert position == tuple(at[rank])
        assert groups["tensor"] == peers(rank, "tensor")
        assert groups["shard"] == peers(rank, "shard", "context")
        assert groups["data"] == peers(rank, "replicate", "shard", "context")
        assert (data_rank, data_size) == (
            at[rank].replicate * shape.shard + at[rank].shard,
            shape.replicate * shape.shard,
        )
        assert fsdp_shape == (shape.replicate, shape.shard * shape.context)


def test_describe_has_a_row_for_every_rank():
    tables = {result[-1] for result in run(8, _positions, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2})}
    (table,) = tables
    header, _, *rows = table.splitlines()
    assert header == "8 ranks on cpu: pipeline 1 x replicate 2 x shard 2 x context 1 x tensor 2"
    assert rows[5].split() == ["5", "0", "1", "0", "0", "1", "2", "of", "4"]
    assert len(rows) == 8


@pytest.mark.usefixtures("one_process")
def test_config_and_single_degrees_exclude_each_other():
    config = fsdp_tp.ParallelConfig()
    assert fsdp_tp.init_mesh(config=config).shape == (1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="either one by one or as config="):
        fsdp_tp.init_mesh(config=config, tensor_parallel_degree=2)


def test_a_plain_python_process_is_a_world_of_one():
    code = "import fsdp_tp; m = fsdp_tp.init_mesh(); print(m.device_mesh.size(), m.data_rank, m.data_size)"
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["1", "0", "1"], done.stderr
