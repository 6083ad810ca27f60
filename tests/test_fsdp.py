"""If these fail, look in fsdp_tp/fsdp.py: which mesh a degree becomes, and what it costs in memory."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.fsdp import FSDPModule

import fsdp_tp
from tests import models
from tests.ranks import run


def _net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def _one_step(shard, **options):
    model = _net()
    for layer in (model[0], model[2], model):
        assert shard(layer, **options) is layer
        assert isinstance(layer, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    torch.manual_seed(dist.get_rank())
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    return [models.gather(parameter) for parameter in model.parameters()]


def _drop_in(degree):
    ours = _one_step(fsdp_tp.fully_shard, hybrid_shard_degree=degree, comm="torch")  # the same order of sums
    torchs = _one_step(torch_fsdp.fully_shard)
    # Replicas add in another order than one reduce-scatter; AdamW turns the rounding of a
    # gradient into a relative change of its step, lr = 0.1, of the same size: 1e-6.
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0 if degree in (None, 0) else 1e-6)


@pytest.mark.parametrize("degree", [None, 0, 1, 2, 4])
def test_equals_torchs_fully_shard_with_only_the_import_changed(degree):
    run(4, _drop_in, degree)


def _placements(degree):
    model = _net()
    fsdp_tp.fully_shard(model, hybrid_shard_degree=degree)
    mesh = model[0].weight.device_mesh
    shard_peers = dist.get_process_group_ranks(mesh.get_group(mesh.mesh_dim_names[-1]))
    return mesh.shape, model[0].weight.to_local().shape[0], shard_peers


@pytest.mark.parametrize(("degree", "shape", "rows"), [(0, (8,), 2), (2, (4, 2), 5), (4, (2, 4), 3), (1, (8, 1), 10)])
def test_a_degree_shards_over_that_many_neighbouring_ranks(degree, shape, rows):
    """10 rows over 8, 2, 4 and 1 ranks. Fault: a documented degree whose mesh is 1-D all the same."""
    results = run(8, _placements, degree)
    group = degree or 8
    assert results[0] == (shape, rows, list(range(group)))
    assert results[7][2] == list(range(8 - group, 8))


def _context_axis_is_inside_the_shard_group():
    mesh = fsdp_tp.init_mesh(hybrid_shard_degree=4, context_parallel_degree=2, tensor_parallel_degree=1)
    model = models.hugging_face("llama")
    fsdp_tp.wrap(model, mesh)
    ids = models.batch().chunk(mesh.data_size)[mesh.data_rank]
    model(ids).logits.mean().backward()
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.to_local().shape[0] == 48 // 4
    assert fsdp_tp.clip_grad_norm_(model.parameters(), 1.0) > 0


def test_the_context_axis_counts_as_shard_ranks():
    run(8, _context_axis_is_inside_the_shard_group)


def _tensor_with_context():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2, hybrid_shard_degree=2, context_parallel_degree=2)
    model = models.hugging_face("llama")
    fsdp_tp.wrap(model, mesh)
    model(models.batch()).logits.mean().backward()
    assert model.model.layers[0].mlp.up_proj.weight.to_local().shape[0] == 48 // 4


def test_tensor_parameters_join_a_folded_context_axis():
    run(8, _tensor_with_context)


def _errors():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    for options, sentence in (
        ({"hybrid_shard_degree": 3}, "hybrid_shard_degree=3 does not divide .* legal values: 0, 1, 2, 4"),
        ({"mesh": mesh, "hybrid_shard_degree": 1}, "hybrid_shard_degree=1 contradicts the mesh, built for 2"),
        ({"mesh": mesh.tensor, "hybrid_shard_degree": 2}, "cannot be combined with a DeviceMesh"),
        ({"comm": "pigeon"}, "comm='pigeon' must be one of 'auto', 'torch', 'shared', 'zero_copy', 'fp32_accumulate'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            fsdp_tp.fully_shard(nn.Linear(4, 4), **options)
    split = fsdp_tp.ColumnParallelLinear(4, 4, mesh=mesh)
    with pytest.raises(ValueError, match="DTensor parameters: pass mesh="):
        fsdp_tp.fully_shard(split)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizer .SGD. was built before fully_shard"):
        fsdp_tp.fully_shard(model, mesh=mesh)
    del optimizer
    fsdp_tp.fully_shard(model, mesh=mesh)


def test_errors_name_the_setting_and_the_legal_values():
    run(4, _errors)


def _bytes_of_rank(degrees, tied):
    mesh = fsdp_tp.init_mesh(**degrees)
    whole = models.hugging_face("llama", num_key_value_heads=4, tie_word_embeddings=tied)
    sizes = {name: parameter.shape for name, parameter in whole.named_parameters()}
    model = fsdp_tp.wrap(whole, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    model(models.batch()[:, :-1]).logits.square().mean().backward()
    optimizer.step()
    held = {"parameter": 0, "gradient": 0, "state": 0}
    for parameter in model.parameters():
        held["parameter"] += _storage(parameter)
        held["gradient"] += parameter.grad._local_tensor.nbytes
        held["state"] += sum(_storage(optimizer.state[parameter][key]) for key in ("exp_avg", "exp_avg_sq"))
    return sizes, held


def _storage(tensor):
    return tensor._local_tensor.untyped_storage().nbytes()


def _expected_bytes(sizes, tensor, shard, rank):
    """Bytes of the parameters, of which FSDP pads the rows to a multiple of the shard group, and
    of gradients and optimizer state, which are not padded."""
    padded = own = 0
    for name, shape in sizes.items():
        rows, *rest = shape
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            rows //= tensor
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            rest[0] //= tensor
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            rows //= tensor
        else:
            assert "norm" in name
        chunk = math.ceil(rows / shard)
        mine = max(0, min(rows - rank * chunk, chunk))
        padded += 4 * chunk * math.prod(rest)
        own += 4 * mine * math.prod(rest)
    return padded, own


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("world_size", "degrees", "tensor", "shard"),
    [
        (4, {}, 1, 4),
        (4, {"hybrid_shard_degree": 2}, 1, 2),
        (4, {"tensor_parallel_degree": 2}, 2, 2),
        (8, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}, 2, 2),
        (6, {"tensor_parallel_degree": 2}, 2, 3),
    ],
)
def test_memory_of_a_rank_is_its_share_exactly(world_size, degrees, tensor, shard, tied):
    for rank, (sizes, held) in enumerate(run(world_size, _bytes_of_rank, degrees, tied)):
        shard_rank = rank // tensor % shard
        padded, own = _expected_bytes(sizes, tensor, shard, shard_rank)
        assert held["parameter"] == padded
        assert held["gradient"] == own
        assert held["state"] == 2 * own
        if shard == 2:  # every row count here divides by 2: no padding at all
            norms = 4 * sum(math.prod(shape) for name, shape in sizes.items() if "norm" in name)
            everything = 4 * sum(math.prod(shape) for shape in sizes.values())
            assert padded == own == (everything - norms) // (tensor * shard) + norms // shard
