"""If these fail, look in fsdp_tp/verify.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fsdp_tp
from tests import families, models
from tests.ranks import run

PLAN = {**models.TWO_LAYER_PLAN, "layers.0": "split_sequence", "position": "replicate"}


def _batch():
    return (models.batch(rows=2)[:, :-1],)


def _right(sequence_parallel, loss_parallel):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    options = dict(sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    model = models.TwoLayerNet()
    fsdp_tp.parallelize(model, mesh, plan=PLAN, verify=_batch(), **options)

    model = models.hugging_face("llama", attention_dropout=0.5)
    model.model.layers[0].eval()
    state = torch.get_rng_state()
    fsdp_tp.parallelize(model, mesh, verify=True, **options)  # which compares without dropout
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not any(module.training for module in model.model.layers[0].mlp.children())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(ValueError, match="ranks of one tensor axis got different inputs"):
        model(models.batch(torch.distributed.get_rank()))  # what is checked of the first batch, is of the user's first

    model = models.hugging_face("qwen3")
    fsdp_tp.wrap(model, mesh, verify={"input_ids": models.batch(rows=2)[:, :-1], "use_cache": False}, **options)


@pytest.mark.parametrize("options", [(False, False), (True, True)])
def test_a_right_plan_passes_and_leaves_no_trace(options):
    run(2, _right, *options)


class _Mixing(nn.Module):
    """Between its column and row layers it reads all features at once."""

    def __init__(self):
        super().__init__()
        self.up, self.mix, self.down = nn.Linear(8, 12), nn.Softmax(-1), nn.Linear(12, 8)

    def forward(self, x):
        return self.down(self.mix(self.up(x)))


class _Residual(models._MLP):
    """Reads its input outside of its column layers too."""

    def forward(self, x):
        return x + super().forward(x)


class _FixedWidth(_Mixing):
    def forward(self, x):
        return self.down(self.up(x).view(*x.shape[:-1], 3, 4).flatten(-2))


class _WrongOnOneRank(_Mixing):
    def forward(self, x):
        y = self.down(torch.tanh(self.up(x)))
        is_split = hasattr(self.up, "tensor_group")
        return y + 1 if is_split and torch.distributed.get_rank() == 1 else y


def _wrong():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    column_row = {"0.up": "column", "0.down": "row"}
    x = (torch.randn(3, 8, generator=torch.Generator().manual_seed(0)),)
    for module, sentence in (
        (_Mixing(), "first module whose output differs from the original's is 0.mix"),
        (_FixedWidth(), "the parallel model fails where the original works, so the plan does not suit it: shape"),
        (_WrongOnOneRank(), "first module whose output differs from the original's is 0;"),  # and all ranks raise
    ):
        with pytest.raises(ValueError, match=sentence):
            fsdp_tp.parallelize(nn.Sequential(module), mesh, plan=column_row, verify=x)

    unsummed = {**PLAN, "layers.*.mlp.group_norm": "replicate"}
    del unsummed["layers.*.mlp"]
    with pytest.raises(ValueError, match="all outputs agree, .* of layers.1.mlp.group_norm.weight .style 'replicate'"):
        fsdp_tp.parallelize(models.TwoLayerNet(), mesh, plan=unsummed, verify=_batch())

    model = models.TwoLayerNet()
    model.layers[1].mlp.__class__ = _Residual
    with pytest.raises(ValueError, match=r"the gradient of layers.1.norm.bias .*relative gap .* 1e-08 at most"):
        fsdp_tp.parallelize(model, mesh, plan=PLAN, verify=_batch())


def test_a_wrong_plan_is_named():
    run(2, _wrong)


def _encoder_decoder(sequence_parallel):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    fsdp_tp.parallelize(families.build("t5"), mesh, verify=True, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_decoder_gets_a_batch_of_its_own(sequence_parallel):
    run(2, _encoder_decoder, sequence_parallel)


def _refusals():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    model = families.build("t5")
    with pytest.raises(ValueError, match=r"verify=the given .* T5For.* fails on the batch \(input_ids\), before"):
        fsdp_tp.parallelize(model, mesh, verify={"input_ids": models.batch()})
    assert not any(isinstance(each, fsdp_tp.ColumnParallelLinear) for each in model.modules()), "left as it was"
    with pytest.raises(
        ValueError, match="verify=True is not enough for TwoLayerNet: only a Hugging Face model .* Pass one as verify="
    ):
        fsdp_tp.parallelize(models.TwoLayerNet(), mesh, plan=PLAN, verify=True)
    with torch.device("meta"):
        model = models.hugging_face("llama")
    with pytest.raises(ValueError, match="verify needs weights, but the model is on the meta device"):
        fsdp_tp.wrap(model, mesh, verify=True)
    assert not any(isinstance(each, fsdp_tp.ColumnParallelLinear) for each in model.modules()), "left as it was"


def test_what_it_cannot_do_is_refused_before_the_model_is_split():
    run(2, _refusals)
