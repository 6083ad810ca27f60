"""Replicated gradients counted tensor-degree times in the norm (torchtune#2420, NeMo-RL PR 3788).

A norm by hand sums the squares of every rank's gradients over the tensor axis. Look in fsdp_tp/grad_norm.py.
"""

import math

import pytest
import torch
import torch.distributed as dist

import fsdp_tp
from tests.faults import PLAN, Block, rows
from tests.ranks import run


def _norms():
    """One value of p after another, and the tempting wrong one."""
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    model, reference = Block(), Block()
    fsdp_tp.parallelize(model, mesh, plan=PLAN)
    for each in (model, reference):
        each(rows()).square().mean().backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in reference.parameters()])
    expected, ours = {}, {}
    for p in (1.0, 2.0, math.inf):
        expected[p] = torch.linalg.vector_norm(gradients, p).item()
        ours[p] = fsdp_tp.clip_grad_norm_(model.parameters(), math.inf, p).item()
    squares = sum(parameter.grad.to_local().square().sum() for parameter in model.parameters())
    dist.all_reduce(squares, group=mesh.tensor.get_group())
    return expected, ours, squares.sqrt().item()


def test_each_replicated_gradient_counts_once():
    for expected, ours, naive in run(2, _norms):
        assert ours == pytest.approx(expected, rel=1e-12)
        assert naive > expected[2.0] * 1.0001, "nothing here is replicated: the test would show nothing"
