"""If these fail, look in fsdp_tp/layers/embedding.py. Forward adds zeros only: bit-equal."""

import itertools

import pytest
import torch
from torch import nn

import fsdp_tp
from fsdp_tp.layers import VocabParallelEmbedding
from tests.ranks import run

WIDTH = 6
PADDING = {24: (None, 0, 13, 23), 23: (None, 22), 3: (None, 2)}  # by number of rows; of 3 on 4 ranks one has none


def _all_cases():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=torch.distributed.get_world_size())
    for sequence_parallel in (False, True):
        for rows, padding in PADDING.items():
            for padding_idx, dtype in itertools.product(padding, (torch.float32, torch.float64, torch.bfloat16)):
                _compare(mesh, sequence_parallel, rows, padding_idx, dtype)


def _compare(mesh, sequence_parallel, rows, padding_idx, dtype):
    torch.manual_seed(2)
    embedding = nn.Embedding(rows, WIDTH, padding_idx, dtype=dtype)
    ids = torch.randint(0, rows, (3, 8))
    grad = torch.randn(3, 8, WIDTH, dtype=dtype)
    expected = embedding(ids)
    expected.backward(grad)
    layer = VocabParallelEmbedding.from_embedding(embedding, mesh=mesh, sequence_parallel=sequence_parallel)
    actual = layer(ids)

    def own(x, dim):
        chunks = [*x.chunk(mesh.tensor_size, dim), x.narrow(dim, 0, 0)]
        return chunks[min(mesh.tensor_rank, len(chunks) - 1)]

    actual.backward(own(grad, 1) if sequence_parallel else grad)
    assert torch.equal(actual, own(expected, 1) if sequence_parallel else expected)
    gradient = layer.weight.grad
    assert torch.equal(getattr(gradient, "to_local", lambda: gradient)(), own(embedding.weight.grad, 0))


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_output_and_gradient_have_the_bits_of_one_process(tensor):
    run(tensor, _all_cases)


def _refusals():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    for wrong in (4, -1):
        with pytest.raises(RuntimeError, match=r"an id is not in \[0, 4\)"):
            VocabParallelEmbedding(4, 2, mesh=mesh)(torch.tensor([0, wrong]))
    with pytest.raises(ValueError, match="max_norm=1.0 is not possible on a split vocabulary"):
        VocabParallelEmbedding.from_embedding(nn.Embedding(4, 4, max_norm=1.0), mesh=mesh)


def test_refuses_what_it_cannot_do():
    run(2, _refusals)
