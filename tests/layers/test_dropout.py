"""Masks that do not depend on the layout. If these fail, look in fsdp_tp/layers/dropout.py.

Masks are compared bit for bit; outputs and gradients in fp64, bounds as in test_attention.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fsdp_tp
from fsdp_tp.layers import Dropout, ParallelAttention, ParallelMLP, SequenceLength
from fsdp_tp.layers.canonical import arrangement_of
from fsdp_tp.layers.dropout import keep_mask
from fsdp_tp.layers.heads import HeadLayout
from fsdp_tp.layers.split import ZERO, Split
from tests.models import gather
from tests.ranks import run

ROWS, SEQUENCE, HIDDEN, HEADS, KV = 4, 7, 36, 9, 3


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_rate_and_the_independence_of_neighbours_and_seeds(p):
    """Within 5 standard deviations of the binomial: once in 10^6 tests, and these seeds are fixed."""
    shape = [16, 4, 64, 64]
    count = math.prod(shape)
    coordinates = [torch.arange(size) for size in shape]
    first, second = (~keep_mask(torch.tensor(seed), p, 0, coordinates, shape) for seed in (7, 8))
    bound = 5 * math.sqrt(p * (1 - p) / count)
    assert abs(first.double().mean() - p) < bound
    for other in (second, ~keep_mask(torch.tensor(7), p, 1, coordinates, shape), *(first.roll(1, d) for d in range(4))):
        both = (first & other).double().mean()
        assert abs(both - p * p) < 5 * math.sqrt(p * p * (1 - p * p) / count)
    for dim in range(4):  # no row, head, query or key is treated in its own way
        others = [each for each in range(4) if each != dim]
        rates = first.double().mean(others)
        assert (rates - p).abs().max() < 5 * math.sqrt(p * (1 - p) * shape[dim] / count)


def _splitmix64(seed, index):
    """In Python's integers, as published; its state starts at ``seed`` and is asked for the number ``index``."""
    mask = 2**64 - 1
    z = (seed + index) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


def test_the_numbers_are_those_of_splitmix64():
    seed, slab, shape = 2**61 + 12345, 3, [3, 5]
    kept = keep_mask(torch.tensor(seed), 0.3, slab, [torch.arange(3), torch.arange(5)], shape)
    start = _splitmix64(seed, 0)
    expected = [_splitmix64(start, slab * 15 + index) >> 11 >= round(0.3 * 2**53) for index in range(15)]
    assert kept.flatten().tolist() == expected


def test_it_is_nn_dropout_but_for_the_mask():
    mesh = fsdp_tp.init_mesh()
    try:
        x = torch.ones(50, 50, requires_grad=True)
        dropout = Dropout(0.2, mesh=mesh)
        y = dropout(x)
        assert set(y.unique().tolist()) == {0.0, 1.25}
        y.sum().backward()
        assert torch.equal(x.grad, y)
        assert not torch.equal(dropout(x), y), "a mask of its own in every forward"
        assert torch.equal(dropout.eval()(x), x)
        assert torch.equal(Dropout(0.0, mesh=mesh)(x), x)
        assert torch.equal(Dropout(1.0, mesh=mesh)(x), torch.zeros_like(x))
        assert isinstance(dropout, torch.nn.Dropout)
    finally:
        torch.distributed.destroy_process_group()


