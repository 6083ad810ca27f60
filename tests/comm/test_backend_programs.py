"""What programs do with groups of fsdp_tp_shm. If these fail, look in kernels/torch/ and fsdp_tp/comm/."""

import os
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

from fsdp_tp.comm import rendezvous
from fsdp_tp.comm.backend import NAME, backend_of
from tests.ranks import run


def _objects():
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    shared = [rank, "y"] if rank == 1 else [None, None]
    dist.broadcast_object_list(shared, src=1)
    return gathered, shared


def test_objects():
    gathered = [{"rank": rank, "text": "x" * rank} for rank in range(3)]
    assert run(3, _objects) == [(gathered, [1, "y"])] * 3


def _redistribute():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(35.0).view(7, 5)  # uneven over 2
    x = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    for placements in ([Replicate(), Shard(0)], [Shard(1), Shard(1)], [Replicate(), Replicate()], [Shard(0)] * 2):
        x = x.redistribute(mesh, placements)
        assert x.full_tensor().equal(whole)
    partial = torch.distributed.tensor.DTensor.from_local(whole, mesh, [Partial(), Replicate()])
    assert partial.redistribute(mesh, [Shard(0), Replicate()]).full_tensor().equal(2 * whole)
    return backend_of(mesh.get_group("a"))


def test_dtensors_redistribute():
    assert run(4, _redistribute) == [NAME] * 4


def _checkpoint(directory):
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(10.0).view(5, 2)
    dcp.save({"x": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=directory)
    loaded = {"x": distribute_tensor(torch.zeros(5, 2), mesh, [Shard(1)])}
    dcp.load(loaded, checkpoint_id=directory)
    assert loaded["x"].full_tensor().equal(whole)


def test_distributed_checkpoints(tmp_path):
    run(2, _checkpoint, str(tmp_path))


def _messages():
    rank, size = dist.get_rank(), dist.get_world_size()
    to, source = (rank + 1) % size, (rank - 1) % size
    lengths = [0, 1, 7, 100_003, 5]  # the fourth is many times the ring
    received = [torch.empty(length, dtype=torch.int64) for length in lengths]
    sent = [torch.full((length,), 10 * rank + tag) for tag, length in enumerate(lengths)]
    # Receives in another order than the sends, told apart by their tags.
    works = [dist.isend(x, to, tag=tag) for tag, x in enumerate(sent)]
    works += [dist.irecv(received[tag], source, tag=tag) for tag in (4, 2, 0, 3, 1)]
    for work in works:
        work.wait()
    for tag, x in enumerate(received):
        assert x.equal(torch.full((lengths[tag],), 10 * source + tag))
    # Of one tag: in the order of the sends.
    pair = [torch.empty(3), torch.empty(3)]
    operations = [dist.P2POp(dist.isend, torch.full((3,), float(i + rank)), to) for i in range(2)]
    operations += [dist.P2POp(dist.irecv, x, source) for x in pair]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert [x[0].item() for x in pair] == [float(source), float(source + 1)]
    # From anyone, to oneself, into memory with gaps.
    wide = torch.zeros(4, 2)
    work = dist.isend(torch.arange(4.0), rank, tag=9)
    dist.recv(wide[:, 1], rank, tag=9)
    work.wait()
    assert wide[:, 1].equal(torch.arange(4.0))
    if rank == 0:
        senders = [dist.recv(torch.empty(2), tag=5) for _ in range(size - 1)]
        assert sorted(senders) == list(range(1, size))
    else:
        dist.send(torch.ones(2), 0, tag=5)
    # A send that nobody waits for arrives.
    work = dist.isend(torch.full((300_000,), float(rank)), to)
    late = torch.empty(300_000)
    dist.recv(late, source)
    assert late[-1] == source
    dist.barrier()
    while not work.is_completed():  # it may be in another thread's hands
        time.sleep(0.001)


def test_messages():
    run(3, _messages)


def _overlap():
    """Rank 0 starts operations long before rank 1 comes to them."""
    rank, x = dist.get_rank(), torch.ones(3)
    started = time.monotonic()
    works = []
    if rank == 1:
        time.sleep(0.5)
    started = time.monotonic()
    works.append(dist.all_reduce(x, async_op=True))
    works.append(dist.all_reduce(x, async_op=True))
    gathered = torch.empty(6)
    works.append(dist.all_gather_into_tensor(gathered, torch.full((3,), float(rank)), async_op=True))
    took = time.monotonic() - started
    future = works[1].get_future().then(lambda done: done.value()[0].sum().item())
    y = torch.ones(1)
    dist.all_reduce(y)  # a synchronous one comes after all that
    assert all(work.is_completed() for work in works)
    assert x.equal(torch.full((3,), 4.0))
    assert gathered.tolist() == [0.0] * 3 + [1.0] * 3
    # Nobody waits: the worker thread does it.
    works[0] = dist.all_reduce(x, async_op=True)
    while not works[0].is_completed():
        time.sleep(0.001)
    assert works[0].wait()
    assert works[0].result()[0].equal(torch.full((3,), 8.0))
    return took, future.wait()


def test_operations_start_before_peers_come():
    for took, total in run(2, _overlap):
        assert took < 0.4
        assert total == 12.0


def _profiled():
    x = torch.ones(1000)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        dist.all_reduce(x)
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():  # since nobody waits, the worker takes it
            time.sleep(1e-3)
        work.wait()
    return [event.name for event in profiled.events() if event.name.startswith("fsdp_tp_shm:")]


def test_a_profiler_sees_what_the_worker_runs():
    assert run(2, _profiled) == 2 * [2 * ["fsdp_tp_shm:all_reduce"]]


def _pipeline():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16) for _ in range(2)]
    whole, rank = nn.Sequential(*layers), dist.get_rank()
    x, target = torch.randn(8, 16), torch.randn(8, 16)
    nn.functional.mse_loss(whole(x), target).backward()
    expected = layers[rank].weight.grad.clone()
    whole.zero_grad()
    stage = PipelineStage(layers[rank], rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=target)
    # The mean over micro-batches is taken in another order.
    torch.testing.assert_close(layers[rank].weight.grad, expected, rtol=1e-5, atol=1e-6)


