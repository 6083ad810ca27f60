"""Dropout of other people's models. If these fail, look in tests/layers/test_dropout.py, then fsdp_tp/dropouts.py.

Models in fp64, but for the casts to fp32 inside of Hugging Face's norms and softmax: 1e-5 of the largest number. One
other mask is wrong by O(0.1).
"""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import fsdp_tp
from fsdp_tp import dropouts
from fsdp_tp.borders import View
from fsdp_tp.dropouts import _DropoutBesideRow, place_dropouts
from fsdp_tp.layers import Dropout, RowParallelLinear
from fsdp_tp.layers.canonical import arrangement_of
from fsdp_tp.layers.split import Split
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


def _phi3():
    """The attention function of the model, as its attention modules see it; of a copy too."""
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    model = build("phi3", attention_dropout=0.1)
    fsdp_tp.parallelize(model, mesh)
    attention, config = model.model.layers[0].self_attn, model.config
    seen = [attention.config._attn_implementation]
    view = pickle.loads(pickle.dumps(attention.config))
    duplicate, own = copy.deepcopy((config, attention.config))
    model.set_attn_implementation("eager")
    seen.append(attention.config._attn_implementation)
    duplicate._attn_implementation = "sdpa"
    seen += [own._attn_implementation, view._attn_implementation]
    return seen, [each.num_attention_heads for each in (attention.config, own, view, config)]


def test_a_later_change_of_the_config_reaches_attention_with_its_own_number_of_heads():
    for seen, heads in run(2, _phi3):
        assert seen == ["fsdp_tp", "eager", "sdpa", "fsdp_tp"]
        assert heads == [2, 2, 2, 4]


def test_a_view_knows_the_other_names_of_a_value():
    config = transformers.GPT2Config(n_head=4)
    view = View(config)
    view.replace("n_head", 2)
    assert (view.n_head, view.num_attention_heads, config.n_head) == (2, 2, 4)
    view.num_attention_heads = 1
    view.n_layer = 3
    assert (view.n_head, config.n_head, config.num_hidden_layers) == (1, 4, 3)
    with pytest.raises(AttributeError, match="unheard_of"):
        _ = view.unheard_of


def _warned_of(family, settings, renamed):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    model = build(family, **settings)
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        if renamed:
            patch.setattr(dropouts, "_QUERIES", ())
        fsdp_tp.parallelize(model, mesh)
    model.train()(models.batch())
    return [str(each.message) for each in caught if "each rank draws its own masks" in str(each.message)]


@pytest.mark.parametrize(
    ("family", "settings", "renamed", "named"),
    [
        # beside nn.Dropout modules, F.dropout in a function and in a class
        ("falcon", dict(attention_dropout=0.1, hidden_dropout=0.2), False, "config.hidden_dropout"),
        ("opt", dict(dropout=0.1), False, "config.dropout"),
        # attention of whose layers none is known to make the queries
        ("bert", dict(attention_probs_dropout_prob=0.1), True, "config.attention_probs_dropout_prob"),
    ],
)
def test_dropout_out_of_reach_is_warned_of(family, settings, renamed, named):
    for found in run(2, _warned_of, family, settings, renamed):
        assert len(found) == 1
        assert named in found[0]


def _split_heads():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    row = RowParallelLinear(12, 8, mesh=mesh, split=Split.even(4, 2).blocks(3))
    drop = _DropoutBesideRow(0.5, mesh=mesh, row=row, sequence_parallel=False)
    drop(torch.ones(2, 2, 5, 5))
    before = {name: id(value) for name, value in vars(drop).items()}, drop.heads(2)
    for x in (torch.ones(2, 5, 8), torch.ones(2, 5, 6), torch.ones(2, 2, 5, 5)):
        drop(x)
    assert before[0] == {name: id(value) for name, value in vars(drop).items()}
    assert drop.heads(2) is before[1]
    assert before[1] == Split.even(4, 2)


def test_the_split_of_heads_is_made_once():
    run(2, _split_heads)
