"""Sketches: parts add up to the whole, and distances are those of the tensors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_tp.parity.sketch import BUCKETS, Sketcher

SIGNS_CHECKSUM = -40

sketch = Sketcher(torch.device("cpu"))


def norm(vector):
    return torch.linalg.vector_norm(vector[:-1]).item()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.data())
def test_parts_add_up_to_the_whole(shape, data):
    """Any rectangle cut out of a tensor, and the rest of it."""
    whole = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[dim]))
    total = torch.zeros(BUCKETS + 1, dtype=torch.float64)
    for start, piece in ((0, whole.narrow(dim, 0, cut)), (cut, whole.narrow(dim, cut, shape[dim] - cut))):
        if piece.numel():
            total += sketch(piece, shape, [start if each == dim else 0 for each in range(len(shape))])
    torch.testing.assert_close(total, sketch(whole, shape, [0] * len(shape)), rtol=0, atol=1e-12)


def test_small_tensors_are_kept_exactly():
    values = torch.arange(1.0, BUCKETS + 1)
    found = sketch(values, values.shape, (0,))
    assert torch.equal(found[:-1].abs(), values.double())
    assert found[-1] == pytest.approx(float((values.double() ** 2).sum()))
    assert norm(sketch(torch.tensor(3.0), (), ())) == 3


@pytest.mark.parametrize("shape", [(100, 100), (64, 1024), (3, 7, 501)])
def test_distances_are_estimated_without_bias(shape):
    """One estimate scatters by 1 / sqrt(2 * 61) = 9 %, the mean over a hundred by 0.9 %; five of that."""
    generator = torch.Generator().manual_seed(0)
    ratios = []
    for _ in range(100):
        gap = torch.randn(shape, generator=generator)
        found = sketch(gap, shape, [0] * len(shape))
        ratios.append((norm(found) / torch.linalg.vector_norm(gap, dtype=torch.float64)).item() ** 2)
        assert found[-1].sqrt().item() == pytest.approx(torch.linalg.vector_norm(gap.double()).item(), rel=1e-9)
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.09)
    assert min(ratios) > 0.4
    assert max(ratios) < 2


def test_a_gap_with_a_stride_does_not_hide():
    """One column of a matrix, or equal and opposite neighbours, would cancel in sums without signs."""
    for width in (61, 64, 122):
        gap = torch.zeros(200, width)
        gap[:, 3], gap[:, 4] = 1, -1
        assert norm(sketch(gap, gap.shape, (0, 0))) == pytest.approx(20, rel=0.6)


def test_signs_do_not_depend_on_how_many_were_asked_for():
    fresh = Sketcher(torch.device("cpu"))
    first = fresh.signs(10).clone()
    assert torch.equal(fresh.signs(100_000)[:10], first)
    assert abs(fresh.signs(100_000).float().mean()) < 0.02
    # A recorded curve is read on other machines: these must never change.
    assert first.tolist() == sketch.signs(10).tolist()
    assert int((sketch.signs(64).long() * torch.arange(1, 65)).sum()) == SIGNS_CHECKSUM
