"""A documented hybrid degree whose mesh is 1-D all the same (RLinf#1502); sharding over any size that is asked for
(pytorch-lightning#19502). Look in fsdp_tp/fsdp.py: which mesh a degree becomes.
"""

from collections import Counter

import pytest
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_tp
from tests.collectives import _group
from tests.faults import Block, rows
from tests.ranks import run

WORLD = 8


class _Bytes(TorchDispatchMode):
    """Bytes of the whole tensor of each collective, by operation and ranks of the group."""

    def __init__(self):
        super().__init__()
        self.moved = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1].strip("_")
        if func.namespace == "c10d" and _group(args).size() > 1:
            tensors = [each for arg in args for each in (arg if isinstance(arg, list) else [arg])]
            size = max(each.nbytes for each in tensors if hasattr(each, "nbytes"))
            self.moved[name, tuple(dist.get_process_group_ranks(_group(args)))] += size
        return func(*args, **(kwargs or {}))


def _moved(degree):
    model = Block()
    numel = sum(parameter.numel() for parameter in model.parameters())
    fsdp_tp.fully_shard(model, hybrid_shard_degree=degree, comm="torch")  # whose collectives can be seen
    with _Bytes() as bytes_of:
        model(rows()).square().mean().backward()
    return numel * 8, bytes_of.moved


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_gathers_stay_inside_a_shard_group_and_replicas_reduce_their_shard(degree):
    """Every parameter of 8 rows or more here divides by 8: nothing is padded."""
    for rank, (size, moved) in enumerate(run(WORLD, _moved, degree)):
        shard_group = tuple(range(rank - rank % degree, rank - rank % degree + degree))
        replicas = tuple(range(rank % degree, WORLD, degree))
        expected = {}
        if degree > 1:
            expected["allgather_base", shard_group] = size
            expected["reduce_scatter_base", shard_group] = size
        if degree < WORLD:
            expected["allreduce", replicas] = size // degree
        assert moved == expected


def _odd():
    with pytest.raises(ValueError, match="hybrid_shard_degree=3 does not divide .* legal values: 0, 1, 2, 4, 8"):
        fsdp_tp.fully_shard(Block(), hybrid_shard_degree=3)


def test_a_size_that_does_not_divide_is_refused():
    run(WORLD, _odd)
