"""Every strategy trains as stock FSDP2 over gloo does, bit for bit. If these fail, look in fsdp_tp/comm/: shared.py,
zero_copy.py, fp32_accumulate.py; if only the races do, in the head of zero_copy.py and in buffers.py."""

from __future__ import annotations

import os
import random
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import fsdp_tp
from bench.fsdp_step import physical_bytes
from tests import models
from tests.ranks import run

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
FP32_SHARED, ALL = ("shared", "zero_copy"), ("shared", "zero_copy", "fp32_accumulate")


class Net(nn.Module):
    """13 rows over 2 or 4 ranks leave padding; 3 rows over 4 leave a rank nothing."""

    def __init__(self, tied=False, frozen=False):
        super().__init__()
        torch.manual_seed(1)
        self.front = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 13), nn.GELU(), nn.Linear(13, 6, bias=False)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.ones(3, 6))
        self.head = nn.Linear(6, 13, bias=False)
        if tied:
            self.head.weight = self.front.weight
        if frozen:
            self.blocks[0].requires_grad_(False)
            self.blocks[1][0].weight.requires_grad_(False)

    def forward(self, ids):
        x = self.front(ids)
        for index, block in enumerate(self.blocks):
            x = x + block(x) * self.scale[index]
        return self.head(x)


@contextmanager
def _gloo():
    """Stock FSDP2 over gloo is the truth, even where init_mesh knows a faster backend."""
    before = os.environ.get("FSDP_TP_BACKEND")
    os.environ["FSDP_TP_BACKEND"] = "gloo"
    try:
        yield
    finally:
        del os.environ["FSDP_TP_BACKEND"]
        os.environ.update({} if before is None else {"FSDP_TP_BACKEND": before})


def _sharded(comm, tied=False, frozen=False, degree=0, policy=None, reshard=None):
    model = Net(tied, frozen)
    for unit in (*model.blocks, model):
        fsdp_tp.fully_shard(
            unit,
            hybrid_shard_degree=degree,
            comm=comm,
            mp_policy=policy or MixedPrecisionPolicy(),
            reshard_after_forward=reshard,
        )
    return model


def _batch(step, rows=2):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(0, 13, (rows, 5), generator=generator)


def _train(model, steps=3, micro_batches=1):
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    seen = []
    for step in range(steps):
        for micro_batch in range(micro_batches):
            with fsdp_tp.accumulate(model, last=micro_batch == micro_batches - 1):
                loss = model(_batch(10 * step + micro_batch)).float().square().mean()
                loss.backward()
            seen.append(loss.detach())
        seen.append(fsdp_tp.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append(model(_batch(7)).float())
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()  # stock leaves the root unsharded, in the type of the computation
    return [*seen, *(models.gather(each) for each in model.parameters())]


def _assert_same_bits(ours, theirs, what):
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), f"{what}: value {index} differs by {(a - b).abs().max()}"


@_gloo()
def _equal_to_stock(strategies, options, micro_batches):
    expected = _train(_sharded("torch", **options), micro_batches=micro_batches)
    for comm in strategies:
        _assert_same_bits(_train(_sharded(comm, **options), micro_batches=micro_batches), expected, comm)


@pytest.mark.parametrize(
    ("world_size", "strategies", "options", "micro_batches"),
    [
        (2, FP32_SHARED, {}, 1),
        # Gradients of bf16 parameters lose nothing on a bf16 wire.
        (2, ALL, {"policy": BF16}, 3),
        (2, FP32_SHARED, {"reshard": False}, 2),
        (2, FP32_SHARED, {"reshard": True, "tied": True}, 1),
        (2, FP32_SHARED, {"frozen": True}, 1),
        (2, ALL, {"frozen": True, "tied": True, "policy": BF16}, 1),
        # Two ranks a shard group, and the replicate all-reduce is the same.
        (4, FP32_SHARED, {"degree": 2}, 2),
        (4, ALL, {"degree": 2, "policy": BF16}, 1),
    ],
)
def test_equal_to_stock_bit_for_bit(world_size, strategies, options, micro_batches):
    run(world_size, _equal_to_stock, strategies, options, micro_batches)


