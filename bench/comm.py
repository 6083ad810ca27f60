"""How fast are the collectives of one host, ours beside gloo's, Open MPI's and a plain copy?

Every variant runs in turns, in one run: ours, gloo and the copy in the same processes through
``torch.distributed`` calls, Open MPI (where ``mpirun`` and ``mpi4py`` are installed) in processes of its own that
sleep meanwhile. ``bytes`` are those of the whole: the output of an all-gather, the input of a reduce-scatter,
the buffer of an all-reduce; ``memcpy`` copies that many in every rank at the same time. ``shared`` is the
all-gather of ``comm="shared"``, whose output is one buffer for all ranks. A measurement is the time of a row of
calls, divided by their number, of the rank that took longest; medians are over rounds.

    python -m bench.comm [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

KIB, MIB = 1 << 10, 1 << 20
OPS = ("all_gather", "reduce_scatter", "all_reduce")
DTYPES = ("float32", "bfloat16")
# Bytes, and how many calls make up one measurement.
CALLS = {4 * KIB: 800, 64 * KIB: 400, MIB: 40, 16 * MIB: 4, 64 * MIB: 2}
IN_TORCH = ("ours", "shared", "gloo", "memcpy")
Case = tuple[str, str, str, int]  # variant, op, dtype, bytes


def torch_cases(rank: int, world: int, store: str) -> Callable[[Case], Callable[[], Any]]:
    """What makes a call of each case, after one that was checked."""
    import torch
    import torch.distributed as dist

    from fsdp_tp.comm.backend import register
    from fsdp_tp.comm.shared_memory import SharedGroup

    torch.set_num_threads(1)
    register()
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    groups = {"gloo": dist.group.WORLD, "ours": dist.new_group(backend="fsdp_tp_shm")}
    together = SharedGroup.join(dist.group.WORLD)

    def make(case: Case) -> Callable[[], Any]:
        variant, op, dtype, size = case
        group = groups.get(variant)
        count = size // getattr(torch, dtype).itemsize
        whole = torch.full((count,), rank + 1.0, dtype=getattr(torch, dtype))
        part = whole[: count // world].clone()
        sums = torch.full_like(whole, world * (world + 1) / 2)
        if variant == "memcpy":
            target = torch.empty_like(whole)
            return lambda: target.copy_(whole)
        if variant == "shared":
            output, _ = together.map(size).tensor(getattr(torch, dtype), count)
            own = output.chunk(world)[rank]

            def shared() -> None:
                own.copy_(part)
                together.barrier()

            shared()
            assert [chunk[0].item() for chunk in output.chunk(world)] == [r + 1.0 for r in range(world)]
            together.barrier()
            return shared
        if op == "all_gather":
            gathered = torch.empty_like(whole)
            dist.all_gather_into_tensor(gathered, part, group=group)
            assert [chunk[-1].item() for chunk in gathered.chunk(world)] == [r + 1.0 for r in range(world)]
            return lambda: dist.all_gather_into_tensor(gathered, part, group=group)
        if op == "reduce_scatter":
            dist.reduce_scatter_tensor(part, whole, group=group)
            assert torch.equal(part, sums[: count // world])
            return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
        checked = whole.clone()
        dist.all_reduce(checked, group=group)
        assert torch.equal(checked, sums)
        whole.zero_()  # sums of sums would overflow
        return lambda: dist.all_reduce(whole, group=group)

    return make


def mpi_cases() -> Callable[[Case], Callable[[], Any]]:
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def make(case: Case) -> Callable[[], Any]:
        _, op, _, size = case
        # Written, each of them: pages that never were are one page of zeros in the caches, and cost nothing to read.
        whole = np.full(size // 4, 1e-30, np.float32)
        part = np.ones(size // 4 // world.size, np.float32)
        out = np.ones_like(whole)
        if op == "all_gather":
            return lambda: world.Allgather(part, out)
        if op == "reduce_scatter":
            return lambda: world.Reduce_scatter_block(whole, part)
        return lambda: world.Allreduce(MPI.IN_PLACE, whole)

    return make


def work(address: str, rank: int, world: int, store: str) -> None:
    """A process that measures what it is told: ``(case, calls)`` in, seconds a call out."""
    if store:
        make = torch_cases(rank, world, store)
    else:
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        make = mpi_cases()
    with Client(address, "AF_UNIX") as connection:
        connection.send((bool(store), rank))
        made: dict[Case, Callable[[], Any]] = {}
        while (order := connection.recv()) is not None:
            case, calls = order
            if case not in made:
                made = {old: call for old, call in made.items() if old[1:] == case[1:]}
                made[case] = make(case)
            call = made[case]
            for _ in range(1 + calls // 4):  # brings the ranks together, and this variant's pages into the caches
                call()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            connection.send((time.perf_counter() - began) / calls)


class Workers:
    """The processes of one world size, ours and Open MPI's."""

    def __init__(self, stack: ExitStack, world: int, with_mpi: bool) -> None:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        address = f"{directory}/socket"
        listener = stack.enter_context(Listener(address, "AF_UNIX", backlog=2 * world))
        command = [sys.executable, "-m", "bench.comm", "--address", address, "--world", str(world)]
        # Without numpy's huge pages, which tensors of torch do not have either: they halve the time of large copies.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMPY_MADVISE_HUGEPAGE": "0"}
        starts = [[*command, "--rank", str(rank), "--store", f"{directory}/store"] for rank in range(world)]
        if with_mpi:
            starts.append(["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(world), *command])
        self.processes = [subprocess.Popen(start, env=environment) for start in starts]
        stack.callback(self.stop)
        accepted = [listener.accept() for _ in range(world * (2 if with_mpi else 1))]
        self.connections: dict[bool, list[Connection]] = {True: [], False: []}
        for connection in accepted:
            in_torch, _ = connection.recv()
            self.connections[in_torch].append(connection)

    def measure(self, case: Case, calls: int) -> float:
        """Seconds a call, of the slowest rank."""
        connections = self.connections[case[0] in IN_TORCH]
        for connection in connections:
            connection.send((case, calls))
        return max(connection.recv() for connection in connections)

    def stop(self) -> None:
        for connection in (*self.connections[True], *self.connections[False]):
            connection.send(None)
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def variants_of(op: str, dtype: str, with_mpi: bool) -> list[str]:
    variants = ["ours", "gloo", "memcpy"]
    if op == "all_gather":
        variants.append("shared")
    if with_mpi and dtype == "float32":  # MPI has no bfloat16
        variants.append("openmpi")
    return variants


def measure(world: int, sizes: list[int], rounds: int, with_mpi: bool) -> list[dict[str, Any]]:
    rows = []
    with ExitStack() as stack:
        workers = Workers(stack, world, with_mpi)
        cases = [(op, dtype, size) for dtype in DTYPES for op in OPS for size in sizes]
        for op, dtype, size in track(cases, f"{world} ranks", console=Console(stderr=True)):
            seconds: dict[str, list[float]] = {variant: [] for variant in variants_of(op, dtype, with_mpi)}
            for turn in range(rounds + 1):
                for variant in seconds:
                    calls = max(1, CALLS[size] // 10) if variant == "gloo" else CALLS[size]
                    took = workers.measure((variant, op, dtype, size), calls)
                    if turn > 0:
                        seconds[variant].append(took)
            for variant, values in seconds.items():
                low, high = min(values), max(values)
                rows.append(
                    {"op": op, "variant": variant, "dtype": dtype, "world": world, "bytes": size,
                     "median_us": 1e6 * statistics.median(values), "range_us": [1e6 * low, 1e6 * high]}
                )  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "ranks", "op", "dtype", "size", "ours", "gloo / ours", "Open MPI / ours", "ours / memcpy", "shared / memcpy"
    )
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        key = (row["world"], row["op"], row["dtype"], row["bytes"])
        found.setdefault(key, {})[row["variant"]] = row["median_us"]
    for (world, op, dtype, size), us in found.items():

        def ratio(a: str, b: str, us: dict[str, float] = us) -> str:
            return f"{us[a] / us[b]:.2f}" if a in us and b in us else ""

        text = f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
        ratios = (ratio("gloo", "ours"), ratio("openmpi", "ours"), ratio("ours", "memcpy"), ratio("shared", "memcpy"))
        table.add_row(str(world), op, dtype, text, f"{us['ours']:.1f} us", *ratios)
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and only three sizes for four ranks")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--address", help=argparse.SUPPRESS)  # of the process that orders; makes this one a worker
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.address:
        work(options.address, options.rank, options.world, options.store)
        return
    with_mpi = shutil.which("mpirun") is not None and importlib.util.find_spec("mpi4py") is not None
    if not with_mpi:
        print("Open MPI is not installed (mpirun and the package mpi4py): it is left out")
    sizes = list(CALLS)
    rows = measure(2, sizes, 3 if options.quick else 15, with_mpi)
    rows += measure(4, sizes[1:4] if options.quick else sizes[1:], 2 if options.quick else 9, with_mpi)
    show(rows)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
