"""The choice of a hybrid shard degree. If these fail, look at fsdp_tp/degree.py."""

import logging
import os
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_tp
from fsdp_tp import degree
from fsdp_tp.config import ParallelConfig
from fsdp_tp.degree import Candidate, Unit
from tests.ranks import run


def _candidate(number, seconds, memory, fits=True):
    return Candidate(number, seconds / 3, 2 * seconds / 3, memory, fits)


def test_the_fastest_that_fits_is_chosen():
    one, two, four = _candidate(1, 1.0, 400, fits=False), _candidate(2, 2.0, 200), _candidate(4, 3.0, 100)
    assert degree.choose([one, two, four]) is two
    assert degree.choose([two, _candidate(4, 2.0, 100)]).degree == 4  # as fast, and smaller
    assert degree.choose([two, _candidate(4, 2.1, 100)]).degree == 4  # as far as can be told
    nothing = [_candidate(2, 1.0, 200, fits=False), _candidate(4, 3.0, 100, fits=False)]
    assert degree.choose(nothing).degree == 4
    assert "does not fit, but nothing does" in degree.describe(nothing, nothing[1])
    table = degree.describe([one, two, four], two).splitlines()
    assert table[2].split() == ["2", "667", "ms", "1333", "ms", "2000", "ms", "0", "MiB", "<-", "chosen"]


def test_units_are_blocks_and_the_rest():
    model = nn.Module()
    model.embedding = nn.Embedding(10, 4)
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)) for _ in range(3))
    block = 4 * 6 + 6 + 6 * 4 + 4
    assert degree.units_of(model) == [Unit(block, False)] * 3 + [Unit(40, True)]
    assert degree.units_of(model, 4) == [Unit(15, False)] * 3 + [Unit(10, True)]


def _sleepy(seconds_a_byte):
    """Collectives over the whole world take long."""
    calls = {}
    for name in ("_all_gather", "_reduce_scatter"):
        calls[name] = getattr(degree, name)

        def slow(out, tensor, group, call=calls[name]):
            if group.size() == 4:
                dist.barrier()
                time.sleep(max(out.nbytes, tensor.nbytes) * seconds_a_byte)
            return call(out, tensor, group=group)

        setattr(degree, name, slow)
    return calls


def _measures():
    units = [Unit(1 << 20, False), Unit(1 << 18, True)]
    before = len(dist.distributed_c10d._world.pg_map)
    originals = _sleepy(1e-7)  # 10 MB/s
    candidates = degree.measure(ParallelConfig(), units, comm="torch", micro_batches=lambda data_size: 3)
    for name, call in originals.items():
        setattr(degree, name, call)
    assert len(dist.distributed_c10d._world.pg_map) == before
    by_degree = {each.degree: each for each in candidates}
    assert list(by_degree) == [1, 2, 4]
    # 3 micro-batches of two gathers of 4 MiB and one of 1 MiB; 3 reductions of each.
    assert by_degree[4].gather_seconds == pytest.approx(3 * 9 * 2**20 * 1e-7, rel=0.5)
    assert by_degree[4].reduce_seconds == pytest.approx(3 * 5 * 2**20 * 1e-7, rel=0.5)
    assert by_degree[1].gather_seconds == 0
    whole, largest = 5 << 18, 1 << 20
    assert by_degree[1].memory_bytes == 16 * whole
    assert by_degree[2].memory_bytes == 8 * whole + 8 * largest
    least = degree.measure(ParallelConfig(), units, comm="torch", memory_bytes=8 * whole + 8 * largest)
    assert [each.fits for each in least] == [False, True, True]
    with pytest.raises(ValueError, match="no degree is legal: global_batch_size"):
        degree.measure(ParallelConfig(), units, micro_batches=_refuse)
    return [(each.degree, each.seconds) for each in candidates], degree.choose(candidates).degree


def _refuse(data_size):
    raise ValueError("global_batch_size does not divide")


def test_all_ranks_measure_the_same_and_a_slow_world_is_avoided():
    results = run(4, _measures)
    assert all(each == results[0] for each in results)
    assert results[0][1] in (1, 2)


def _measures_a_wire():
    os.environ["FSDP_TP_HOST"] = "aabb"[dist.get_rank()]
    wires = set()
    originals = {name: getattr(degree, name) for name in ("_all_gather", "_reduce_scatter")}
    all_reduce = dist.all_reduce

    def record(name, out, tensor, group):
        wires.add((name, group.size(), "wire" in group.group_desc))
        return originals[name](out, tensor, group=group)

    def record_sum(tensor, group):
        wires.add(("all_reduce", group.size(), "wire" in group.group_desc))
        return all_reduce(tensor, group=group)

    dist.all_reduce = record_sum
    try:
        for name in originals:
            setattr(degree, name, partial(record, name))
        for _ in range(2):  # the wire of the world's group outlives the first
            degree.measure(ParallelConfig(), [Unit(1 << 10, True)], comm="int8:hosts", param_dtype=torch.bfloat16)
    finally:
        dist.all_reduce = all_reduce
        for name, call in originals.items():
            setattr(degree, name, call)
        del os.environ["FSDP_TP_HOST"]
    return wires


def test_a_wire_is_measured_where_it_will_be_used():
    for found in run(4, _measures_a_wire):
        # Two ranks share memory, so gathers there are not timed.
        assert found == {
            ("_reduce_scatter", 2, False), ("_reduce_scatter", 4, True), ("_all_gather", 4, True),
            ("all_reduce", 2, True), ("all_reduce", 4, True),
        }  # fmt: skip


def test_a_strategy_that_does_not_exist_is_refused(one_process):
    with pytest.raises(ValueError, match="comm='int8:host' must be one of"):
        degree.measure(ParallelConfig(), [], comm="int8:host")


def _crossing(hosts, **degrees):
    os.environ["FSDP_TP_HOST"] = hosts[dist.get_rank()]
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("fsdp_tp").addHandler(handler)
    try:
        fsdp_tp.init_mesh(**degrees)
        fsdp_tp.init_mesh(**degrees)
    finally:
        del os.environ["FSDP_TP_HOST"]
        logging.getLogger("fsdp_tp").removeHandler(handler)
    return [message for message in messages if "span hosts" in message]


@pytest.mark.parametrize(
    ("hosts", "degrees", "better"),
    [
        ("aabb", {"hybrid_shard_degree": 4}, "hybrid_shard_degree=2"),
        ("aaabbb", {"hybrid_shard_degree": 2}, "hybrid_shard_degree=3"),
        ("abab", {"tensor_parallel_degree": 2}, None),  # no degree of it stays inside a host
        ("aabb", {"tensor_parallel_degree": 4}, "tensor_parallel_degree=2"),
        ("aabb", {"hybrid_shard_degree": 2, "tensor_parallel_degree": 2}, None),
    ],
)
def test_a_degree_that_crosses_hosts_for_nothing_is_said_once(hosts, degrees, better):
    messages = run(len(hosts), partial(_crossing, hosts, **degrees))[0]
    assert len(messages) == (better is not None)
    assert better is None or f"{better} does not" in messages[0]