def _masks(tensor, shard):
    """What this rank drops of a global batch of ones, beside where its part lies in that."""
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=tensor, hybrid_shard_degree=shard)
    rows = torch.arange(ROWS).chunk(mesh.data_size)[mesh.data_rank]
    x = torch.ones(len(rows), SEQUENCE, HIDDEN)
    torch.manual_seed(5)
    found = [("whole", Dropout(0.4, mesh=mesh)(x), (rows,))]
    length = SequenceLength()
    length.note(x)
    slice_ = Dropout(0.4, mesh=mesh, sequence_parallel=True)
    slice_.sequence_length = length
    tokens = torch.arange(SEQUENCE).split(-(-SEQUENCE // tensor))[mesh.tensor_rank]
    torch.manual_seed(5)
    found.append(("tokens", slice_(x[:, tokens]), (rows[:, None], tokens)))
    split = Split.even(HIDDEN, tensor)
    own = split.rows[mesh.tensor_rank]
    torch.manual_seed(5)
    found.append(("features", Dropout(0.4, mesh=mesh, split=split)(x[..., own]), (rows[:, None], slice(None), own)))
    heads = HeadLayout(HEADS, KV, tensor).queries
    own = heads.rows[mesh.tensor_rank]
    torch.manual_seed(5)
    weights = torch.ones(len(rows), len(own), SEQUENCE, SEQUENCE)
    dropped = Dropout(0.4, mesh=mesh, split=heads, split_dim=-3)(weights)[:, own != ZERO]  # 9 heads leave one of 4 none
    found.append(("heads", dropped, (rows[:, None], own[own != ZERO])))
    return found


def test_every_part_has_the_mask_of_the_whole():
    whole = {name: value for name, value, _ in run(1, _masks, 1, 1)[0]}
    for tensor, shard in ((2, 1), (4, 1), (2, 2)):
        for parts in run(tensor * shard, _masks, tensor, shard):
            for name, value, place in parts:
                expected = (
                    whole[name][place] if name != "features" else whole[name][place[0], :, place[2]].transpose(1, 2)
                )
                assert torch.equal(value, expected), (name, tensor, shard)


class _Block(torch.nn.Module):
    def __init__(self, mesh, sequence_parallel, length):
        super().__init__()
        options = dict(mesh=mesh, sequence_parallel=sequence_parallel, dtype=torch.float64)
        self.attention = ParallelAttention(
            HIDDEN, HEADS, num_kv_heads=KV, dropout=0.3, qk_norm=True, rotary_base=100.0, **options
        )
        self.mlp = ParallelMLP(HIDDEN, 29, dropout=0.2, **options)
        self.residual = Dropout(0.1, mesh=mesh, sequence_parallel=sequence_parallel)
        for module in (self.attention, self.mlp, self.residual):
            module.sequence_length = length

    def forward(self, x):
        x = x + self.residual(self.attention(x))
        return x + self.residual(self.mlp(x))


def _block(tensor, shard, sequence_parallel, checkpointed):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=tensor, hybrid_shard_degree=shard)
    torch.manual_seed(1)
    length = SequenceLength()
    block = _Block(mesh, sequence_parallel, length)
    whole = torch.randn(ROWS, SEQUENCE, HIDDEN, dtype=torch.float64)
    x = whole.chunk(mesh.data_size)[mesh.data_rank]
    length.note(x)
    if sequence_parallel:
        x = fsdp_tp.regions.split_to_tensor_axis(x, 1, mesh.tensor.get_group())
    x = x.detach().requires_grad_()
    torch.manual_seed(9)
    y = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
    (y**2).sum().backward()
    gradients = {}
    for name, parameter in block.named_parameters():
        path, _, own = name.rpartition(".")
        arrangement = arrangement_of(block.get_submodule(path), own)
        grad = gather(parameter.grad)
        gradients[name] = grad if arrangement is None else arrangement[0].restore(grad, arrangement[1])
        torch.distributed.all_reduce(gradients[name], group=mesh.data.get_group())
    ends = [y.detach(), x.grad]
    if sequence_parallel:
        group = mesh.tensor.get_group()
        ends = [fsdp_tp.regions.gather_from_tensor_axis(each, 1, group, SEQUENCE) for each in ends]
    return mesh.data_rank, *ends, gradients


def test_attention_and_mlp_drop_the_same_on_every_layout():
    _, output, input_grad, gradients = run(1, _block, 1, 1, False, False)[0]
    for layout in (
        (1, 1, False, True), (2, 1, False, False), (2, 1, True, True), (4, 1, False, False), (2, 2, True, False),
    ):  # fmt: skip
        for data_rank, y, grad, own in run(layout[0] * layout[1], _block, *layout):
            rows = slice(data_rank * len(y), (data_rank + 1) * len(y))
            torch.testing.assert_close(y, output[rows], rtol=0, atol=1e-12)
            torch.testing.assert_close(grad, input_grad[rows], rtol=0, atol=1e-11)
            for name, expected in gradients.items():
                torch.testing.assert_close(own[name], expected, rtol=0, atol=1e-11, msg=f"{name} {layout}")


def _seeded_differently():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    torch.manual_seed(torch.distributed.get_rank())
    dropout = Dropout(mesh=mesh)
    with pytest.raises(ValueError, match="the 2 ranks of one tensor axis draw different random numbers"):
        dropout(torch.ones(3))


def test_ranks_of_one_tensor_axis_must_be_seeded_alike():
    run(2, _seeded_differently)
