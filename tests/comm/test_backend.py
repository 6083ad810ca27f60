"""The collectives of fsdp_tp_shm against gloo in the same processes. If these fail, look in kernels/torch/."""

import functools
import os

import pytest
import torch
import torch.distributed as dist

from fsdp_tp.comm.backend import NAME, backend_of
from tests.ranks import run

NATIVE = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64]
# With what gloo moves the same bits as.
OTHERS = {
    torch.bool: torch.uint8,
    torch.uint8: torch.uint8,
    torch.int8: torch.int8,
    torch.complex64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
}
SLOT = 4096  # bytes, the smallest
SIZES = [0, 3, SLOT // 2 + 3]  # elements; the last are several slots of any dtype but those of a byte
GROUPS = [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 1, 2]]]

SUM, AVG, MIN, MAX, PRODUCT = (getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"))


def _data(shape, dtype, seed):
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + seed)
    # Small whole numbers: their sums are exact in any order and in 16 bits.
    values = torch.randint(-8, 8, shape, generator=generator)
    return values.to(dtype)


def _all_reduce(group, x, op):
    x = x.clone()
    dist.all_reduce(x, op, group=group)
    return [x]


def _reduce(group, x, op):
    root, x = dist.get_process_group_ranks(group)[-1], x.clone()
    dist.reduce(x, root, op, group=group)
    return [x] if dist.get_rank() == root else []


def _reduce_scatter_tensor(group, x, op):
    out = torch.empty_like(x)
    dist.reduce_scatter_tensor(out, torch.cat([x + i for i in range(group.size())]), op, group=group)
    return [out]


def _reduce_scatter(group, x, op):
    out = torch.empty_like(x)
    dist.reduce_scatter(out, [x + i for i in range(group.size())], op, group=group)
    return [out]


def _all_gather_into_tensor(group, x):
    out = torch.empty(group.size() * len(x), dtype=x.dtype)
    dist.all_gather_into_tensor(out, x, group=group)
    return [out]


def _all_gather(group, x):
    outs = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(outs, x, group=group)
    return outs


def _broadcast(group, x):
    x = x.clone()
    dist.broadcast(x, dist.get_process_group_ranks(group)[-1], group=group)
    return [x]


def _gather(group, x):
    root = dist.get_process_group_ranks(group)[-1]
    outs = [torch.empty_like(x) for _ in range(group.size())] if dist.get_rank() == root else None
    dist.gather(x, outs, root, group=group)
    return outs or []


def _scatter(group, x):
    root, out = dist.get_process_group_ranks(group)[-1], torch.empty_like(x)
    inputs = [x.roll(i) for i in range(group.size())] if dist.get_rank() == root else None
    dist.scatter(out, inputs, root, group=group)
    return [out]


def _all_to_all_single(group, x):
    rank, size = group.rank(), group.size()
    # Rank r sends i + r elements of its data to rank i.
    sent, received = [i + rank for i in range(size)], [i + rank for i in range(size)]
    data = x.repeat(sum(sent))[: sum(sent)] if len(x) else x.new_zeros(sum(sent))
    out = x.new_empty(sum(received))
    dist.all_to_all_single(out, data, received, sent, group=group)
    even = x.repeat(size)
    equal = torch.empty_like(even)
    dist.all_to_all_single(equal, even, group=group)
    return [out, equal]


def _strided(group, x):
    """Into and from memory with gaps; gloo mistakes it for contiguous, and gets contiguous memory."""
    gaps = backend_of(group) == NAME

    def like_x():
        return torch.zeros(len(x), 2, dtype=x.dtype)[:, 1] if gaps else torch.zeros_like(x)

    shared, outs = like_x().copy_(x), [like_x() for _ in range(group.size())]
    dist.broadcast(shared, dist.get_process_group_ranks(group)[0], group=group)
    dist.all_gather(outs, like_x().copy_(x), group=group)
    return [shared, *outs]


REDUCTIONS = [_all_reduce, _reduce, _reduce_scatter_tensor, _reduce_scatter]
MOVEMENTS = [_all_gather_into_tensor, _all_gather, _broadcast, _gather, _scatter, _all_to_all_single, _strided]


def _pairs():
    """Of each of GROUPS that this rank is in: the group on our backend, the same on gloo."""
    os.environ["FSDP_TP_SLOT_BYTES"] = str(SLOT)
    pairs = []
    for partition in GROUPS:
        for ranks in partition:
            pair = [dist.new_group(ranks, backend=name) for name in (NAME, "gloo")]
            if dist.get_rank() in ranks:
                pairs.append(pair)
    del os.environ["FSDP_TP_SLOT_BYTES"]
    return pairs


