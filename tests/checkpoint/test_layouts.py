"""If these fail, look in fsdp_tp/checkpoint: one layout's files read by another."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fsdp_tp
from fsdp_tp import checkpoint
from tests import models
from tests.ranks import run

LAYOUTS = {
    "one": (1, {}),
    "tensor2 x shard2 x replicate2": (8, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}),
    "shard3": (3, {}),
    "tensor2": (2, {"tensor_parallel_degree": 2}),
}


def _job(degrees, seed, steps):
    mesh = fsdp_tp.init_mesh(**degrees)
    with torch.device("meta"):
        model = models.hugging_face("llama", tie_word_embeddings=True)
    fsdp_tp.wrap(model, mesh, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        model(models.batch(step)).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _contents(model, optimizer):
    state = {}
    for name, parameter in model.named_parameters():
        state[name] = models.gather(parameter)
        for key, value in optimizer.state[parameter].items():
            state[f"{name}.{key}"] = models.gather(value)
    return state


def _save(degrees, path):
    model, optimizer = _job(degrees, seed=1, steps=2)
    checkpoint.save(path, model=model, optimizer=optimizer, extra={"step": 2})
    return _contents(model, optimizer)


def _load(degrees, path, steps_before):
    model, optimizer = _job(degrees, seed=2, steps=steps_before)
    assert checkpoint.load(path, model=model, optimizer=optimizer) == {"step": 2}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return _contents(model, optimizer)


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", ["one", "tensor2 x shard2 x replicate2"])
def test_a_layout_reads_what_another_wrote_bit_for_bit(tmp_path, source, target):
    """Model and optimizer, into an optimizer that has never stepped. Fault: load misses keys."""
    saved = run(*_call(source, _save, tmp_path / "step-2"))[0]
    for loaded in run(*_call(target, _load, tmp_path / "step-2", 0)):
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


def _call(layout, function, *arguments):
    world_size, degrees = LAYOUTS[layout]
    return world_size, function, degrees, *arguments


def test_loading_into_a_used_optimizer_replaces_its_state(tmp_path):
    saved = run(*_call("tensor2", _save, tmp_path / "step-2"))[0]
    loaded = run(*_call("tensor2", _load, tmp_path / "step-2", 1))[0]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


@pytest.mark.usefixtures("one_process")
def test_latest_sees_complete_checkpoints_only(tmp_path):
    model = nn.Linear(2, 2)
    assert checkpoint.latest(tmp_path / "none") is None
    assert checkpoint.latest(tmp_path) is None
    for step in (9, 10, 2):
        checkpoint.save(tmp_path / f"step-{step}", model=model)
    (tmp_path / "step-11").mkdir()
    (tmp_path / ".step-12.incomplete").mkdir()
    (tmp_path / "notes").mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-10"
    with pytest.raises(ValueError, match="step-11 is not a complete checkpoint"):
        checkpoint.load(tmp_path / "step-11", model=model)


@pytest.mark.usefixtures("one_process")
def test_nothing_saved_is_overwritten_and_a_failed_save_leaves_no_checkpoint(tmp_path):
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "step-1", model=model)
    with pytest.raises(ValueError, match="step-1 exists already"):
        checkpoint.save(tmp_path / "step-1", model=model)
    with pytest.raises(ValueError, match=r"extra\[.not json.\] is a object, which JSON cannot hold"):
        checkpoint.save(tmp_path / "step-2", model=model, extra={"not json": object()})
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"
    checkpoint.save(tmp_path / "step-2", model=model)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-2"


def _bad_extra(path):
    fsdp_tp.init_mesh()
    with pytest.raises(ValueError, match="which JSON cannot hold"):
        checkpoint.save(path, model=nn.Linear(2, 2), extra={"not json": object()})
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        checkpoint.load(path, model=nn.Linear(2, 2))


def test_what_fails_on_rank_0_fails_on_all(tmp_path):
    """A rank that failed alone would leave the others waiting for it."""
    run(2, _bad_extra, tmp_path / "step-1")


def test_without_a_process_group(tmp_path):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    checkpoint.save(tmp_path / "step-1", model=model, extra={"a": 1})
    assert checkpoint.load(tmp_path / "step-1", model=other) == {"a": 1}
    assert torch.equal(model.weight, other.weight)
