"""Groups that span hosts, which here are names: ranks with the same FSDP_TP_HOST share memory, others go over gloo.

If these fail and test_backend passes, look at kernels/torch/hierarchy.cpp.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_tp import fully_shard, init_mesh
from fsdp_tp.comm.backend import NAME, backend_of, register
from fsdp_tp.comm.wires import Wire, group_with_wire
from tests.comm.processes import Job
from tests.ranks import run

LAYOUTS = {  # the host of each rank
    "even": "aabb",
    "interleaved": "abab",
    "alone": "abc",
    "uneven": "aaab",
    "uneven, apart": "abbcbb",
}
# None, few, odd; more than one small exchange (64 KiB), more than one chunk (1 MiB), more than four.
COUNTS = (0, 1, 7, 20_001, 300_007, 1_200_001)


@contextmanager
def _hosts(layout):
    """A group of the world whose ranks believe to be on these hosts."""
    register()
    before = os.environ.get("FSDP_TP_HOST")
    os.environ["FSDP_TP_HOST"] = layout[dist.get_rank()]
    try:
        group = dist.new_group(backend=NAME)
    finally:
        os.environ.pop("FSDP_TP_HOST") if before is None else os.environ.update(FSDP_TP_HOST=before)
    assert backend_of(group) == NAME
    yield group
    dist.destroy_process_group(group)


def _values(rank, count, dtype):
    """Of which sums over ranks are exact in every dtype, so that their order does not matter."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    return torch.randint(-8, 8, (count,), generator=generator).to(dtype)


def _matrix(layout, dtype, counts):
    rank, world = dist.get_rank(), dist.get_world_size()
    with _hosts(layout) as group:
        for count in counts:
            everybodys = [_values(each, count, dtype) for each in range(world)]
            own = everybodys[rank]
            total = torch.stack(everybodys).sum(0)
            gathered = torch.empty(world * count, dtype=dtype)
            dist.all_gather_into_tensor(gathered, own, group=group)
            assert torch.equal(gathered, torch.cat(everybodys)), (count, "all_gather")
            gathered.view(world, count)[rank] += 1  # in place, as FSDP calls it
            dist.all_gather_into_tensor(gathered, gathered.view(world, count)[rank], group=group)
            assert torch.equal(gathered, torch.cat([each + 1 for each in everybodys])), (count, "in place")
            outputs = [torch.empty_like(own) for _ in range(world)]
            dist.all_gather(outputs, own, group=group)
            assert all(map(torch.equal, outputs, everybodys)), (count, "list")
            reduced = own.clone()
            dist.all_reduce(reduced, group=group)
            assert torch.equal(reduced, total), (count, "all_reduce")
            dist.all_reduce(reduced.copy_(own), dist.ReduceOp.MAX, group)
            assert torch.equal(reduced, torch.stack(everybodys).amax(0)), (count, "max")
            parts = [[_values(10 * each + to, count, dtype) for to in range(world)] for each in range(world)]
            wholes = torch.cat(parts[rank])
            dist.reduce_scatter_tensor(reduced, wholes, group=group)
            assert torch.equal(reduced, sum(each[rank] for each in parts)), (count, "reduce_scatter")
            assert torch.equal(wholes, torch.cat(parts[rank])), (count, "its input")
            for root in range(world):
                sent = own.clone() if rank == root else torch.full_like(own, 99)
                dist.broadcast(sent, root, group)
                assert torch.equal(sent, everybodys[root]), (count, "broadcast", root)
            if dtype.is_floating_point:
                dist.reduce_scatter_tensor(reduced, wholes, dist.ReduceOp.AVG, group)
                terms = torch.stack([each[rank] for each in parts]).double() / world
                # Each host's mean is rounded, and the last: half a bit of the dtype's each.
                bound = torch.finfo(dtype).eps / 2 * (terms.abs().sum(0) + terms.sum(0).abs()) * 1.01
                assert bool(((reduced.double() - terms.sum(0)).abs() <= bound).all()), (count, "mean")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_collectives_equal_arithmetic(layout, dtype):
    hosts = LAYOUTS[layout]
    run(len(hosts), _matrix, hosts, dtype, COUNTS if dtype is torch.float32 else COUNTS[:4])


def _others():
    rank, world = dist.get_rank(), dist.get_world_size()
    with _hosts("aabb") as group:
        objects = [None] * world
        dist.all_gather_object(objects, {"rank": rank}, group=group)
        assert [each["rank"] for each in objects] == list(range(world))
        message = torch.full((3,), float(rank))
        work = dist.isend(message, (rank + 1) % world, group)
        received = torch.empty(3)
        dist.recv(received, (rank - 1) % world, group)
        work.wait()
        assert received.tolist() == [(rank - 1) % world] * 3
        sent, got = torch.arange(8.0) + 10 * rank, torch.empty(8)
        dist.all_to_all_single(got, sent, group=group)
        assert got.tolist() == [10 * each + 2 * rank + i for each in range(world) for i in range(2)]
        total = torch.ones(5) * rank
        dist.reduce(total, 2, group=group)
        assert rank != 2 or total.tolist() == [6.0] * 5
        x = torch.ones(4)
        work = dist.all_reduce(x, group=group, async_op=True)
        work.wait()
        assert x.tolist() == [4.0] * 4
        dist.barrier(group)