def test_a_pipeline_of_two_stages():
    run(2, _pipeline)


def _fsdp_step(backend, from_group):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 33)) for _ in range(3)])
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",), backend_override={"shard": backend})
    assert backend_of(mesh.get_group()) == backend
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if from_group:
        for module in model.modules():
            if hasattr(module, "set_allocate_memory_from_process_group_for_comm"):
                module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        loss = model(torch.randn(4, 33, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach(), *(parameter.to_local().detach().clone() for parameter in model.parameters())]


def _fsdp():
    expected = _fsdp_step("gloo", False)
    for from_group in (False, True):
        for got, want in zip(_fsdp_step(NAME, from_group), expected, strict=True):
            assert got.equal(want)


def test_fsdp2_steps_equal_those_over_gloo_to_the_last_bit():
    run(2, _fsdp)


def _counts():
    with open("/proc/self/maps") as maps:
        mappings = sum("fsdp_tp" in line and ".so" not in line for line in maps)
    return len(os.listdir("/proc/self/task")), mappings, len(os.listdir("/proc/self/fd"))


def _leaves_nothing():
    dist.all_reduce(torch.ones(1))
    before = _counts()
    for kinds in (("memfd",), ("named",)):
        rendezvous.SEGMENT_KINDS, kept = kinds, rendezvous.SEGMENT_KINDS
        group = dist.new_group()
        rendezvous.SEGMENT_KINDS = kept
        assert backend_of(group) == NAME
        x = torch.ones(100_000)
        dist.all_reduce(x, group=group, async_op=True).wait()
        work = dist.isend(x, 1 - dist.get_rank(), group=group)
        dist.recv(x, 1 - dist.get_rank(), group=group)
        work.wait()
        during = _counts()
        dist.barrier(group)
        dist.destroy_process_group(group)
        assert all(now > then for now, then in zip(during, before, strict=True)), (before, during)
        assert _counts() == before
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"fsdp_tp-{os.getpid()}-")]


def test_a_destroyed_group_leaves_nothing_behind():
    assert run(2, _leaves_nothing) == [[], []]