def _different(pairs, name, call, x, exact=True):
    """Descriptions of where `call(group, x)` differs between the groups of a pair."""
    found = []
    carrier = OTHERS.get(x.dtype, x.dtype)
    for ours, gloo in pairs:
        assert backend_of(ours) == NAME
        for got, expected in zip(call(ours, x), call(gloo, x.view(carrier)), strict=True):
            # Means of exact sums: one rounding here, one there.
            rtol = 0 if exact else torch.finfo(got.dtype).eps
            if not torch.allclose(got.view(carrier), expected, rtol=rtol, atol=0):
                found.append((name, ours.size(), got.tolist()[:5], expected.tolist()[:5]))
    return found


def _reductions():
    pairs, found, seed = _pairs(), [], 0
    for dtype in NATIVE:
        for size in SIZES:
            for operation in REDUCTIONS:
                ops = [SUM]
                if size == SIZES[-1] and operation in (_all_reduce, _reduce_scatter_tensor):
                    ops += [MIN, MAX, *([AVG] if dtype.is_floating_point else [])]
                for op in ops:
                    seed += 1
                    name = f"{operation.__name__} {op} {dtype} {size}"
                    call = functools.partial(operation, op=op)
                    found += _different(pairs, name, call, _data((size,), dtype, seed), exact=op != AVG)
    return found


def test_reductions_equal_those_of_gloo():
    assert run(4, _reductions) == [[]] * 4


def _movements():
    pairs, found, seed = _pairs(), [], 0
    for dtype in [*NATIVE, *OTHERS]:
        for size in SIZES:
            for operation in MOVEMENTS:
                seed += 1
                x = _data((size,), dtype, seed)
                found += _different(pairs, f"{operation.__name__} {dtype} {size}", operation, x)
    return found


def test_movements_equal_those_of_gloo():
    assert run(4, _movements) == [[]] * 4


def _others_go_over_gloo():
    pairs = _pairs()
    found = []
    for dtype, op in [
        (torch.uint8, SUM),
        (torch.int8, MAX),
        (torch.float32, PRODUCT),
        (torch.int64, dist.ReduceOp.BAND),
        (torch.int32, dist.ReduceOp.BOR),
    ]:
        found += _different(pairs, f"{dtype} {op}", functools.partial(_all_reduce, op=op), _data((5,), dtype, 0))
    return found


def test_reductions_that_the_library_lacks_go_over_gloo():
    assert run(4, _others_go_over_gloo) == [[]] * 4


def _rounding():
    """The largest error of sums of random numbers, in units of the last place of the sum of magnitudes."""
    errors = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        rank, size = dist.get_rank(), dist.get_world_size()
        inputs = [torch.randn(999, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(size)]
        exact = sum(each.double() for each in inputs)
        magnitude = sum(each.double().abs() for each in inputs)
        x = inputs[rank].clone()
        dist.all_reduce(x)
        errors[dtype] = ((x.double() - exact).abs() / magnitude).max().item() / torch.finfo(dtype).eps
        factor = dist._make_nccl_premul_sum(0.25)
        y = inputs[rank].clone()
        dist.all_reduce(y, factor)
        z = inputs[rank].clone()
        dist.all_reduce(z, dist._make_nccl_premul_sum(torch.tensor([0.25])))
        assert y.equal(z)
        assert torch.allclose(y, x / 4, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny)
    return errors


def test_sums_are_within_their_rounding():
    for errors in run(4, _rounding):
        assert errors.pop(torch.float32) <= 1.5  # three additions, half a unit each
        assert errors.pop(torch.float64) <= 1.5
        for dtype, error in errors.items():
            assert error <= 0.51, dtype  # summed in float32, rounded once


def _refused():
    group, messages = dist.group.WORLD, []
    for call in (
        lambda: dist.all_gather_into_tensor(torch.empty(3), torch.empty(2)),
        lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.empty(5)),
        lambda: dist.all_gather([torch.empty(2), torch.empty(3)], torch.empty(2)),
        lambda: dist.all_to_all_single(torch.empty(3), torch.empty(2), [2, 2], [1, 1]),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), AVG),
    ):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        messages.append(str(caught.value))
    dist.all_reduce(torch.ones(1), group=group)  # and the group is still fit for use
    return messages


def test_wrong_sizes_are_refused_and_the_group_lives_on():
    for messages in run(2, _refused):
        assert "all_gather_into_tensor: [3] of float is not 2 times [2] of float" in messages[0]
        assert "reduce_scatter_tensor: [5] of float is not 2 times [2] of float" in messages[1]
        assert "there is [3] of float beside [2] of float" in messages[2]
        assert "output_split_sizes [2, 2] must be 2 numbers that add up to 3" in messages[3]
        assert messages[4] == "AVG and PREMUL_SUM are for floating-point tensors, not for Int"
