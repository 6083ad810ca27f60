"""Each region's forward and backward against arithmetic. If these fail, look in fsdp_tp/regions.py."""

from __future__ import annotations

import pytest
import torch

import fsdp_tp
from fsdp_tp import regions
from tests.ranks import run

SHAPES = [(3, 8, 5), (1, 17, 4)]  # on 4 ranks also 1 1 1 0, 2 2 1 0, 1 0 0 0 and 5 5 5 2


def _tensors(size, shape):
    """What each rank holds, known to all: (whole, partial of rank r, upstream gradient of rank r)."""
    generator = torch.Generator().manual_seed(8)
    whole = torch.randn(shape, dtype=torch.float64, generator=generator)
    partial = torch.randn(size, *shape, dtype=torch.float64, generator=generator)
    return whole, partial


def _check(shape, dim):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=torch.distributed.get_world_size())
    group, rank, size = mesh.tensor.get_group(), mesh.tensor_rank, mesh.tensor_size
    whole, partial = _tensors(size, shape)
    total, length = partial.sum(0), shape[dim]

    def own(x):
        chunks = x.chunk(size, dim)  # there may be fewer than ranks
        return chunks[rank] if rank < len(chunks) else x.narrow(dim, 0, 0)

    # name, this rank's input, expected output, this rank's upstream gradient, expected input gradient
    cases = [
        ("copy_to_tensor_axis", whole, whole, partial[rank], total, (), {}),
        ("reduce_from_tensor_axis", partial[rank], total, whole, whole, (), {}),
        ("split_to_tensor_axis", whole, own(whole), own(total), total, (dim,), {}),
        ("reduce_scatter_sequence", partial[rank], own(total), own(whole), whole, (dim,), {}),
    ]
    for known in [{"size": length}] if length % size else [{"size": length}, {}]:
        cases += [
            ("gather_from_tensor_axis", own(whole), whole, total, own(total), (dim,), known),
            ("gather_sequence", own(whole), whole, partial[rank], own(total), (dim,), known),
        ]
    for name, value, output, upstream, gradient, arguments, known in cases:
        x = value.clone().requires_grad_()
        y = getattr(regions, name)(x, *arguments, group, **known)
        y.backward(upstream)
        torch.testing.assert_close(y, output, rtol=0, atol=1e-14, msg=lambda m, n=name: f"{n} forward: {m}")
        torch.testing.assert_close(x.grad, gradient, rtol=0, atol=1e-14, msg=lambda m, n=name: f"{n} back: {m}")


def _check_all():
    for shape in SHAPES:
        for dim in (0, 1, 2, -1, -2):
            _check(shape, dim)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_forward_and_backward_equal_arithmetic(size):
    """Fault: sizes that the axis does not divide abort the process inside gloo."""
    run(size, _check_all)


def _wrong_sizes():
    """On every rank: one that went on alone would wait for the others."""
    group = fsdp_tp.init_mesh(tensor_parallel_degree=2).tensor.get_group()
    for gather in (regions.gather_sequence, regions.gather_from_tensor_axis):
        for size in (7, 8, 12):  # chunks 4 3, 4 4, 6 6
            with pytest.raises(ValueError, match=rf"x has size 5 along dim=\d, .* slice of size={size} as"):
                gather(torch.zeros(2, 5), 1, group, size)


def test_a_slice_of_another_length_is_refused():
    run(2, _wrong_sizes)


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


def test_sum_gradients_sums_each_once_and_leaves_frozen_ones():
    run(2, _sums)
