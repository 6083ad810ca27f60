"""One rank of a world over hosts with different numbers of ranks: every collective against arithmetic.

Values are small integers, so that sums are exact in every dtype and in every order.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.namespaces import enter
from fsdp_tp.comm.backend import NAME, backend_of, register

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
SIZES = (0, 1, 7, 1001, 700_001)  # of a rank's part; the last is a few megabytes
# Of ranks 0 and 1 on the first host, 2 on the second, 3 on the third: all, one host, one rank each, two and one.
GROUPS = ([0, 1, 2, 3], [0, 1], [1, 2], [0, 1, 3])


def values(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """What a rank contributes: not constant, and its own."""
    return ((rank + 1) * (torch.arange(size) % 7 + 1)).to(dtype)


Case = tuple[Any, Tensor, Tensor]  # the work, its result once that is done, what it must be


def all_gather(size: int, dtype: torch.dtype, ranks: list[int], group: Any) -> list[Case]:
    whole = torch.full((size * len(ranks),), -1, dtype=dtype)
    part = values(dist.get_rank(), size, dtype)
    work = dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
    return [(work, whole, torch.cat([values(rank, size, dtype) for rank in ranks]))]


def reduce_scatter(size: int, dtype: torch.dtype, ranks: list[int], group: Any) -> list[Case]:
    part = torch.full((size,), -1, dtype=dtype)
    whole = values(dist.get_rank(), size * len(ranks), dtype)
    work = dist.reduce_scatter_tensor(part, whole, group=group, async_op=True)
    expected = sum(values(rank, size * len(ranks), dtype) for rank in ranks)
    return [(work, part, expected[size * ranks.index(dist.get_rank()) :][:size])]


def all_reduce(size: int, dtype: torch.dtype, ranks: list[int], group: Any) -> list[Case]:
    cases = []
    for op, combine in ((dist.ReduceOp.SUM, torch.sum), (dist.ReduceOp.MAX, torch.amax)):
        buffer = values(dist.get_rank(), size, dtype)
        work = dist.all_reduce(buffer, op, group=group, async_op=True)
        everything = torch.stack([values(rank, size, dtype) for rank in ranks])
        cases.append((work, buffer, combine(everything, dim=0).to(dtype)))
    return cases


def broadcast(size: int, dtype: torch.dtype, ranks: list[int], group: Any) -> list[Case]:
    cases = []
    for source in ranks:
        buffer = values(dist.get_rank(), size, dtype)
        work = dist.broadcast(buffer, source, group=group, async_op=True)
        cases.append((work, buffer, values(source, size, dtype)))
    return cases


OPERATIONS: tuple[Callable[..., list[Case]], ...] = (all_gather, reduce_scatter, all_reduce, broadcast)


def check(rank: int, host: str, address: str, result: Connection) -> None:
    """Be rank ``rank`` of 4, in the namespace ``host``; sends how many results were checked, or a traceback."""
    enter(host)
    try:
        result.send(_check(rank, dist.TCPStore(address, 29500, 4, is_master=rank == 0)))
    except BaseException:
        result.send(traceback.format_exc())
    time.sleep(60)  # whoever ends first must not be what the others report


def _check(rank: int, store: dist.Store) -> int:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # names of older torch
    register()
    dist.init_process_group(NAME, store=store, rank=rank, world_size=4, timeout=timedelta(seconds=60))
    checked = 0
    for ranks in GROUPS:
        group = dist.new_group(ranks)
        if rank not in ranks:
            continue
        if ranks == [0, 1]:
            assert backend_of(group) == NAME
        for operation in OPERATIONS:
            for size in SIZES:
                # Several at once, as FSDP has them.
                cases = [case for dtype in DTYPES for case in operation(size, dtype, ranks, group)]
                for work, result, expected in cases:
                    work.wait()
                    assert torch.equal(result, expected), (operation.__name__, size, result.dtype, ranks)
                    checked += 1
    return checked
