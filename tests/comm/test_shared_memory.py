"""If these fail, look in fsdp_tp/comm/shared_memory.py, native.py and buffers.py: how ranks find each other, and how
they part."""

from __future__ import annotations

import datetime
import gc
import multiprocessing as mp
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_tp
from fsdp_tp.comm.native import AVG, SUM
from fsdp_tp.comm.shared_memory import NotShared, SharedGroup
from tests.ranks import run


def _primitives():
    group = SharedGroup.join(dist.group.WORLD)
    assert SharedGroup.join(dist.group.WORLD) is group
    rank, size = group.rank, group.size
    memory = group.map(8 * size)
    whole, own = memory.tensor(torch.float64, size)[0], memory.tensor(torch.float64, 1, 8 * rank)[0]
    assert own.untyped_storage().nbytes() == 8  # a state dict must not drag the other shards along
    own.fill_(rank + 1.0)
    group.barrier()
    assert whole.tolist() == [1.0 + each for each in range(size)]
    del memory, whole  # the slice alone keeps the memory
    assert own.item() == rank + 1.0
    assert group.all_agree(0b111 & ~(1 << rank)) == 0b111 & ~((1 << size) - 1)
    for dtype, out_dtype, op in (
        (torch.float32, torch.float32, SUM),
        (torch.bfloat16, torch.float32, AVG),
        (torch.bfloat16, torch.bfloat16, SUM),
    ):
        for numel in (0, 1, 3, 300_001):
            values = torch.randn(size, size * numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
            for tensor in (group.empty(size * numel, dtype), torch.empty(size * numel, dtype=dtype)):
                tensor.copy_(values[rank])
                out = torch.empty(numel, dtype=out_dtype)
                group.reduce_scatter(out, tensor, op)
                total = values[0].float()
                for each in values[1:]:
                    total = total + each.float()
                total = total / size if op == AVG else total
                assert torch.equal(out, total[rank * numel : (rank + 1) * numel].to(out_dtype))


def test_what_a_shared_group_does():
    run(3, _primitives)


def _buffers_follow_the_slowest_rank():
    group = SharedGroup.join(dist.group.WORLD)
    buffers = group.buffers
    kept = []
    addresses = []
    for turn in range(40):
        tensor = buffers.take(group, 1000, torch.float32)
        tensor[0] = turn
        addresses.append(tensor.data_ptr())
        if group.rank == 1 and turn % 5 == 0:
            kept = [*kept[-1:], (turn, tensor)]  # as if garbage collection came late here
        del tensor
        buffers.rendezvous(group)
        for written, old in kept:
            assert old[0] == written, "a buffer was taken again that this rank still used"
    orders = [None] * group.size
    places = [sorted(set(addresses)).index(each) for each in addresses]
    dist.all_gather_object(orders, len(set(places)))
    assert len(set(orders)) == 1
    assert orders[0] <= 5  # two that rank 1 keeps, and three in turns


def test_a_buffer_is_taken_again_only_when_all_ranks_have_freed_it():
    run(2, _buffers_follow_the_slowest_rank)


def _hosts(differ):
    os.environ["FSDP_TP_HOST"] = f"host {dist.get_rank() if differ else 0}"
    try:
        SharedGroup.join(dist.group.WORLD)
        return None
    except NotShared as reason:
        return str(reason)
    finally:
        del os.environ["FSDP_TP_HOST"]


def test_hosts_that_differ_are_found_on_all_ranks():
    assert run(2, _hosts, False) == [None] * 2
    assert run(2, _hosts, True) == ["its 2 ranks are on 2 hosts"] * 2


def _shared_mappings_and_files():
    maps = re.findall(r"memfd:fsdp_tp", Path("/proc/self/maps").read_text())
    files = [
        each
        for each in Path("/proc/self/fd").iterdir()
        if "fsdp_tp" in str(each.readlink() if each.is_symlink() else "")
    ]
    threads = len(list(Path("/proc/self/task").iterdir()))
    return len(maps), len(files), threads


def _train_in_a_group_that_goes():
    ranks = dist.new_group([0, 1])
    mesh = DeviceMesh.from_group(ranks, "cpu")
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    fsdp_tp.fully_shard(model, mesh=mesh, comm="zero_copy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group(ranks)
    other = dist.new_group([0, 1])
    SharedGroup.join(other)
    with pytest.raises(RuntimeError, match="the process group of this shared memory has been destroyed"):
        model(torch.ones(1, 4))
    dist.barrier()
    dist.destroy_process_group(other)


def _leaks():
    found = []
    for _ in range(3):
        _train_in_a_group_that_goes()
        gc.collect()
        found.append(_shared_mappings_and_files())
    return found


def test_nothing_is_left_of_a_group_that_was_destroyed():
    for _, second, third in run(2, _leaks):  # the first may find what other tests have left
        assert second == third


def _killed(rank, store, when, answers):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 3), rank=rank, world_size=3, timeout=datetime.timedelta(seconds=120)
    )
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    for unit in (*model, model):
        fsdp_tp.fully_shard(unit, comm="zero_copy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    steps = []

    def kill(*_):
        if rank == 1 and len(steps) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    if when == "forward":
        model[1].register_forward_pre_hook(kill)
    else:
        model[1].register_full_backward_pre_hook(kill)
    try:
        for step in range(4):
            steps.append(step)
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        answers.put((rank, None))
    except dist.DistBackendError as error:
        answers.put((rank, str(error)))


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_killed_rank_is_named_by_the_others(tmp_path, when):
    context = mp.get_context("forkserver")
    answers = context.SimpleQueue()
    members = [
        context.Process(target=_killed, args=(rank, str(tmp_path / "store"), when, answers)) for rank in range(3)
    ]
    for member in members:
        member.start()
    for member in members:
        member.join(100)  # less than the timeout of the group
    assert members[1].exitcode == -signal.SIGKILL
    assert [members[rank].exitcode for rank in (0, 2)] == [0, 0]
    for rank, error in (answers.get(), answers.get()):
        assert rank in (0, 2)
        assert re.search(r"rank 1 \(process \d+\) has ended", error), error


def _late(started):
    if started == "script":  # whose timeout the groups of the mesh take over
        dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(datetime.timedelta(seconds=2))
    mesh = fsdp_tp.init_mesh(timeout=None if started == "script" else datetime.timedelta(seconds=2))
    shared = SharedGroup.join(mesh.shard.get_group())
    if dist.get_rank() == 1:
        time.sleep(6)
        return None
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError, match=r"rank 1 .*did not come within 2 s"):
        shared.barrier()
    return time.monotonic() - began


@pytest.mark.parametrize("started", ["script", "init_mesh"])
def test_a_rank_that_is_late_is_missed_after_the_timeout_of_the_mesh(started):
    assert run(2, _late, started)[0] < 5
