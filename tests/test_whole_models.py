"""Hugging Face models under every layout against one process, in fp32.

If one fails, compare layers first (tests/layers), then plans (tests/test_parallelize.py).

Tolerances: fp32 rounds at 6e-8, and a gradient here is a chain of about 30 sums whose order
depends on the layout: 1e-6 relative to the gradient's norm. A missing or doubled sum is wrong
by O(1). Ten AdamW steps amplify the rounding of small gradients: 1e-5 on the losses.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

import fsdp_tp
from tests import models
from tests.ranks import run

STEPS = 10
GRADIENT_BOUND = 1e-6
NORM_BOUND = 1e-6
CURVE_BOUND = 1e-5

LAYOUTS = {
    "tensor2": (2, {"tensor_parallel_degree": 2}),
    "shard2": (2, {}),
    "replicate2 x shard2": (4, {"hybrid_shard_degree": 2}),
    "tensor2 x shard2": (4, {"tensor_parallel_degree": 2}),
    "tensor2 x shard2 x replicate2": (8, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}),
}
VARIANTS = {
    "plain": {},
    "sequence parallel": {"sequence_parallel": True},
    "loss parallel": {"loss_parallel": True},
    "all": {"sequence_parallel": True, "loss_parallel": True, "activation_checkpointing": "full"},
}


def train(family, degrees, options, overrides):
    """Losses and first gradients of a short training; the same global batches for every layout."""
    mesh = fsdp_tp.init_mesh(**degrees)
    model = models.hugging_face(family, **overrides)
    fsdp_tp.initialize(model, seed=7)
    fsdp_tp.wrap(model, mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses, norms = [], []
    for step in range(STEPS):
        ids = models.batch(step).chunk(mesh.data_size)[mesh.data_rank]
        logits, targets = model(ids[:, :-1]).logits, ids[:, 1:]
        if options.get("loss_parallel"):
            loss_sum = fsdp_tp.vocab_parallel_cross_entropy(logits, targets, mesh=mesh, reduction="sum")
        else:
            loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = fsdp_tp.global_mean(loss_sum, targets.numel(), mesh)
        loss.backward()
        if step == 0:
            gradients = {name: models.gather(parameter.grad) for name, parameter in model.named_parameters()}
        norms.append(fsdp_tp.clip_grad_norm_(model.parameters(), 1.0).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, gradients


@functools.cache
def reference(family, **overrides):
    return run(1, train, family, {}, {}, overrides)[0]


def compare(family, layout, variant="plain", **overrides):
    world_size, degrees = LAYOUTS[layout]
    losses, norms, gradients = reference(family, **overrides)
    everyone = run(world_size, train, family, degrees, VARIANTS[variant], overrides)
    for rank_losses, rank_norms, rank_gradients in everyone:
        assert rank_losses == everyone[0][0], "ranks disagree on the loss"
        assert rank_norms == everyone[0][1], "ranks disagree on the gradient norm"
        assert rank_gradients.keys() == gradients.keys()
    _, _, actual = everyone[0]
    for name, gradient in gradients.items():
        gap = torch.linalg.vector_norm(actual[name] - gradient) / torch.linalg.vector_norm(gradient)
        assert gap <= GRADIENT_BOUND, f"gradient of {name}: relative gap {gap:.2e}"
    assert everyone[0][1][0] == pytest.approx(norms[0], rel=NORM_BOUND)
    assert everyone[0][0] == pytest.approx(losses, rel=CURVE_BOUND)
    assert losses[-1] < losses[0] - 0.1, "the reference did not learn: the curve proves nothing"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_llama_under_every_layout(layout):
    compare("llama", layout)


@pytest.mark.parametrize("variant", ["sequence parallel", "loss parallel", "all"])
@pytest.mark.parametrize("layout", ["tensor2", "tensor2 x shard2 x replicate2"])
def test_qwen3_in_every_variant(layout, variant):
    """Query and key norms, tied embeddings, per-head gradients."""
    compare("qwen3", layout, variant, tie_word_embeddings=True)


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_other_families(family):
    """qwen2 has biases on q, k and v."""
    compare(family, "tensor2 x shard2 x replicate2")
    compare(family, "tensor2", "all")


def test_tied_llama_under_hybrid_sharding():
    compare("llama", "tensor2 x shard2 x replicate2", tie_word_embeddings=True)


def test_row_biases_under_sequence_parallelism():
    """attention_bias and mlp_bias give the row layers biases, whose gradients need a sum."""
    compare("llama", "tensor2 x shard2", "all", attention_bias=True, mlp_bias=True)
