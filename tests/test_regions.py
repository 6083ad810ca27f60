"""Each region's forward and backward against arithmetic. If these fail, look in fsdp_tp/regions.py."""

from __future__ import annotations

import pytest
import torch

import fsdp_tp
from fsdp_tp import regions
from tests.ranks import run


def _tensors(size):
    """What each rank holds, known to all: (whole, partial of rank r, upstream gradient of rank r)."""
    generator = torch.Generator().manual_seed(8)
    whole = torch.randn(3, 8, 4, dtype=torch.float64, generator=generator)
    partial = torch.randn(size, 3, 8, 4, dtype=torch.float64, generator=generator)
    return whole, partial


def _check():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=torch.distributed.get_world_size())
    group, rank, size = mesh.tensor.get_group(), mesh.tensor_rank, mesh.tensor_size
    whole, partial = _tensors(size)
    total = partial.sum(0)

    def own(x, dim):
        return x.chunk(size, dim)[rank]

    for dim in (0, 1, 2, -1, -2):
        if whole.shape[dim] % size:
            continue
        # name, this rank's input, expected output, this rank's upstream gradient, expected input gradient
        cases = [
            ("copy_to_tensor_axis", whole, whole, partial[rank], total, ()),
            ("reduce_from_tensor_axis", partial[rank], total, whole, whole, ()),
            ("split_to_tensor_axis", whole, own(whole, dim), own(total, dim), total, (dim,)),
            ("gather_from_tensor_axis", own(whole, dim), whole, total, own(total, dim), (dim,)),
            ("gather_sequence", own(whole, dim), whole, partial[rank], own(total, dim), (dim,)),
            ("reduce_scatter_sequence", partial[rank], own(total, dim), own(whole, dim), whole, (dim,)),
        ]
        for name, value, output, upstream, gradient, arguments in cases:
            x = value.clone().requires_grad_()
            y = getattr(regions, name)(x, *arguments, group)
            y.backward(upstream)
            torch.testing.assert_close(y, output, rtol=0, atol=1e-14, msg=lambda m, n=name: f"{n} forward: {m}")
            torch.testing.assert_close(x.grad, gradient, rtol=0, atol=1e-14, msg=lambda m, n=name: f"{n} back: {m}")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_forward_and_backward_equal_arithmetic(size):
    run(size, _check)


def _sums():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    rank = mesh.tensor_rank
    a = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    frozen = torch.zeros(2)
    b = torch.zeros(2, 2, requires_grad=True)
    unused = torch.zeros(1, requires_grad=True)
    out = regions.sum_gradients([a, frozen, b, unused], mesh.tensor.get_group())
    assert out[1] is frozen
    # 1 + 2^-9 is not a bf16 number: two ranks' 1 and 2^-9 sum to 1 there, once and in order.
    (out[0].float().sum() * (1.0 if rank == 0 else 2.0**-9)).backward(retain_graph=True)
    (out[2].sum() * (rank + 1)).backward()
    assert torch.equal(a.grad, torch.ones(3, dtype=torch.bfloat16))
    assert torch.equal(b.grad, torch.full((2, 2), 3.0))
    with pytest.raises(ValueError, match=r"split_to_tensor_axis: dim 0 of a tensor of shape \(3,\) must be a multiple"):
        regions.split_to_tensor_axis(torch.zeros(3), 0, mesh.tensor.get_group())


def test_sum_gradients_sums_each_once_and_leaves_frozen_ones():
    run(2, _sums)
