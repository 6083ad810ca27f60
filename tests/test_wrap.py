"""If these fail, look in fsdp_tp/wrap.py: the order of the steps, and a world of one rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_tp
from tests import models
from tests.ranks import run


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("meta", [False, True])
def test_world_size_one_works_with_every_call(meta):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=1, hybrid_shard_degree=1)
    assert "1 ranks on cpu" in mesh.describe()
    with torch.device("meta" if meta else "cpu"):
        model = models.hugging_face("llama")
    model = fsdp_tp.wrap(
        model,
        mesh,
        sequence_parallel=True,
        loss_parallel=True,
        activation_checkpointing="full",
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        ids = models.batch(step)
        with fsdp_tp.accumulate(model, last=True):
            logits = model(ids[:, :-1]).logits
            loss = fsdp_tp.vocab_parallel_cross_entropy(logits, ids[:, 1:], mesh=mesh, reduction="sum")
            loss = fsdp_tp.global_mean(loss, ids[:, 1:].numel(), mesh)
            loss.backward()
        assert fsdp_tp.clip_grad_norm_(model.parameters(), 1.0, mesh=mesh) > 0
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.usefixtures("one_process")
def test_errors():
    mesh = fsdp_tp.init_mesh()
    with pytest.raises(ValueError, match="activation_checkpointing='half' must be one of 'none', 'full'"):
        fsdp_tp.wrap(models.hugging_face("llama"), mesh, activation_checkpointing="half")
    model = models.hugging_face("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="optimizer .AdamW. was built before wrap"):
        fsdp_tp.wrap(model, mesh)
    del optimizer
    model.lm_head.to("meta")
    with pytest.raises(ValueError, match="some parameters are on the meta device .* on meta: lm_head.weight"):
        fsdp_tp.wrap(model, mesh)
    model = models.hugging_face("llama")
    torch.distributed.fsdp.fully_shard(model)
    with pytest.raises(ValueError, match=r"wrap\(\) calls fully_shard itself: remove the script's own"):
        fsdp_tp.wrap(model, mesh)
    with pytest.raises(ValueError, match="comm='x' must be one of"):
        fsdp_tp.wrap(models.hugging_face("llama"), mesh, comm="x")


def _losses(options, degrees, layers=2):
    mesh = fsdp_tp.init_mesh(**degrees)
    model = models.hugging_face("qwen3", num_hidden_layers=layers)
    fsdp_tp.initialize(model)
    fsdp_tp.wrap(model, mesh, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        ids = models.batch(step).chunk(mesh.data_size)[mesh.data_rank]
        logits = model(ids[:, :-1]).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fsdp_tp.global_mean(loss.detach(), 1, mesh).item())
    return losses


def test_recomputed_blocks_give_the_same_bits():
    degrees = {"tensor_parallel_degree": 2}
    for sequence_parallel in (False, True):
        options = {"sequence_parallel": sequence_parallel}
        kept = run(4, _losses, options, degrees)
        recomputed = run(4, _losses, {**options, "activation_checkpointing": "full"}, degrees)
        assert kept == recomputed


def _nano():
    """Blocks in a ModuleList inside a ModuleDict, as nanoGPT has them, and in a ModuleDict, as torchtitan has."""
    from fsdp_tp.modules import find_blocks

    block = lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())  # noqa: E731
    blocks = torch.nn.ModuleList([block(), block()])
    nano = torch.nn.ModuleDict({"transformer": torch.nn.ModuleDict({"wte": torch.nn.Embedding(2, 2), "h": blocks})})
    titan = torch.nn.ModuleDict({"layers": torch.nn.ModuleDict({"0": block(), "1": block()})})
    return list(find_blocks(nano)), list(find_blocks(titan))


def test_blocks_are_found_in_every_usual_container():
    assert _nano() == (["transformer.h.0", "transformer.h.1"], ["layers.0", "layers.1"])


def _unused_axes():
    mesh = fsdp_tp.init_mesh(context_parallel_degree=2)
    with pytest.warns(UserWarning, match="no layer uses the context axis yet: its 2 ranks repeat the same work"):
        fsdp_tp.wrap(models.hugging_face("llama"), mesh)


def test_an_axis_without_effect_warns():
    run(2, _unused_axes)


def _compiled_block(sequence_parallel):
    """One graph for the whole block, forward and backward."""
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    results = []
    for compiled in (False, True):
        # The first block splits the sequence for the others; else they are all alike.
        model = models.hugging_face("qwen3", num_hidden_layers=2 if sequence_parallel else 1)
        fsdp_tp.initialize(model)
        fsdp_tp.parallelize(model, mesh, sequence_parallel=sequence_parallel)
        if compiled:
            for layer in model.model.layers:
                layer.compile(fullgraph=True, backend="aot_eager")
        ids = models.batch(sequence=7 if sequence_parallel else 8)  # slices of 4 and 3
        model(ids[:, :-1]).logits.square().mean().backward()
        results.append([models.gather(parameter.grad) for parameter in model.parameters()])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_block_compiles_without_graph_break(sequence_parallel):
    run(2, _compiled_block, sequence_parallel)


def test_wrap_compiles_blocks_under_fsdp():
    degrees = {"tensor_parallel_degree": 2}
    eager = run(2, _losses, {"sequence_parallel": True}, degrees, 1)[0]
    compiled = run(2, _losses, {"sequence_parallel": True, "compile": True}, degrees, 1)[0]
    assert compiled == pytest.approx(eager, rel=1e-5)  # inductor fuses, so fp32 rounds elsewhere
