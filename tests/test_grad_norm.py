"""The global norm by brute force on whole gradients. If these fail, look in fsdp_tp/grad_norm.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import fsdp_tp
from tests.ranks import run


def _parameter(whole_gradient, mesh, placements):
    """A parameter whose gradient is ``whole_gradient`` in ``placements`` on ``mesh``."""
    local = whole_gradient
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            chunks = local.chunk(mesh.size(axis), placement.dim)
            index = mesh.get_local_rank(axis)
            local = chunks[index] if index < len(chunks) else local[:0]
        elif isinstance(placement, Partial):
            local = local / mesh.size(axis)
    shape, stride = whole_gradient.shape, whole_gradient.stride()
    final = [Replicate() if isinstance(placement, Partial) else placement for placement in placements]
    make = lambda tensor, where: DTensor.from_local(  # noqa: E731
        tensor.contiguous(), mesh, where, run_check=False, shape=shape, stride=stride
    )
    parameter = nn.Parameter(make(torch.zeros_like(local if final == placements else whole_gradient), final))
    parameter.grad = make(local.clone(), placements)
    return parameter


def _mix(norm_type):
    """Gradients of different meshes and placements, uneven and empty shards, and a plain tensor."""
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2, hybrid_shard_degree=2)
    three = mesh.device_mesh["replicate", "shard", "tensor"]
    kinds = [
        (three, [Replicate(), Shard(0), Shard(1)]),
        (three, [Replicate(), Shard(0), Replicate()]),
        (mesh.fsdp, [Replicate(), Shard(0)]),
        (mesh.tensor, [Shard(0)]),
        (mesh.tensor, [Replicate()]),
        (mesh.tensor, [Partial()]),
    ]
    generator = torch.Generator().manual_seed(3)
    wholes = [torch.randn(rows, 4, generator=generator) for rows in (6, 5, 1, 4, 3, 2)]
    plain = nn.Parameter(torch.zeros(5))
    plain.grad = torch.randn(5, generator=generator)
    no_gradient = nn.Parameter(torch.zeros(5))
    parameters = [_parameter(whole, *kind) for whole, kind in zip(wholes, kinds, strict=True)]
    expected = torch.linalg.vector_norm(torch.cat([w.flatten().double() for w in [*wholes, plain.grad]]), norm_type)
    before = plain.grad.clone()
    norm = fsdp_tp.clip_grad_norm_([*parameters, plain, no_gradient], 0.5, norm_type)
    assert type(norm) is torch.Tensor
    # fp32 norms of each tensor, added in fp64.
    torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
    factor = 0.5 / (expected.item() + 1e-6)
    torch.testing.assert_close(plain.grad, before * factor)
    for parameter, whole in zip(parameters, wholes, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), whole * factor, rtol=1e-5, atol=1e-7)
    return norm.item()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
def test_every_mix_of_meshes_equals_brute_force_on_every_rank(norm_type):
    """Faults: mixed meshes raise; replicas counted once a rank; the logged norm is a local one."""
    assert len(set(run(8, _mix, norm_type))) == 1


def _details():
    parameter = nn.Parameter(torch.zeros(4))
    assert fsdp_tp.clip_grad_norm_([parameter], 1.0) == 0
    parameter.grad = torch.full((4,), 0.1)
    assert fsdp_tp.clip_grad_norm_(parameter, 1.0).item() == pytest.approx(0.2)
    assert torch.equal(parameter.grad, torch.full((4,), 0.1)), "below the bound nothing is scaled"
    assert fsdp_tp.clip_grad_norm_(iter([parameter]), math.inf).item() == pytest.approx(0.2)
    parameter.grad = torch.tensor([1.0, math.nan, 0, 0])
    with pytest.raises(RuntimeError, match="the gradient norm of order 2.0 is nan"):
        fsdp_tp.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)
    # Squares of 1e30 overflow fp32; the norm does not.
    parameter.grad = torch.full((4,), 1e30)
    assert fsdp_tp.clip_grad_norm_([parameter], math.inf).item() == pytest.approx(2e30)
    for dtype in (torch.bfloat16, torch.float64):
        parameter = nn.Parameter(torch.zeros(4, dtype=dtype))
        parameter.grad = torch.full((4,), 3.0, dtype=dtype)
        assert fsdp_tp.clip_grad_norm_([parameter], 3.0).item() == 6.0
        torch.testing.assert_close(parameter.grad, torch.full((4,), 1.5, dtype=dtype))


def test_details_on_one_process():
    run(1, _details)


def _pipeline():
    """Two stages with different parameters: the norm spans both."""
    mesh = fsdp_tp.init_mesh(pipeline_parallel_degree=2)
    stage = mesh.coordinate.pipeline
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 0.0]) if stage == 0 else torch.tensor([0.0, 4.0])
    return fsdp_tp.clip_grad_norm_([parameter], 100.0, mesh=mesh).item()


def test_the_pipeline_axis_adds_its_stages():
    assert run(2, _pipeline) == [5.0, 5.0]
