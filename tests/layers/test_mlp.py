"""fp64 against an mlp of nn.Linear on one process. If these fail, look in fsdp_tp/layers/mlp.py and linear.py.

The bounds: fp64 rounds at 1e-16, and the down product sums 1409 terms of order 1: 1e-12 for outputs, and for
gradients, which sum over tokens too, 1e-11. A missing or doubled sum is wrong by O(0.1).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fsdp_tp
from fsdp_tp.layers import ParallelMLP, SequenceLength
from fsdp_tp.layers.mlp import ACTIVATIONS
from tests.collectives import CollectiveCounter
from tests.models import gather
from tests.ranks import run

HIDDEN, WIDTH, ROWS, SEQUENCE = 6, 1409, 2, 7

FUNCTIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": lambda x: x.clamp(min=0),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "softplus": lambda x: torch.log(1 + torch.exp(x)),
    "tanh": lambda x: (torch.exp(x) - torch.exp(-x)) / (torch.exp(x) + torch.exp(-x)),
}


def _compare(mesh, width, activation, gated, bias, sequence_parallel):
    torch.manual_seed(3)
    gate = nn.Linear(HIDDEN, width, bias, dtype=torch.float64) if gated else None
    up = nn.Linear(HIDDEN, width, bias, dtype=torch.float64)
    down = nn.Linear(width, HIDDEN, bias, dtype=torch.float64)
    torch.manual_seed(3)  # the layer draws the same initial weights, in this order
    layer = ParallelMLP(
        HIDDEN, width, gated=gated, activation=activation, bias=bias, mesh=mesh, sequence_parallel=sequence_parallel,
        dtype=torch.float64,
    )  # fmt: skip
    x = torch.randn(ROWS, SEQUENCE, HIDDEN, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x)
    function = FUNCTIONS[activation]
    expected = down(function(gate(x)) * up(x) if gated else function(up(x)))
    expected.backward(grad)

    def own(whole):
        parts = [*whole.split(-(-SEQUENCE // mesh.tensor_size), 1), whole.narrow(1, 0, 0)]
        return parts[min(mesh.tensor_rank, len(parts) - 1)] if sequence_parallel else whole

    if sequence_parallel:
        layer.sequence_length = SequenceLength()
        layer.sequence_length.note(x)
    local = own(x).detach().clone().requires_grad_()
    actual = layer(local)
    actual.backward(own(grad))
    torch.testing.assert_close(actual, own(expected), rtol=0, atol=1e-12)
    torch.testing.assert_close(local.grad, own(x.grad), rtol=0, atol=1e-11)
    whole = nn.ModuleDict({"gate_proj": gate, "up_proj": up, "down_proj": down})
    assert {name for name, _ in layer.named_parameters()} == {name for name, _ in whole.named_parameters()}
    for name, parameter in layer.named_parameters():
        plain = whole.get_parameter(name)
        assert torch.equal(gather(parameter), plain)
        torch.testing.assert_close(gather(parameter.grad), plain.grad, rtol=0, atol=1e-11, msg=name)


def _all(ranks):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=ranks)
    for activation in ACTIVATIONS:
        _compare(mesh, WIDTH, activation, activation != "sigmoid", False, False)
    _compare(mesh, WIDTH, "silu", True, True, True)
    _compare(mesh, 12, "gelu", False, True, True)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_width_on_any_degree_equals_one_process(ranks):
    """Width 1409 divides by none; sigmoid and softplus of a padded column would not be 0."""
    run(ranks, _all, ranks)


def _details():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    layer = ParallelMLP(HIDDEN, 12, mesh=mesh)
    with CollectiveCounter(mesh) as counter:
        layer(torch.randn(2, 3, HIDDEN, requires_grad=True)).sum().backward()
    assert dict(counter.counts) == {("all_reduce", "tensor"): 2}
    with pytest.raises(ValueError, match=r"activation='swish' must be one of 'gelu', 'gelu_tanh', 'relu'"):
        ParallelMLP(HIDDEN, 12, activation="swish", mesh=mesh)


def test_two_collectives_a_module_and_step_and_a_wrong_activation():
    run(2, _details)
