"""fp64 against F.cross_entropy on whole logits. If these fail, look in fsdp_tp/layers/loss.py or loss.py."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import fsdp_tp
from tests.ranks import run

VOCABULARY = 24


def _compare():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=torch.distributed.get_world_size())
    for smoothing, reduction, ignored in itertools.product((0.0, 0.1, 1.0), ("mean", "sum", "none"), (False, True)):
        torch.manual_seed(4)
        # Large logits: without the maximum over the whole vocabulary the exponentials overflow.
        whole = (300 * torch.randn(3, 5, VOCABULARY, dtype=torch.float64)).requires_grad_()
        target = torch.randint(0, VOCABULARY, (3, 5))
        if ignored:
            target[0, 1:4] = -100
        expected = F.cross_entropy(
            whole.flatten(0, 1), target.flatten(), label_smoothing=smoothing, reduction=reduction
        )
        expected = expected.view(3, 5) if reduction == "none" else expected
        weights = torch.rand_like(expected)
        expected.backward(weights)
        local = whole.detach().chunk(mesh.tensor_size, -1)[mesh.tensor_rank].clone().requires_grad_()
        actual = fsdp_tp.vocab_parallel_cross_entropy(
            local, target, mesh=mesh, label_smoothing=smoothing, reduction=reduction
        )
        actual.backward(weights)
        # 1e-12 of the largest logit is 3e-10; the losses here are of that size.
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        gradient = whole.grad.chunk(mesh.tensor_size, -1)[mesh.tensor_rank]
        torch.testing.assert_close(local.grad, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_cross_entropy_equals_the_whole_vocabulary(tensor):
    run(tensor, _compare)


def _masked_classes():
    """Logits of -inf exclude a class; targets out of range are an error."""
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    whole = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole[:, 2] = whole[:, 7] = -torch.inf
    target = torch.tensor([0, 3, 4, 6])
    local = whole.chunk(2, -1)[mesh.tensor_rank].clone().requires_grad_()
    actual = fsdp_tp.vocab_parallel_cross_entropy(local, target, mesh=mesh)
    actual.backward()
    torch.testing.assert_close(actual, F.cross_entropy(whole, target), rtol=1e-12, atol=0)
    assert torch.isfinite(local.grad).all()
    for wrong in (8, -1):
        with pytest.raises(RuntimeError, match=r"a target is neither ignore_index nor in \[0, 8\)"):
            fsdp_tp.vocab_parallel_cross_entropy(local, torch.tensor([0, 1, 2, wrong]), mesh=mesh)


def test_masked_classes_and_targets_out_of_range():
    run(2, _masked_classes)


def _refusals():
    mesh = fsdp_tp.init_mesh()
    logits, target = torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.long)
    for wrong, sentence in (
        ({"reduction": "median"}, "reduction='median' must be 'mean', 'sum' or 'none'"),
        ({"label_smoothing": 2.0}, "label_smoothing=2.0 must lie between 0 and 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            fsdp_tp.vocab_parallel_cross_entropy(logits, target, mesh=mesh, **wrong)
    with pytest.raises(ValueError, match=r"logits of shape \(2, 3, 8\) do not match targets of shape \(2, 2\)"):
        fsdp_tp.vocab_parallel_cross_entropy(logits, target[:, :2], mesh=mesh)
    with pytest.raises(ValueError, match="token_count is 0 on every rank"):
        fsdp_tp.global_mean(torch.tensor(0.0), 0, mesh)


def test_refusals():
    run(1, _refusals)


def _uneven_rows(rows_of_rank):
    """A linear model whose data ranks hold different numbers of rows."""
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=torch.distributed.get_world_size() // len(rows_of_rank))
    torch.manual_seed(6)
    model = torch.nn.Linear(4, 1, dtype=torch.float64)
    reference = torch.nn.Linear(4, 1, dtype=torch.float64)
    reference.load_state_dict(model.state_dict())
    data = torch.randn(sum(rows_of_rank), 4, dtype=torch.float64)
    expected = reference(data).square().mean()
    expected.backward()
    first = sum(rows_of_rank[: mesh.data_rank])
    mine = data[first : first + rows_of_rank[mesh.data_rank]]
    fsdp_tp.fully_shard(model, mesh=mesh)
    loss = fsdp_tp.global_mean(model(mine).square().sum(), mine.shape[0], mesh)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(model.weight.grad.full_tensor(), reference.weight.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rows_of_rank", [[1, 2, 3, 10], [5, 0, 1, 1], [2, 2]])
def test_global_mean_weighs_every_token_alike(rows_of_rank):
    """Fault: a mean of the ranks' means weighs the tokens of a short batch more."""
    run(len(rows_of_rank), _uneven_rows, rows_of_rank)
