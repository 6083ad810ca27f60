"""A mean of the ranks' means weighs the tokens of a short batch more (torchtitan#1842, prime-rl PR 1960).

Look in fsdp_tp/loss.py: ``global_mean``.
"""

import pytest
import torch
from torch import nn

import fsdp_tp
from tests.models import gather
from tests.ranks import run


def _linear():
    torch.manual_seed(6)
    return nn.Linear(4, 1, dtype=torch.float64)


def _uneven_rows(rows_of_rank):
    """Our loss and gradient beside one process's, and the mean of means, which is another."""
    mesh = fsdp_tp.init_mesh()
    reference, model = _linear(), _linear()
    data = torch.randn(sum(rows_of_rank), 4, dtype=torch.float64)
    expected = reference(data).square().mean()
    expected.backward()
    pieces = data.split(rows_of_rank)
    fsdp_tp.fully_shard(model, mesh=mesh)
    mine = pieces[mesh.data_rank]
    loss = fsdp_tp.global_mean(model(mine).square().sum(), mine.shape[0], mesh)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gather(model.weight.grad), reference.weight.grad, rtol=1e-12, atol=1e-14)
    return expected.item(), torch.stack([reference(piece).square().mean() for piece in pieces]).mean().item()


@pytest.mark.parametrize("rows_of_rank", [[1, 2, 3, 10], [5, 0, 1, 1], [2, 2]])
def test_global_mean_weighs_every_token_alike(rows_of_rank):
    for expected, mean_of_means in run(len(rows_of_rank), _uneven_rows, rows_of_rank):
        assert (mean_of_means == pytest.approx(expected)) == (len(set(rows_of_rank)) == 1)
