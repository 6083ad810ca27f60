"""Layouts as words: what they mean, and what is said of those that mean nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_tp.parity import Layout

layouts = st.builds(
    Layout,
    tensor=st.integers(1, 8),
    shard=st.integers(1, 8),
    replicate=st.integers(1, 8),
    sequence_parallel=st.booleans(),
    loss_parallel=st.booleans(),
    activation_checkpointing=st.booleans(),
    compile=st.booleans(),
    micro_batches=st.integers(1, 4),
)


@given(layouts)
def test_what_is_written_is_read_again(layout):
    assert Layout.parse(str(layout)) == layout
    assert layout.parallel.shape(layout.world_size)[1:] == (layout.replicate, layout.shard, 1, layout.tensor)


def test_words():
    assert str(Layout()) == "one process"
    assert str(Layout(tensor=2, shard=3, loss_parallel=True)) == "tensor=2,shard=3,loss_parallel"
    assert Layout.parse(" tensor = 2 , sequence_parallel") == Layout(tensor=2, sequence_parallel=True)


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("tensor=0", "tensor=0 must be an integer of at least 1"),
        ("tensor=two", "tensor=two must be an integer"),
        ("tensor", "tensor= must be an integer"),
        ("sequence_parallel=1", "sequence_parallel stands alone"),
        ("context=2", "the context axis has no layers yet; legal axes: tensor, shard, replicate"),
        ("speed=2", "unknown 'speed'; legal: tensor, shard"),
        ("shard=2,shard=2", "shard is given twice"),
    ],
)
def test_words_that_mean_nothing(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        Layout.parse(text)
    with pytest.raises(ValueError, match="tensor=0 must be"):
        Layout(tensor=0)