def _wrapped(comm, meta=False, **options):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    torch.manual_seed(2)
    with torch.device("meta" if meta else "cpu"):
        model = models.hugging_face("llama", tie_word_embeddings=True)
    fsdp_tp.wrap(model, mesh, comm=comm, **options)
    ids = models.batch().chunk(mesh.data_size)[mesh.data_rank]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for _ in range(2):
        loss = model(ids).logits.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return [*seen, model.generate(ids[:, :4], max_new_tokens=3), *map(models.gather, model.parameters())]


@_gloo()
def _tensor_parallel():
    for meta, options in (
        (False, {"activation_checkpointing": "full", "reshard_after_forward": True}),
        (True, {"mp_policy": BF16, "sequence_parallel": True}),
    ):
        expected = _wrapped("torch", meta, **options)
        for comm in ALL if "mp_policy" in options else FP32_SHARED:
            _assert_same_bits(_wrapped(comm, meta, **options), expected, f"{comm} {options}")


def test_tensor_parallel_shards_of_two_ranks_equal_stock():
    run(4, _tensor_parallel)


def _sums_in_rank_order(policy):
    world_size, rank = dist.get_world_size(), dist.get_rank()
    plain = Net()
    if policy is not None:
        plain.to(policy.param_dtype)
    plain(_batch(0)).float().square().mean().backward()
    expected = []
    for parameter in plain.parameters():
        of_all = [torch.empty_like(parameter) for _ in range(world_size)]
        dist.all_gather(of_all, parameter.grad)
        total = of_all[0].float()
        for each in of_all[1:]:
            total = total + each.float()
        expected.append(total / world_size)
    for comm in ALL if policy is not None else FP32_SHARED:
        model = _sharded(comm, policy=policy)
        model(_batch(0)).float().square().mean().backward()
        grads = [models.gather(parameter.grad) for parameter in model.parameters()]
        _assert_same_bits(grads, expected, f"{comm} on rank {rank}")


@pytest.mark.parametrize("policy", [None, BF16])
def test_gradients_of_four_ranks_are_summed_in_their_order(policy):
    run(4, _sums_in_rank_order, policy)


def _fp32_accumulate_rounds_fp32_gradients_once():
    expected = torch.zeros(13, 6)
    torch.manual_seed(0)
    of_all = torch.randn(4, 13, 6)
    for each in of_all:
        expected += each.bfloat16().float()
    model = nn.Linear(6, 13, bias=False)
    fsdp_tp.fully_shard(model, comm="fp32_accumulate")
    (model(torch.eye(6)).T * of_all[dist.get_rank()]).sum().backward()
    assert torch.equal(models.gather(model.weight.grad), expected / 4)


def test_fp32_accumulate_rounds_fp32_gradients_to_16_bits_once():
    run(4, _fp32_accumulate_rounds_fp32_gradients_once)


@contextmanager
def _sleeps(model, seed):
    """Before any block a rank may sleep longer than the others need for several blocks."""
    chance = random.Random(seed + dist.get_rank())

    def sleep(*_):
        if chance.random() < 0.1:
            time.sleep(chance.random() * 3e-3)

    handles = [each.register_forward_pre_hook(sleep) for block in model.blocks for each in block]
    handles += [each.register_full_backward_pre_hook(sleep) for each in model.blocks]
    yield sleep
    for handle in handles:
        handle.remove()


