"""Sequences of every length, against one process in fp64. If these fail, look in fsdp_tp/layers/sequence.py,
then in the regions (tests/test_regions.py).

Gradients are sums of some 500 fp64 terms: 1e-11. A bias or norm gradient that misses a rank's tokens, or
counts them twice, is wrong by O(1).
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint

import fsdp_tp
from fsdp_tp.layers import ColumnParallelLinear, RowParallelLinear, SequenceLength
from tests import models
from tests.ranks import run

LENGTHS = (17, 5, 8, 1)  # on 4 ranks: 5 5 5 2, 2 2 1 0, 2 2 2 2, 1 0 0 0
SPLIT_LATE = {"layers.0": "split_sequence"}


def _models():
    torch.manual_seed(9)
    reference = models.TwoLayerNet()
    del reference.position
    reference.position = 0.0
    return reference, copy.deepcopy(reference)


def _loss(model, length):
    ids = models.batch(rows=2, sequence=length)[:, :-1]
    generator = torch.Generator().manual_seed(length)
    return (model(ids) * torch.randn(*ids.shape, models.VOCABULARY, dtype=torch.float64, generator=generator)).sum()


def _compare(split_late, activation_checkpointing, backward_at_once):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=torch.distributed.get_world_size())
    reference, model = _models()
    fsdp_tp.wrap(
        model,
        mesh,
        plan=models.TWO_LAYER_PLAN | (SPLIT_LATE if split_late else {}),
        sequence_parallel=True,
        activation_checkpointing=activation_checkpointing,
    )
    losses = []
    for length in LENGTHS:
        expected, actual = _loss(reference, length), _loss(model, length)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        expected.backward()
        losses.append(actual)
        if backward_at_once:
            losses.pop().backward()
    if losses:
        torch.stack(losses).sum().backward()
    for (name, parameter), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            models.gather(parameter.grad), whole.grad, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


def _all_variants():
    for split_late in (False, True):
        for activation_checkpointing in ("none", "full"):
            for backward_at_once in (True, False):
                _compare(split_late, activation_checkpointing, backward_at_once)


@pytest.mark.parametrize("tensor", [2, 4])
def test_micro_batches_of_different_lengths_accumulate_the_gradients_of_one_process(tensor):
    """Fault: an odd sequence length. Recomputed blocks gather as long a sequence as in their own forward."""
    run(tensor, _all_variants)


def _foreign_recomputation():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    _, model = _models()
    fsdp_tp.parallelize(model, mesh, plan=models.TWO_LAYER_PLAN, sequence_parallel=True)
    for layer in model.layers:
        checkpoint(layer)
    first = _loss(model, 8)
    _loss(model, 12)
    with pytest.raises(ValueError, match=r"a slice of 4 tokens, but rank . of 2 has 6 of the 12 of the latest forward"):
        first.backward()


def test_a_recomputation_after_a_forward_of_another_length_is_refused():
    run(2, _foreign_recomputation)


def _own(x, mesh):
    chunks = x.chunk(mesh.tensor_size, 1)
    return chunks[mesh.tensor_rank] if mesh.tensor_rank < len(chunks) else x[:, :0]


def _layers_alone():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=4)
    torch.manual_seed(3)
    up, down = nn.Linear(6, 8, dtype=torch.float64), nn.Linear(8, 6, dtype=torch.float64)
    column = ColumnParallelLinear.from_linear(up, mesh=mesh, sequence_parallel=True)
    row = RowParallelLinear.from_linear(down, mesh=mesh, sequence_parallel=True)
    column.sequence_length = SequenceLength()
    for length in (17, 5, 8):
        x = torch.randn(2, length, 6, dtype=torch.float64, requires_grad=True)
        expected = down(torch.sin(up(x)))
        column.sequence_length.note(x)
        part = _own(x.detach(), mesh).requires_grad_()
        actual = row(torch.sin(column(part)))
        torch.testing.assert_close(actual, _own(expected, mesh), rtol=0, atol=1e-12)
        grad = torch.randn_like(expected)
        expected.backward(grad)
        actual.backward(_own(grad, mesh))
        torch.testing.assert_close(part.grad, _own(x.grad, mesh), rtol=0, atol=1e-12)
    for layer, linear in ((column, up), (row, down)):
        for own_parameter, parameter in zip(layer.parameters(), linear.parameters(), strict=True):
            torch.testing.assert_close(models.gather(own_parameter.grad), parameter.grad, rtol=0, atol=1e-12)


def test_layers_of_ones_own_are_told_the_length():
    run(4, _layers_alone)


def _many_lengths():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    _, model = _models()
    fsdp_tp.parallelize(model, mesh, plan=models.TWO_LAYER_PLAN, sequence_parallel=True)
    compiled = 0

    def backend(graph, example_inputs):
        nonlocal compiled
        compiled += 1
        return graph

    model.layers[0].compile(fullgraph=True, backend=backend)
    for length in range(5, 9):
        _loss(model, length)
    before = compiled
    for length in range(9, 15):
        _loss(model, length)
    assert compiled == before


def test_a_compiled_block_is_not_compiled_anew_for_every_length():
    """Only while torch learns that lengths differ, and that the axis divides some of them."""
    run(2, _many_lengths)
