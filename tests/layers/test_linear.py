"""fp64 against nn.Linear on one process. If these fail, look in fsdp_tp/layers/linear.py and regions.py.

The bound 1e-12 is fp64's rounding (1e-16) times the length of the sums here (some hundred
terms), with room; a missing or doubled sum is wrong by O(1).
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fsdp_tp
from fsdp_tp.layers import ColumnParallelLinear, RowParallelLinear
from tests.ranks import run

BOUND = 1e-12
IN, OUT, SEQUENCE = 24, 16, 8


def _reference(rows, bias, sizes, seed=5):
    torch.manual_seed(seed)
    linear = nn.Linear(*sizes, bias=bias, dtype=torch.float64)
    x = torch.randn(rows, SEQUENCE, sizes[0], dtype=torch.float64, requires_grad=True)
    grad = torch.randn(rows, SEQUENCE, sizes[1], dtype=torch.float64)
    return linear, x, grad


def _own(x, dim, mesh):
    chunks = [*x.chunk(mesh.tensor_size, dim), x.narrow(dim, 0, 0)]
    return chunks[min(mesh.tensor_rank, len(chunks) - 1)]


def _close(actual, expected):
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=0, atol=BOUND)


def _column(rows, bias, sequence_parallel, gather_output, sizes):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=torch.distributed.get_world_size())
    linear, x, grad = _reference(rows, bias, sizes)
    layer = ColumnParallelLinear.from_linear(
        linear, mesh=mesh, sequence_parallel=sequence_parallel, gather_output=gather_output
    )
    expected = linear(x)
    expected.backward(grad)
    local = (_own(x, 1, mesh) if sequence_parallel else x).detach().clone().requires_grad_()
    actual = layer(local)
    actual.backward(grad if gather_output else _own(grad, -1, mesh))
    _close(actual, expected if gather_output else _own(expected, -1, mesh))
    if not gather_output:  # nothing is reduced: the bits of the same product on one process
        own_bias = _own(linear.bias, 0, mesh) if bias else None
        assert torch.equal(actual, F.linear(x, _own(linear.weight, 0, mesh), own_bias))
    _close(local.grad, _own(x.grad, 1, mesh) if sequence_parallel else x.grad)
    _close(_local(layer.weight.grad), _own(linear.weight.grad, 0, mesh))
    if bias:
        _close(_local(layer.bias.grad), _own(linear.bias.grad, 0, mesh))


def _row(rows, bias, sequence_parallel, input_is_parallel, sizes):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=torch.distributed.get_world_size())
    linear, x, grad = _reference(rows, bias, sizes)
    layer = RowParallelLinear.from_linear(
        linear, mesh=mesh, sequence_parallel=sequence_parallel, input_is_parallel=input_is_parallel
    )
    expected = linear(x)
    expected.backward(grad)
    local = (_own(x, -1, mesh) if input_is_parallel else x).detach().clone().requires_grad_()
    actual = layer(local)
    actual.backward(_own(grad, 1, mesh) if sequence_parallel else grad)
    _close(actual, _own(expected, 1, mesh) if sequence_parallel else expected)
    _close(local.grad, _own(x.grad, -1, mesh) if input_is_parallel else x.grad)
    _close(_local(layer.weight.grad), _own(linear.weight.grad, 1, mesh))
    if bias:
        _close(_local(layer.bias.grad), linear.bias.grad)


def _local(gradient):
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def _all_cases(check):
    sizes = [(IN, OUT), (13, 7)]  # the second is a multiple of no degree
    for *options, each in itertools.product((1, 3), *[(False, True)] * 3, sizes):
        check(*options, each)
    # Gathered features and slices of whole ones are chunks, also where 5 of them leave the last of 4 ranks nothing.
    check(2, True, False, check is _column, (9, 5) if check is _column else (5, 9))


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("check", [_column, _row])
def test_forward_and_gradients_equal_one_process(check, tensor):
    """Odd batches, with and without bias, sequence parallelism, and gathering or splitting."""
    run(tensor, _all_cases, check)


def _mlp_with_shared_input(sequence_parallel):
    """gate and up read one input whose gradient is reduced once; the product is a real mlp."""
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    torch.manual_seed(3)
    gate, up = (nn.Linear(IN, OUT, dtype=torch.float64) for _ in range(2))
    down = nn.Linear(OUT, IN, dtype=torch.float64)
    x = torch.randn(3, SEQUENCE, IN, dtype=torch.float64, requires_grad=True)
    expected = down(torch.sin(gate(x)) * up(x))
    expected.sum().backward()
    kinds = (ColumnParallelLinear, ColumnParallelLinear, RowParallelLinear)
    options = ({"shared_input": True}, {"shared_input": True}, {"sequence_parallel": sequence_parallel})
    layers = [
        kind.from_linear(linear, mesh=mesh, **option)
        for kind, linear, option in zip(kinds, (gate, up, down), options, strict=True)
    ]
    group = mesh.tensor.get_group()
    local = (_own(x, 1, mesh) if sequence_parallel else x).detach().clone().requires_grad_()
    if sequence_parallel:
        entered = fsdp_tp.regions.gather_sequence(local, 1, group)
    else:
        entered = fsdp_tp.regions.copy_to_tensor_axis(local, group)
    actual = layers[2](torch.sin(layers[0](entered)) * layers[1](entered))
    actual.sum().backward()
    _close(actual, _own(expected, 1, mesh) if sequence_parallel else expected)
    _close(local.grad, _own(x.grad, 1, mesh) if sequence_parallel else x.grad)
    for layer, linear, dim in zip(layers, (gate, up, down), (0, 0, 1), strict=True):
        _close(_local(layer.weight.grad), _own(linear.weight.grad, dim, mesh))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_that_share_an_input_reduce_its_gradient_once(sequence_parallel):
    run(2, _mlp_with_shared_input, sequence_parallel)


def _constructed():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=torch.distributed.get_world_size())
    torch.manual_seed(11)
    layers = ColumnParallelLinear(IN, OUT, mesh=mesh), RowParallelLinear(IN, OUT, mesh=mesh)
    assert all(isinstance(layer, nn.Linear) for layer in layers)
    assert [(layer.in_features, layer.out_features) for layer in layers] == [(IN, OUT)] * 2
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for layer in layers for p in layer.parameters()]


def test_initial_weights_are_those_of_nn_linear_bit_for_bit():
    torch.manual_seed(11)
    expected = [p.detach() for _ in range(2) for p in nn.Linear(IN, OUT).parameters()]
    for tensor in (1, 2, 4):
        for rank_weights in run(tensor, _constructed):
            assert all(torch.equal(a, b) for a, b in zip(rank_weights, expected, strict=True))


def _from_linear_details():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    linear = nn.Linear(IN, OUT).to(torch.bfloat16).eval()
    linear.weight.requires_grad_(False)
    seen = []
    linear.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    before = linear.weight.clone()
    layer = ColumnParallelLinear.from_linear(linear, mesh=mesh)
    layer(torch.zeros(2, 1, IN, dtype=torch.bfloat16))
    assert seen == [(2, 1, OUT // 2)]
    assert (layer.weight.dtype, layer.training) == (torch.bfloat16, False)
    assert not layer.weight.requires_grad
    assert layer.bias.requires_grad
    layer.register_forward_pre_hook(lambda module, args: seen.append("new layer only"))
    linear(torch.zeros(2, 1, IN, dtype=torch.bfloat16))
    assert seen[1:] == [(2, 1, OUT)]
    with torch.no_grad():
        layer.weight.to_local().zero_()
    assert torch.equal(linear.weight, before)
    with pytest.raises(ValueError, match="takes the place of nn.Linear, not of NonDynamicallyQuantizableLinear"):
        ColumnParallelLinear.from_linear(nn.modules.linear.NonDynamicallyQuantizableLinear(4, 4), mesh=mesh)
    with pytest.raises(ValueError, match="must be a ParallelMesh or a DeviceMesh"):
        ColumnParallelLinear(4, 4, mesh=None)


def test_from_linear_keeps_hooks_mode_dtype_and_frozen_and_refuses_what_it_cannot_split():
    run(2, _from_linear_details)