def _many_steps(comm, steps, policy, sleepy):
    model = _sharded(comm, policy=policy, reshard=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    with _sleeps(model, seed=3 if sleepy else 0) as sleep:
        for step in range(steps):
            loss = model(_batch(step)).float().square().mean()
            loss.backward()
            if step % 3 == 0:
                seen.append(model(_batch(step + 1)).detach())  # with gradients, which nobody wants
            if sleepy:
                sleep()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
    return [*seen, *map(models.gather, model.parameters())]


@_gloo()
def _race(steps):
    for policy, strategies in ((None, FP32_SHARED), (BF16, ("zero_copy",))):
        expected = _many_steps("torch", steps // 2, policy, sleepy=False)
        for comm in strategies:
            _assert_same_bits(_many_steps(comm, steps // 2, policy, sleepy=True), expected, comm)


def test_ranks_that_sleep_at_random_change_no_bit():
    run(2, _race, 60)


@_gloo()
def _slow_reader(write):
    """Rank 1 is still in a forward pass when rank 0 wants to write."""
    results = []
    for comm in ("torch", "zero_copy"):
        for policy in (None, BF16):
            model = _sharded(comm, policy=policy, reshard=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            model(_batch(0)).float().square().mean().backward()
            slow = dist.get_rank() == 1
            handle = model.blocks[2][2].register_forward_pre_hook(lambda *_, s=slow: time.sleep(0.3 if s else 0))
            with torch.set_grad_enabled(write == "step"):
                seen = model(_batch(1)).detach()
            if write == "step":
                optimizer.step()
            else:
                for parameter in model.parameters():
                    parameter.to_local().detach().zero_()
            handle.remove()
            again = model(_batch(1)).detach() if write == "zero" else seen
            results.append((comm, policy, seen, again))
    for (_, _, seen, _), (comm, policy, ours, ours_again) in zip(results[:2], results[2:], strict=True):
        assert torch.equal(seen, ours), f"{comm} {policy}: read what another rank wrote later"
        # Stock still uses its copy of the root's parameters from before.
        assert comm == "torch" or policy is not None or write == "step" or not ours_again.any()


@pytest.mark.parametrize("write", ["step", "zero"])
def test_nobody_writes_what_a_slow_rank_still_reads(write):
    run(2, _slow_reader, write)


@torch.no_grad()
def _slow_writer():
    """FSDP leaves the root's parameters unsharded, so that it would not gather them for the second forward."""
    model = _sharded("zero_copy")
    assert model(_batch(0)).any()
    time.sleep(0.3 * dist.get_rank())
    for parameter in model.parameters():
        parameter.to_local().zero_()
    assert not model(_batch(0)).any()


def test_nobody_reads_what_a_slow_rank_is_still_to_write():
    run(2, _slow_writer)


def _copies():
    """(bytes of all ranks, bytes of one copy) of sharded and unsharded parameters while all units are unsharded."""
    found = {}
    for comm, policy in (("torch", None), ("zero_copy", None), ("zero_copy", BF16)):
        model = nn.Sequential(*(nn.Linear(256, 1024, bias=False) for _ in range(3)))
        for unit in (*model, model):
            fsdp_tp.fully_shard(unit, comm=comm, mp_policy=policy or MixedPrecisionPolicy())
        sharded = [each.to_local() for each in model.parameters()]
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.unshard()
        dist.barrier()
        whole = list(model.parameters())
        sizes = torch.tensor([physical_bytes([*sharded, *whole]), physical_bytes(whole)])
        dist.all_reduce(sizes)
        found[comm, policy is not None] = [int(size) / (3 * 256 * 1024 * 4) for size in sizes]
    return found


def test_zero_copy_holds_one_copy_of_the_parameters():
    """The pages of three layers of 1 MiB, of which a page at either end may hold something else, too."""
    found = run(2, _copies)[0]
    assert found["torch", False][0] > 2.9  # shards, and unsharded parameters of two ranks
    assert found["zero_copy", False][0] <= 1.1
    assert found["zero_copy", True][1] <= 0.55  # bf16; beside them each rank has its fp32 shard
    assert found["zero_copy", True][0] <= 1.65
