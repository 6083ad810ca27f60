"""If these fail, look in fsdp_tp/config.py: the arithmetic of the five axes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_tp.config import MeshShape, ParallelConfig, divisors


@st.composite
def legal(draw):
    """(world, config, expected shape), built from the shape up, so that it is legal by construction."""
    shape = MeshShape(*(draw(st.sampled_from([1, 2, 3, 4, 8])) for _ in MeshShape._fields))
    degree = shape.shard * shape.context
    full = shape.replicate == 1 and draw(st.booleans())
    config = ParallelConfig(
        tensor_parallel_degree=shape.tensor,
        hybrid_shard_degree=0 if full else degree,
        context_parallel_degree=shape.context,
        pipeline_parallel_degree=shape.pipeline,
    )
    return shape.world_size, config, shape


@settings(max_examples=2000)
@given(legal())
def test_legal_degrees_give_the_shape_they_were_made_from(case):
    world_size, config, expected = case
    assert config.shape(world_size) == expected


@settings(max_examples=3000)
@given(st.integers(1, 128), st.integers(1, 16), st.integers(0, 16), st.integers(1, 8), st.integers(1, 8))
def test_any_degrees_either_fill_the_world_or_say_what_would_be_legal(world_size, tensor, hybrid, context, pipeline):
    config = ParallelConfig(
        tensor_parallel_degree=tensor,
        hybrid_shard_degree=hybrid,
        context_parallel_degree=context,
        pipeline_parallel_degree=pipeline,
    )
    possible = world_size % (tensor * pipeline) == 0
    data = world_size // (tensor * pipeline)
    degree = hybrid or data
    possible = possible and data % degree == 0 and degree % context == 0
    if possible:
        shape = config.shape(world_size)
        assert shape.world_size == world_size
        assert shape.shard * shape.context == degree
        assert shape.replicate * degree == data
    else:
        with pytest.raises(ValueError, match=r"_degree=\d+ does not divide .* legal values: \d"):
            config.shape(world_size)


@settings(max_examples=300)
@given(legal())
def test_coordinates_enumerate_the_mesh_with_the_tensor_axis_fastest(case):
    world_size, _, shape = case
    brute_force = [
        (p, r, s, c, t)
        for p in range(shape.pipeline)
        for r in range(shape.replicate)
        for s in range(shape.shard)
        for c in range(shape.context)
        for t in range(shape.tensor)
    ]
    ranks = range(0, world_size, max(1, world_size // 50))
    assert [tuple(shape.coordinate(rank)) for rank in ranks] == [brute_force[rank] for rank in ranks]


@pytest.mark.parametrize(
    ("world_size", "degrees", "sentence"),
    [
        (8, {"tensor_parallel_degree": 3},
         "tensor_parallel_degree=3 does not divide the world of 8 ranks; legal values: 1, 2, 4, 8"),
        (4, {"hybrid_shard_degree": 3},
         "hybrid_shard_degree=3 does not divide the world of 4 ranks; legal values: 0, 1, 2, 4"),
        (8, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 3},
         r"hybrid_shard_degree=3 does not divide world / \(pipeline \* tensor\) = 4 ranks; legal values: 0, 1, 2, 4"),
        (8, {"pipeline_parallel_degree": 3},
         "pipeline_parallel_degree=3 does not divide world / tensor = 8 ranks; legal values: 1, 2, 4, 8"),
        (8, {"hybrid_shard_degree": 2, "context_parallel_degree": 4},
         "context_parallel_degree=4 does not divide the 2 ranks that hybrid_shard_degree=2 shards over; legal"),
    ],
)  # fmt: skip
def test_a_degree_that_does_not_divide_is_named_with_its_legal_values(world_size, degrees, sentence):
    with pytest.raises(ValueError, match=sentence):
        ParallelConfig(**degrees).shape(world_size)


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, None])
def test_a_degree_is_a_positive_integer(value):
    with pytest.raises(ValueError, match="tensor_parallel_degree=.* must be an integer of at least 1"):
        ParallelConfig(tensor_parallel_degree=value)


def test_hybrid_shard_degree_may_be_zero_but_not_negative():
    assert ParallelConfig(hybrid_shard_degree=0).shape(6) == MeshShape(1, 1, 6, 1, 1)
    assert ParallelConfig(hybrid_shard_degree=1).shape(6) == MeshShape(1, 6, 1, 1, 1)
    with pytest.raises(ValueError, match="hybrid_shard_degree=-1 must be an integer of at least 0"):
        ParallelConfig(hybrid_shard_degree=-1)


@given(st.integers(1, 500))
def test_divisors(number):
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
