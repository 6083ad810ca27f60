"""An odd sequence length or hidden size that the tensor degree does not divide (torchtitan#1306, pytorch#150336).

Look in fsdp_tp/layers/split.py and fsdp_tp/layers/sequence.py.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import GPT2Config, GPT2LMHeadModel

import fsdp_tp
from tests.faults import assert_gradients_equal, gradients, outcome
from tests.ranks import run

ODD = 5
IDS = torch.randint(0, 2 * ODD + 1, (3, ODD + 1), generator=torch.Generator().manual_seed(1))


def _gpt2(heads):
    """Every size is odd, and the code of the model casts nothing to fp32."""
    sizes = dict(n_embd=ODD, n_inner=ODD, n_positions=ODD, n_head=heads, n_layer=2, vocab_size=2 * ODD + 1)
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    return fsdp_tp.initialize(GPT2LMHeadModel(GPT2Config(**sizes, **none, **ends))).double()


def _train(model):
    loss = F.cross_entropy(model(IDS[:, :-1]).logits.flatten(0, 1), IDS[:, 1:].flatten())
    loss.backward()
    return loss.item(), gradients(model)


def _check(heads):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    expected, of_one = _train(_gpt2(heads))
    for sequence_parallel in (False, True):
        loss, of_two = _train(fsdp_tp.wrap(_gpt2(heads), mesh, sequence_parallel=sequence_parallel))
        assert loss == pytest.approx(expected, rel=1e-12)
        # fp64: some hundred sums in another order. A token or feature too few is O(1).
        assert_gradients_equal(of_two, of_one, 1e-12)


@pytest.mark.parametrize("heads", [1, ODD])
def test_five_tokens_of_width_five_on_two_ranks(heads):
    """One head leaves the second rank none."""
    run(2, _check, heads)


def _mlp():
    """Of plain layers of width 5, in one process, and split by ours and by torch."""
    axis = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    outputs = []
    for split in (
        None,
        lambda model: fsdp_tp.parallelize(model, axis, plan={"0": "column", "2": "row"}),
        lambda model: parallelize_module(model, axis.tensor, {"0": ColwiseParallel(), "2": RowwiseParallel()}),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(ODD, ODD), nn.Tanh(), nn.Linear(ODD, ODD))
        if split is not None:
            split(model)
        outputs.append(outcome(lambda model=model: model(torch.eye(ODD)).detach()))
    return outputs


@functools.cache
def _results():
    return run(2, _mlp)


def test_linears_of_width_five():
    for expected, ours, _ in _results():
        torch.testing.assert_close(ours, expected)


@pytest.mark.xfail(strict=True, reason="torch takes the 3 features of one rank for half of 6")
def test_torch():
    for expected, _, torchs in _results():
        assert not isinstance(torchs, str), torchs
        torch.testing.assert_close(torchs, expected)
