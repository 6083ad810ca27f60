"""A loss spike, or too high a first loss, when fine-tuning with a tensor axis (SageMaker model parallelism 2.4, 2.5).

Weights are lost, permuted or drawn anew on the way into the parallel model. Look in fsdp_tp/parallelize.py and
fsdp_tp/wrap.py: real weights are copied, never initialised.
"""

import pytest
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import fsdp_tp
from tests import models
from tests.ranks import run


def _loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).logits.float().flatten(0, 1), ids[:, 1:].flatten())


def _first_loss(directory, degrees, options):
    mesh = fsdp_tp.init_mesh(**degrees)
    model = fsdp_tp.wrap(AutoModelForCausalLM.from_pretrained(directory), mesh, **options)
    ids = models.batch(7).chunk(mesh.data_size)[mesh.data_rank]
    return fsdp_tp.global_mean(_loss(model, ids).detach(), 1, mesh).item()


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen3", False)])
def test_the_first_loss_is_that_of_one_process(tmp_path, family, tied):
    """Of a model that is far from its initial weights."""
    model = fsdp_tp.initialize(models.hugging_face(family, tie_word_embeddings=tied), seed=11)
    for parameter in model.parameters():
        parameter.data.mul_(3)
    model.save_pretrained(tmp_path)
    expected = _loss(model, models.batch(7)).item()
    fresh = _loss(fsdp_tp.initialize(models.hugging_face(family, tie_word_embeddings=tied)), models.batch(7)).item()
    assert abs(expected - fresh) > 0.1, "fresh weights would be noticed"
    for degrees in ({"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}, {"hybrid_shard_degree": 2}):
        for options in ({}, {"sequence_parallel": True}):
            assert run(4, _first_loss, tmp_path, degrees, options) == pytest.approx([expected] * 4, rel=1e-5)
