"""Packed gate/up weights cannot be checkpointed (transformers PR 48802).

A rank has a part of the gate and a part of the up weight, which are no slice of the packed one. Look in
fsdp_tp/layers/canonical.py and fsdp_tp/checkpoint.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

import fsdp_tp
from fsdp_tp import checkpoint
from fsdp_tp.layers.canonical import arranged_parameters
from tests import families, models
from tests.ranks import run

TARGETS = [(2, {"tensor_parallel_degree": 2}), (1, {})]


def _job(degrees, steps, seed):
    mesh = fsdp_tp.init_mesh(**degrees)
    with torch.device("meta"):
        model = families.build("phi3")
    fsdp_tp.wrap(model, mesh, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        _step(model, optimizer, step)
    return model, optimizer


def _step(model, optimizer, step):
    """Every data rank has the whole batch: their mean is that of one process."""
    loss = model(models.batch(step)).logits.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _weights(model):
    return {name: models.gather(value) for name, value in model.state_dict().items()}


def _save(path):
    """By our checkpoint, by torch's own of the state dict, and the loss of the step that comes next."""
    model, optimizer = _job({"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}, steps=2, seed=1)
    packed = [name for name in arranged_parameters(model) if name.endswith("gate_up_proj.weight")]
    assert len(packed) == 2, "stored as in one process, they would show nothing"
    checkpoint.save(path / "ours-2", model=model, optimizer=optimizer)
    dcp.save(model.state_dict(), checkpoint_id=path / "torch")
    return _weights(model), _step(model, optimizer, 2), _step(model, optimizer, 3)


def _load(degrees, path):
    model, optimizer = _job(degrees, steps=0, seed=2)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=path / "torch")
    model.load_state_dict(state)
    by_torch = _weights(model)
    model, optimizer = _job(degrees, steps=1, seed=3)
    checkpoint.load(path / "ours-2", model=model, optimizer=optimizer)
    return by_torch, _weights(model), _step(model, optimizer, 2), _step(model, optimizer, 3)


def test_every_layout_reads_them_and_goes_on(tmp_path):
    """The second loss after loading shows that the optimizer's moments of packed weights came along."""
    saved, *expected = run(4, _save, tmp_path)[0]
    for world_size, degrees in TARGETS:
        for by_torch, by_ours, *losses in run(world_size, _load, degrees, tmp_path):
            for loaded in (by_torch, by_ours):
                assert loaded.keys() == saved.keys()
                assert all(torch.equal(loaded[name], weight) for name, weight in saved.items())
            # fp32: the layouts sum in another order.
            assert losses == pytest.approx(expected, rel=1e-5)


WHOLE = torch.arange(16.0).view(8, 2)  # gate above up


def _torch(path):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    mine = torch.cat([half.chunk(2)[mesh.tensor_rank] for half in WHOLE.chunk(2)])
    packed = DTensor.from_local(mine, mesh.tensor, [_StridedShard(0, split_factor=2)], run_check=False)
    assert torch.equal(packed.full_tensor(), WHOLE)
    try:
        dcp.save({"weight": packed}, checkpoint_id=path)
    except CheckpointException as error:  # no Exception
        return str(error)
    loaded = {"weight": torch.zeros_like(WHOLE)}
    dcp.load(loaded, checkpoint_id=path)
    return loaded["weight"]


@pytest.mark.xfail(strict=True, reason="torch writes a strided shard of a 1-D mesh as one slice: they overlap")
def test_torch(tmp_path):
    for loaded in run(2, _torch, tmp_path):
        assert not isinstance(loaded, str), loaded
        assert torch.equal(loaded, WHOLE)