def test_the_other_operations_go_over_gloo():
    run(4, _others)


def _sums(layout):
    """Sums whose order shows: each host's first, in the order of ranks, then those in the order of hosts."""
    rank, world, count = dist.get_rank(), dist.get_world_size(), 50_000
    everybodys = torch.stack([torch.randn(count, generator=torch.Generator().manual_seed(r)) for r in range(world)])
    hosts = [[r for r in range(world) if layout[r] == host] for host in dict.fromkeys(layout)]
    partial = []
    for ranks in hosts:
        partial.append(everybodys[ranks[0]].clone())
        for each in ranks[1:]:
            partial[-1] += everybodys[each]
    expected = partial[0].clone()
    for each in partial[1:]:
        expected += each
    with _hosts(layout) as group:
        for _ in range(2):
            x = everybodys[rank].clone()
            dist.all_reduce(x, group=group)
            assert torch.equal(x, expected)
        x = everybodys[rank].to(torch.bfloat16)
        dist.all_reduce(x, group=group)
        # A host's sum is rounded for the link, and the sum of those at the end.
        exact = everybodys.to(torch.bfloat16).double().sum(0)
        bound = torch.finfo(torch.bfloat16).eps / 2 * (everybodys.double().abs().sum(0) + exact.abs()) * 1.01
        assert bool(((x.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("layout", ["aabb", "abab", "abbcbb"])
def test_sums_have_one_order_and_the_same_bits(layout):
    run(len(layout), _sums, layout)


def _wires():
    rank, world = dist.get_rank(), dist.get_world_size()
    everybodys = [torch.randn(300_007, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    exact = torch.stack(everybodys).double().sum(0)
    inside = [torch.stack(everybodys[:2]).double().sum(0), torch.stack(everybodys[2:]).double().sum(0)]
    with _hosts("aabb") as group:
        os.environ["FSDP_TP_HOST"] = "aabb"[rank]
        wired = {
            wire: group_with_wire(group, wire)
            for wire in (Wire("fp32_accumulate"), Wire("int8"), Wire("int8", everywhere=True))
        }
        del os.environ["FSDP_TP_HOST"]
        results = {}
        for wire, over in wired.items():
            assert group_with_wire(group, wire) is over
            x = everybodys[rank].clone()
            dist.all_reduce(x, group=over)
            # One rounding of what is sent, one of the sum that comes back.
            if wire.name == "int8":
                sent = everybodys if wire.everywhere else inside
                largest = sum(float(each.abs().max()) for each in sent) + float(exact.abs().max())
                bound = torch.full_like(exact, largest / 254)
            else:
                half_a_bit = torch.finfo(torch.bfloat16).eps / 2
                bound = half_a_bit * (inside[0].abs() + inside[1].abs() + exact.abs())
            error = (x.double() - exact).abs()
            assert bool((error <= bound * 1.01 + 1e-6).all()), wire
            assert float(error.max()) > 1e-4, "nothing was rounded"
            results[wire] = x
            gathered = torch.empty(world, 300_007)
            dist.all_gather_into_tensor(gathered, everybodys[rank], group=over)
            off = max(float((a - b).abs().max()) for a, b in zip(gathered, everybodys, strict=True))
            assert off == 0 if wire.name != "int8" else 0 < off <= max(float(e.abs().max()) for e in everybodys) / 253
            results[wire, "gathered"] = gathered.clone()
            counted = torch.tensor([2**24 + 1, rank])  # no float
            dist.all_reduce(counted, group=over)
            assert counted.tolist() == [4 * (2**24 + 1), 6]
        for value in results.values():  # the same bits everywhere
            first = value.clone()
            dist.broadcast(first, 0, group)
            assert torch.equal(first, value)


def test_wires_round_once_and_all_ranks_see_the_same():
    run(4, _wires)


def _group():
    return dist.new_group(backend=os.environ.get("FSDP_TP_BACKEND"))


def _train(comm, degree):
    """Losses, and the weights at the end, of every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 400), nn.GELU(), nn.Linear(400, 8))
    os.environ["FSDP_TP_HOST"] = "aabb"[dist.get_rank()]
    try:
        # A mesh over the whole world would take the default group, which was made on one host.
        whole = None if degree else DeviceMesh.from_group(_group(), "cpu", mesh_dim_names=("shard",))
        mesh = whole or init_mesh(hybrid_shard_degree=degree)
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh, comm=comm)
    finally:
        del os.environ["FSDP_TP_HOST"]
    (first_layer,) = model[0]._get_fsdp_state()._fsdp_param_groups
    in_place = degree == 2 and comm != "int8"
    assert first_layer.unshard_async_op == (comm != "torch" and not in_place)  # the link works while the CPU computes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(4):
        loss = model(torch.randn(16, 256, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    weights = torch.cat([parameter.full_tensor().flatten() for parameter in model.parameters()])
    everybodys = [torch.empty_like(weights) for _ in range(4)]
    dist.all_gather(everybodys, weights)
    assert all(torch.equal(weights, each) for each in everybodys), "replicas differ"
    return torch.tensor(losses), weights


def _strategies(degree):
    os.environ["FSDP_TP_BACKEND"] = "gloo"
    losses, weights = _train("torch", degree)
    del os.environ["FSDP_TP_BACKEND"]
    assert losses[-1] < 0.8 * losses[0], "nothing was learned"
    gaps = {}
    for comm in ("auto", "fp32_accumulate", "fp32_accumulate:hosts", "int8", "int8:hosts"):
        ours, final = _train(comm, degree)
        gaps[comm] = (float(((ours - losses) / losses).abs().max()), float((final - weights).abs().max()))
    return gaps


@pytest.mark.parametrize("degree", [0, 2])
def test_fsdp_trains_alike_over_every_wire(degree):
    for gaps in run(4, _strategies, degree):
        assert max(gaps["auto"]) < 1e-6, gaps  # other orders of summation
        # Four steps of gradients with 8 bits, or 1/254 of the largest of 128: a wrong sum is off by more than half.
        for comm in ("fp32_accumulate", "fp32_accumulate:hosts", "int8", "int8:hosts"):
            assert 0 < gaps[comm][1] < 1e-2, gaps
            assert gaps[comm][0] < 1e-2, gaps


def _refused():
    os.environ["FSDP_TP_HOST"] = "aabb"[dist.get_rank()]
    mesh = DeviceMesh.from_group(_group(), "cpu", mesh_dim_names=("shard",))
    with pytest.raises(ValueError, match=r"int8.*quantises.*parameters are gathered as torch.float64"):
        fully_shard(nn.Linear(8, 8, dtype=torch.float64), mesh=mesh, comm="int8:hosts")
    del os.environ["FSDP_TP_HOST"]


def test_int8_refuses_what_it_does_not_serve():
    run(4, _refused)


def _all_reduces(x, group, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        dist.all_reduce(x, group=group)


def _until_it_fails(how, timeout):
    """Rank 3, on the second host, ends or stops itself in the middle."""
    rank = dist.get_rank()
    os.environ["FSDP_TP_HOST"] = "aabb"[rank]
    group = dist.new_group(backend=NAME, timeout=timedelta(seconds=timeout))
    x = torch.ones(1_000_000)
    dist.all_reduce(x, group=group)
    if rank == 3:
        threading.Timer(0.1, lambda: os.kill(os.getpid(), how)).start()
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        _all_reduces(x, group, 20)
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_all_ranks_are_told_of_one_that_ended_or_stopped(how):
    timeout = 20 if how == signal.SIGKILL else 2
    for rank, (message, took) in enumerate(Job(4, _until_it_fails, how, timeout).results(but=3, within=60)[:3]):
        assert ": rank " in message, message
        # Rank 1 has its partner there, 2 its neighbour; 0 may hear of them, or of the ranks that then give up.
        assert re.search(r"rank [0-3]\b", message), (rank, message)
        assert took < 8, (rank, took, message)  # no wait for those that have given up


_LEAVES_EARLY = """
import os, sys, time
import torch, torch.distributed as dist
from fsdp_tp.comm.backend import NAME, register

rank, store, done = int(sys.argv[1]), *sys.argv[2:]
os.environ["FSDP_TP_HOST"] = f"host {rank}"
register()
dist.init_process_group(NAME, store=dist.FileStore(store, 2), rank=rank, world_size=2)
dist.barrier()
if rank == 0:
    dist.all_gather_into_tensor(torch.empty(2_000_000), torch.ones(1_000_000), async_op=True)
    time.sleep(0.2)  # the worker is at it
else:
    while not os.path.exists(done):
        time.sleep(0.02)
"""


def test_a_process_ends_though_a_peer_on_another_host_never_answers(tmp_path):
    """And not by an abort: a worker that lets go of a tensor while Python ends would be killed."""
    command = [sys.executable, "-c", _LEAVES_EARLY]
    store, done = tmp_path / "store", tmp_path / "done"
    leaving, waiting = (subprocess.Popen([*command, str(rank), str(store), str(done)]) for rank in range(2))
    try:
        assert leaving.wait(60) == 0
        done.touch()
        assert waiting.wait(60) == 0
    finally:
        for process in (leaving, waiting):
            process.kill()
            process.wait()
