"""If these fail, look in fsdp_tp/layers/embedding.py. Forward adds zeros only: bit-equal."""

import pytest
import torch
from torch import nn

import fsdp_tp
from fsdp_tp.layers import VocabParallelEmbedding
from tests.ranks import run

ROWS, WIDTH = 24, 6


def _all_cases():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=torch.distributed.get_world_size())
    for sequence_parallel in (False, True):
        for padding_idx in (None, 0, 13, 23):
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                _compare(mesh, sequence_parallel, padding_idx, dtype)


def _compare(mesh, sequence_parallel, padding_idx, dtype):
    torch.manual_seed(2)
    embedding = nn.Embedding(ROWS, WIDTH, padding_idx, dtype=dtype)
    ids = torch.randint(0, ROWS, (3, 8))
    grad = torch.randn(3, 8, WIDTH, dtype=dtype)
    expected = embedding(ids)
    expected.backward(grad)
    layer = VocabParallelEmbedding.from_embedding(embedding, mesh=mesh, sequence_parallel=sequence_parallel)
    actual = layer(ids)

    def own(x, dim):
        return x.chunk(mesh.tensor_size, dim)[mesh.tensor_rank] if mesh.tensor_size > 1 else x

    actual.backward(own(grad, 1) if sequence_parallel else grad)
    assert torch.equal(actual, own(expected, 1) if sequence_parallel else expected)
    gradient = layer.weight.grad
    assert torch.equal(getattr(gradient, "to_local", lambda: gradient)(), own(embedding.weight.grad, 0))


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_output_and_gradient_have_the_bits_of_one_process(tensor):
    run(tensor, _all_cases)


def _refusals():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    with pytest.raises(ValueError, match="num_embeddings=5 is not a multiple of the tensor axis"):
        VocabParallelEmbedding(5, 4, mesh=mesh)
    for wrong in (4, -1):
        with pytest.raises(RuntimeError, match=r"an id is not in \[0, 4\)"):
            VocabParallelEmbedding(4, 2, mesh=mesh)(torch.tensor([0, wrong]))
    with pytest.raises(ValueError, match="max_norm=1.0 is not possible on a split vocabulary"):
        VocabParallelEmbedding.from_embedding(nn.Embedding(4, 4, max_norm=1.0), mesh=mesh)


def test_refuses_what_it_cannot_do():
    run(2, _refusals)
