"""to_empty unties weights in silence (verl#7834). Look in fsdp_tp/initialize.py: ``materialize``."""

import pytest
import torch

import fsdp_tp
from tests import models
from tests.ranks import run


def _tied():
    with torch.device("meta"):
        model = models.hugging_face("llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


def _gradient(degrees):
    """The tied weight's gradient: the embedding's and the head's together."""
    mesh = fsdp_tp.init_mesh(**degrees)
    model = fsdp_tp.wrap(_tied(), mesh)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model(models.batch()[:, :-1]).logits.square().mean().backward()
    return models.gather(model.lm_head.weight.grad)


def test_identity_and_gradient():
    model = fsdp_tp.initialize(models.hugging_face("llama", tie_word_embeddings=True))
    model(models.batch()[:, :-1]).logits.square().mean().backward()
    expected = model.lm_head.weight.grad
    for gradient in run(4, _gradient, {"tensor_parallel_degree": 2}):
        # fp32: some 30 sums in another order.
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-5 * expected.norm().item())


@pytest.mark.xfail(strict=True, reason="nn.Module.to_empty makes a new tensor for every name")
def test_torch():
    model = _tied().to_empty(device="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
