"""Dropout of other people's models. If these fail, look in tests/layers/test_dropout.py, then fsdp_tp/dropouts.py.

Models in fp64, but for the casts to fp32 inside of Hugging Face's norms and softmax: 1e-5 of the largest number. One
other mask is wrong by O(0.1).
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fsdp_tp
from fsdp_tp.dropouts import _DropoutBesideRow, place_dropouts
from fsdp_tp.layers import Dropout
from fsdp_tp.layers.canonical import arrangement_of
from tests import models
from tests.families import build
from tests.ranks import run

DROPOUT = {
    "llama": dict(attention_dropout=0.3, attention_bias=True),
    "gpt_neox": dict(attention_dropout=0.3, hidden_dropout=0.2),
    "gpt2": dict(attn_pdrop=0.3, resid_pdrop=0.2, embd_pdrop=0.1, n_inner=96),
    "phi3": dict(attention_dropout=0.1),
    "bert": dict(attention_probs_dropout_prob=0.1, hidden_dropout_prob=0.1),
    "t5": dict(dropout_rate=0.1),
}
LAYOUTS = [(2, 1, False), (2, 1, True), (4, 1, False), (2, 2, True)]


def _logits(model, ids):
    if model.config.is_encoder_decoder:
        return model(input_ids=ids.flip(1), decoder_input_ids=ids[:, :-1]).logits
    return model(ids[:, :-1]).logits


def _step(family, tensor, shard, sequence_parallel):
    """The logits of this rank's rows, and what whole weights have as gradients."""
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=tensor, hybrid_shard_degree=shard)
    torch.manual_seed(2)
    model = build(family, **DROPOUT[family]).double().train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # no dropout is left to chance
        if tensor == 1:
            place_dropouts(model, mesh, {})
        else:
            fsdp_tp.parallelize(model, mesh, sequence_parallel=sequence_parallel)
    assert all(isinstance(each, Dropout) for each in model.modules() if isinstance(each, nn.Dropout) and each.p)
    ids = models.batch(sequence=7).chunk(mesh.data_size)[mesh.data_rank]
    torch.manual_seed(4)
    logits = _logits(model, ids)
    F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        path, _, own = name.rpartition(".")
        arrangement = arrangement_of(model.get_submodule(path), own)
        gradients[name] = models.gather(parameter.grad)
        if arrangement is not None:
            gradients[name] = arrangement[0].restore(gradients[name], arrangement[1])
        torch.distributed.all_reduce(gradients[name], group=mesh.data.get_group())
    with torch.no_grad():
        assert not torch.equal(_logits(model, ids), logits), "dropout was not on"
    return mesh.data_rank, logits.detach(), gradients


@pytest.mark.parametrize("family", DROPOUT)
def test_a_hugging_face_model_drops_the_same_on_every_layout(family):
    _, logits, gradients = run(1, _step, family, 1, 1, False)[0]
    for tensor, shard, sequence_parallel in LAYOUTS:
        for data_rank, own, found in run(tensor * shard, _step, family, tensor, shard, sequence_parallel):
            expected = logits[data_rank * len(own) :][: len(own)]
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-5 * logits.abs().max().item())
            for name, gradient in gradients.items():
                bound = 1e-5 * gradient.abs().max().item() + 1e-9
                torch.testing.assert_close(found[name], gradient, rtol=0, atol=bound, msg=name)


class _Attention(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(hidden, inner), nn.Dropout(0.5), nn.Linear(inner, hidden)

    def forward(self, x):
        return self.drop(self.down(self.drop(self.up(x))))


def _by_width():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    plan = {"0.up": "column", "0.down": "row", "1": "replicate"}
    for inner, is_clear in ((12, True), (16, False)):
        torch.manual_seed(3)
        model = nn.Sequential(_Attention(8, inner), nn.Linear(8, 8))
        if not is_clear:  # 8 features go into the row layer and come out of it
            with pytest.warns(UserWarning, match=r"dropout \(0.drop\): each rank draws its own masks"):
                fsdp_tp.parallelize(model, mesh, plan=plan)
            continue
        fsdp_tp.parallelize(model, mesh, plan=plan)
        assert isinstance(model[0].drop, _DropoutBesideRow)
        with pytest.raises(ValueError, match="dropout of 5 features beside a row layer that reads 6 on this rank and"):
            model[0].drop(torch.ones(2, 3, 5))


def test_a_dropout_beside_a_row_layer_tells_its_place_from_the_width():
    run(2, _by_width)
