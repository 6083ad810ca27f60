"""Same seed, same global weights on every layout. If these fail, look in fsdp_tp/initialize.py."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_tp
from fsdp_tp.initialize import materialize
from fsdp_tp.layers.parameter import own_part
from tests import models
from tests.ranks import run

LAYOUTS = [
    (1, {}),
    (2, {"tensor_parallel_degree": 2}),
    (3, {}),
    (4, {"hybrid_shard_degree": 2}),
    (8, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}),
]


def _from_meta(family, degrees, tied, checkpointing):
    mesh = fsdp_tp.init_mesh(**degrees)
    torch.manual_seed(torch.distributed.get_rank())  # the global generator must not matter
    with torch.device("meta"):
        model = models.hugging_face(family, tie_word_embeddings=tied)
    fsdp_tp.wrap(model, mesh, seed=3, activation_checkpointing=checkpointing)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    rotary = model.model.rotary_emb
    weights = {name: models.gather(parameter) for name, parameter in model.named_parameters()}
    logits = model(models.batch()).logits.detach()
    return weights, rotary.inv_freq.clone(), rotary.original_inv_freq.clone(), logits


@functools.cache
def _one_process(family, tied):
    """The same initialisation of a model that was built on the CPU."""
    model = models.hugging_face(family, tie_word_embeddings=tied)
    rotary = model.model.rotary_emb
    before = rotary.inv_freq.clone()
    fsdp_tp.initialize(model, seed=3)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return weights, before, model(models.batch()).logits.detach()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("world_size", "degrees"), LAYOUTS)
def test_meta_models_get_the_weights_of_one_process_bit_for_bit(world_size, degrees, tied):
    """Faults: initial weights that depend on the layout; untied weights; rotary buffers lost on meta."""
    expected, inv_freq, logits = _one_process("qwen3", tied)
    for weights, buffer, original, rank_logits in run(world_size, _from_meta, "qwen3", degrees, tied, "none"):
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name]), name
        assert torch.equal(buffer, inv_freq)
        assert torch.equal(original, inv_freq)
        torch.testing.assert_close(rank_logits, logits, rtol=1e-5, atol=1e-5)  # fp32, sums in another order


def test_activation_checkpointing_does_not_change_the_weights():
    expected, _, _ = _one_process("qwen3", False)
    weights = run(2, _from_meta, "qwen3", {}, False, "full")[0][0]
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


@pytest.mark.usefixtures("one_process")
def test_statistics_and_seeds():
    """Right distribution, other seeds other weights, modules of one shape not alike, global generator untouched."""
    model = models.hugging_face("llama", hidden_size=64)
    state = torch.get_rng_state()
    fsdp_tp.initialize(model, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    first, second = (layer.mlp.gate_proj.weight.detach().clone() for layer in model.model.layers)
    # 3072 normal numbers: their standard deviation is known to 1.3 %; five times that.
    assert first.std().item() == pytest.approx(0.02, rel=0.065)
    assert not torch.equal(first, second)
    assert torch.equal(model.model.norm.weight, torch.ones(64))
    fsdp_tp.initialize(model, seed=1)
    assert not torch.equal(model.model.layers[0].mlp.gate_proj.weight, first)


class _Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))


class _Buffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(3.0), persistent=False)


class _Forgetful(nn.Linear):
    """Its initialiser leaves the bias."""

    def reset_parameters(self):
        nn.init.zeros_(self.weight)


@pytest.mark.parametrize(("kind", "unset"), [(_Bare, "scale"), (_Buffer, "table"), (_Forgetful, "bias")])
def test_what_nobody_initialises_is_named(kind, unset):
    with torch.device("meta"):
        model = nn.ModuleDict({"odd": kind(2, 2) if kind is _Forgetful else kind(), "linear": nn.Linear(2, 2)})
    materialize(model, torch.device("cpu"))
    with pytest.raises(ValueError, match=rf"odd.{unset} is not initialised: .* of its module \({kind.__name__}\)"):
        fsdp_tp.initialize(model)


def test_real_buffers_are_left_alone():
    model = nn.ModuleDict({"odd": _Buffer(), "linear": nn.Linear(2, 2)})
    fsdp_tp.initialize(model)
    assert torch.equal(model["odd"].table, torch.arange(3.0))


class _HuggingFaceWithBareParameter(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(3))


def test_a_parameter_that_hugging_face_does_not_know_is_named():
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    with torch.device("meta"):
        model = _HuggingFaceWithBareParameter(config)
    materialize(model, torch.device("cpu"))
    with pytest.raises(ValueError, match="scale is not initialised"):
        fsdp_tp.initialize(model)


def test_materialize_keeps_ties_frozen_and_what_is_real():
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    model["a"].bias.requires_grad_(False)
    model["real"] = nn.Linear(2, 2)
    before = model["real"].weight
    materialize(model, torch.device("cpu"))
    assert model["a"].weight is model["b"].weight
    assert not model["a"].weight.is_meta
    assert not model["a"].bias.requires_grad
    assert model["real"].weight is before


class _TiedWithBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.head.weight = self.embed.weight


def test_a_tied_weight_is_drawn_once_by_its_first_owner():
    tied, alone = _TiedWithBias(), nn.ModuleDict({"embed": nn.Embedding(8, 4)})
    fsdp_tp.initialize(tied)
    fsdp_tp.initialize(alone)
    assert tied.head.weight is tied.embed.weight
    assert torch.equal(tied.embed.weight, alone["embed"].weight)
    assert tied.head.bias.abs().max() <= 0.5


def _parts():
    """own_part against torch's own distribution of a tensor, for even, uneven and empty shards."""
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    for rows in (8, 6, 4, 2):
        whole = torch.arange(rows * 4.0).view(rows, 4)
        for plan in ("column", "row"):
            kind = fsdp_tp.ColumnParallelLinear if plan == "column" else fsdp_tp.RowParallelLinear
            linear = nn.Linear(4, rows, bias=False)
            with torch.no_grad():
                linear.weight.copy_(whole)
            layer = kind.from_linear(linear, mesh=mesh)
            fsdp_tp.fully_shard(layer, mesh=mesh)
            assert torch.equal(own_part(whole, layer.weight), layer.weight.to_local())


def test_own_part_is_what_fsdp_leaves_on_this_rank():
    run(8, _parts)
