"""Rotary buffers are lost or cast after meta initialisation (transformers#45902, SkyRL#1709).

Look in fsdp_tp/initialize.py: Hugging Face's ``_init_weights`` fills them, and what is left unset is an error.
"""

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_tp
from tests import models
from tests.ranks import run

# Of no other test, so that freed memory cannot hold the right numbers by chance.
ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}}


def _from_meta(degrees):
    mesh = fsdp_tp.init_mesh(**degrees)
    with torch.device("meta"):
        model = models.hugging_face("llama", **ROTARY)
    fsdp_tp.wrap(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert model(models.batch()).logits.dtype == torch.bfloat16
    return model.model.rotary_emb.inv_freq


@pytest.mark.parametrize("degrees", [{}, {"tensor_parallel_degree": 2}])
def test_inv_freq_is_bitwise_that_of_a_cpu_model_and_stays_in_fp32(degrees):
    expected = models.hugging_face("llama", **ROTARY).model.rotary_emb.inv_freq
    for buffer in run(2, _from_meta, degrees):
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, expected)


@pytest.mark.xfail(strict=True, reason="to_empty leaves buffers that no checkpoint holds uninitialised")
def test_torch():
    with torch.device("meta"):
        model = models.hugging_face("llama", **ROTARY)
    model.to_empty(device="cpu")
    assert torch.equal(
        model.model.rotary_emb.inv_freq, models.hugging_face("llama", **ROTARY).model.rotary_emb.inv_freq
    )
