"""Brute force over head counts and degrees. If these fail, look in fsdp_tp/layers/heads.py and split.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_tp.layers.heads import HeadLayout
from fsdp_tp.layers.split import ZERO, Split


@settings(max_examples=150, deadline=None)
@given(kv=st.integers(1, 12), groups=st.integers(1, 8), ranks=st.integers(1, 9))
def test_every_query_head_is_computed_once_beside_its_key_value_head(kv, groups, ranks):
    layout = HeadLayout(kv * groups, kv, ranks)
    queries, keys = layout.queries, layout.kv
    seen = []
    for rank in range(ranks):
        own, own_kv = queries.rows[rank].tolist(), keys.rows[rank].tolist()
        assert len(own) == layout.num_local_heads(rank) > 0
        assert len(own_kv) == layout.num_local_kv_heads(rank)
        assert len(own) == len(own_kv) * layout.num_local_groups(rank)
        for index, head in enumerate(own):
            beside = own_kv[index // layout.num_local_groups(rank)]
            assert (head == ZERO) == (beside == ZERO), "a head of zeros has keys and values of zeros"
            if head != ZERO:
                assert beside == head // groups
                seen.append(head)
    assert sorted(seen) == list(range(kv * groups))
    # No worse than splitting the key/value heads alone, or (where there are enough) the queries of each alone.
    busiest = max(layout.num_local_heads(rank) for rank in range(ranks))
    assert busiest <= -(-kv // ranks) * groups
    if groups >= ranks:
        assert busiest <= kv * -(-groups // ranks)


@pytest.mark.parametrize(
    ("heads", "kv", "ranks", "busiest", "local_kv"),
    [(9, 3, 2, 6, 2), (9, 3, 4, 3, 1), (8, 1, 4, 2, 1), (8, 2, 4, 2, 1), (5, 5, 2, 3, 3), (12, 4, 8, 2, 1)],
)  # fmt: skip
def test_the_shapes_that_people_have(heads, kv, ranks, busiest, local_kv):
    layout = HeadLayout(heads, kv, ranks)
    assert max(layout.num_local_heads(rank) for rank in range(ranks)) == busiest
    assert max(layout.num_local_kv_heads(rank) for rank in range(ranks)) == local_kv


def _splits(kv, groups, ranks, width):
    layout = HeadLayout(kv * groups, kv, ranks)
    queries, keys = layout.queries.blocks(width), layout.kv.blocks(width)
    yield from (queries, keys, layout.interleaved.blocks(width), Split.packed([queries, keys, keys]))
    yield Split.packed([Split.even(kv * 5 + 1, ranks)] * 2)


@settings(max_examples=60, deadline=None)
@given(
    kv=st.integers(1, 6), groups=st.integers(1, 4), ranks=st.integers(1, 6), width=st.integers(1, 3),
    dim=st.integers(0, 1),
)  # fmt: skip
def test_what_is_stored_holds_every_row_once(kv, groups, ranks, width, dim):
    for split in _splits(kv, groups, ranks, width):
        whole = torch.arange(1.0, 2 * split.size + 1).view(split.size, 2)
        whole = whole if dim == 0 else whole.T.contiguous()
        stored = split.arrange(whole, dim)
        assert torch.equal(split.restore(stored, dim), whole)
        assert stored.sum() == whole.sum()
        assert split.is_stored_as_is == (stored.shape == whole.shape and torch.equal(stored, whole))
        if not split.is_stored_as_is:
            assert stored.shape[dim] % ranks == 0


def test_interleaved_heads_are_those_of_their_groups():
    layout = HeadLayout(4, 2, 2)  # q0 q1 k0 v0 q2 q3 k1 v1
    assert [part.tolist() for part in layout.interleaved.rows] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    layout = HeadLayout(4, 2, 4)
    assert [part.tolist() for part in layout.interleaved.rows] == [[0, 2, 3], [1, 2, 3], [4, 6, 7], [5, 6, 7]]


def test_head_counts_that_are_no_model():
    with pytest.raises(ValueError, match="num_kv_heads=3 must divide num_heads=8; legal values: 1, 2, 4, 8"):
        HeadLayout(8, 3, 2)
