"""What does an FSDP2 step cost when the ranks are on two hosts with a slow link between them?

Two "hosts" on this machine (:mod:`bench.namespaces`), two ranks on each under torchrun, 1 Gbit/s between them. The
model is that of :mod:`bench.fsdp_step`: four MLP blocks of width 768 (18.9 M parameters, fp32, SGD, batch 32 a rank).
``full`` shards over all four ranks, ``hybrid`` over the two of a host, with a replica on each. All variants take turns
in the same processes: ``torch`` is stock FSDP2 over gloo, ``ours`` what ``init_mesh`` and ``comm="auto"`` choose, the
others the wires of that name on the link between the hosts. ``all_gather_64MiB`` is one collective over all four
ranks, of which 64 MiB is the whole output, ``all_reduce_64MiB`` one of 64 MiB of fp32 on each.

No case can be faster than two things. ``link_bytes`` crossed the busiest host's link in one direction, and ``link_ms``
is the time that they need there at the rate that a plain socket reaches, measured at the start. ``cpu_ms`` is what all
ranks' threads together took of processors, divided by how many processors this machine has: the hosts share them.

    python -m bench.hosts [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.namespaces import Namespaces, run_job, unavailable

RATE = "1gbit"
WIDTH, BLOCKS, BATCH = 768, 4, 32
PARAMETER_BYTES = 4 * 8 * WIDTH**2 * BLOCKS
MESSAGE_BYTES = 64 << 20
LAYOUTS = {"full": 0, "hybrid": 2}  # hybrid_shard_degree
VARIANTS = {"torch": "torch", "ours": "auto", "fp32_accumulate": "fp32_accumulate:hosts", "int8": "int8:hosts"}  # comm
# Of two hosts, one way, in fp32. Full: half of the parameters twice, then half of the sums. Hybrid: the sums.
LEAST_BYTES = {
    "full": 3 * PARAMETER_BYTES // 2,
    "hybrid": PARAMETER_BYTES,
    "all_gather_64MiB": MESSAGE_BYTES // 2,
    "all_reduce_64MiB": MESSAGE_BYTES,
}
# What a step may change in the loss: another order of summation, or what 16 and 8 bits round away.
LOSS_GAPS = {"torch": 0.0, "ours": 1e-5, "fp32_accumulate": 1e-2, "int8": 1e-2}
WARM_UP = 2


def make_trainer(comm: str, degree: int) -> Callable[[], float]:
    """A training step that returns the loss. Raises ValueError for a ``comm`` that does not exist."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import fsdp_tp

    os.environ["FSDP_TP_BACKEND"] = "gloo" if comm == "torch" else "fsdp_tp_shm"
    mesh = fsdp_tp.init_mesh(hybrid_shard_degree=degree)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False))
            for _ in range(BLOCKS)
        )
    )
    for block in (*model, model):
        fsdp_tp.fully_shard(block, mesh=mesh, comm=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> float:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def make_gather(variant: str) -> Callable[[], float]:
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD if variant == "torch" else dist.new_group(backend="fsdp_tp_shm")
    rank, world = dist.get_rank(), dist.get_world_size()
    part = torch.full((MESSAGE_BYTES // 4 // world,), rank + 1.0)
    whole = torch.empty(MESSAGE_BYTES // 4)

    def gather() -> float:
        dist.all_gather_into_tensor(whole, part, group=group)
        return sum(chunk[-1].item() for chunk in whole.chunk(world))

    return gather


def make_reduce(comm: str) -> Callable[[], float]:
    import torch
    import torch.distributed as dist

    from fsdp_tp.comm.wires import with_wire

    group = dist.group.WORLD if comm == "torch" else dist.new_group(backend="fsdp_tp_shm")
    group = with_wire(group, comm)
    values = torch.empty(MESSAGE_BYTES // 4)

    def reduce() -> float:
        values.fill_(dist.get_rank() + 1.0)
        dist.all_reduce(values, group=group)
        return values[-1].item()

    return reduce


def link_bytes() -> list[int]:
    """(received, sent) on this host's link so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (counters,) = (line.split(":")[1].split() for line in lines if line.strip().startswith(f"{Namespaces.interface}:"))
    return [int(counters[0]), int(counters[8])]


def measure(run: Callable[[], float]) -> tuple[float, float, int]:
    """Seconds of the slowest rank, of processors for all, and bytes over the busiest link in one direction."""
    import torch
    import torch.distributed as dist

    before = link_bytes()
    dist.barrier()
    began, worked = time.perf_counter(), time.process_time()
    run()
    seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)  # now all are done
    work = torch.tensor(time.process_time() - worked, dtype=torch.float64)
    dist.all_reduce(work)
    crossed = torch.tensor(max(now - then for now, then in zip(link_bytes(), before, strict=True)))
    dist.all_reduce(crossed, dist.ReduceOp.MAX)
    return seconds.item(), work.item(), int(crossed)


def work(results: Path, turns: int) -> None:
    """One rank. Rank 0 writes ``[layout, variant, [seconds, ...], processor seconds, bytes]`` of all cases."""
    import torch
    import torch.distributed as dist

    from fsdp_tp.comm.backend import register

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # names of older torch
    register()
    dist.init_process_group("gloo")

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)

    cases: dict[tuple[str, str], Callable[[], float]] = {}
    for variant, comm in VARIANTS.items():
        for layout, degree in LAYOUTS.items():
            try:
                cases[layout, variant] = make_trainer(comm, degree)
            except ValueError as error:
                say(f"{layout} {variant} is left out: {error}")
    for variant in ("torch", "ours"):
        cases["all_gather_64MiB", variant] = make_gather(variant)
    for variant, comm in VARIANTS.items():
        cases["all_reduce_64MiB", variant] = make_reduce(comm)

    seconds: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    worked: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    crossed: dict[tuple[str, str], list[int]] = {case: [] for case in cases}
    for turn in range(WARM_UP + turns):
        for case, run in cases.items():
            took, work, count = measure(run)
            if turn >= WARM_UP:
                seconds[case].append(took)
                worked[case].append(work)
                crossed[case].append(count)
        say(f"turn {turn + 1} of {WARM_UP + turns}" + (" (warm-up)" if turn < WARM_UP else ""))
    last = {case: run() for case, run in cases.items()}
    for (layout, variant), value in last.items():
        expected = 10.0 if layout.startswith("all_") else last[layout, "torch"]  # 1 + 2 + 3 + 4
        assert abs(value - expected) <= LOSS_GAPS[variant] * expected, (layout, variant, value, expected)
    if dist.get_rank() == 0:
        found = [
            [*case, seconds[case], statistics.median(worked[case]), statistics.median(crossed[case])] for case in cases
        ]
        results.write_text(json.dumps(found))
    dist.destroy_process_group()


def run_on_hosts(turns: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory, Namespaces(2, rate=RATE) as hosts:
        rate = min(hosts.bytes_per_second(0, 1), hosts.bytes_per_second(1, 0))
        print(f"two hosts, {RATE} between them: a plain socket gets {rate / 1e6:.1f} MB/s", flush=True)
        results = Path(directory) / "results.json"
        run_job(hosts, ["-m", "bench.hosts", "--worker", results, "--turns", turns])
        found = json.loads(results.read_text())
    rows = []
    for layout, variant, seconds, work, crossed in found:
        low, middle, high = (1e3 * each for each in statistics.quantiles(seconds, n=4))
        rows.append({
            "variant": variant, "layout": layout, "median_ms": middle, "quartiles_ms": [low, high],
            "link_bytes": crossed, "link_ms": 1e3 * crossed / rate, "cpu_ms": 1e3 * work / (os.cpu_count() or 1),
        })  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "layout",
        "variant",
        "median",
        "quartiles",
        "this / torch",
        "over the link (fp32 must)",
        "/ link time",
        "processors",
    )
    stock = {row["layout"]: row["median_ms"] for row in rows if row["variant"] == "torch"}
    for layout in LEAST_BYTES:
        for row in (row for row in rows if row["layout"] == layout):
            low, high = row["quartiles_ms"]
            table.add_row(
                layout, row["variant"], f"{row['median_ms']:.0f} ms", f"{low:.0f} to {high:.0f}",
                f"{row['median_ms'] / stock[layout]:.2f}",
                f"{row['link_bytes'] / 1e6:.1f} MB ({LEAST_BYTES[layout] / 1e6:.1f}), {row['link_ms']:.0f} ms",
                f"{row['median_ms'] / row['link_ms']:.2f}", f"{row['cpu_ms']:.0f} ms",
            )  # fmt: skip
    console = Console(width=140)
    console.print(f"{BLOCKS} MLP blocks of width {WIDTH}, fp32, SGD, batch {BATCH} a rank, 2 hosts x 2 ranks, {RATE}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.turns)
        return
    if reason := unavailable():
        print(f"skipped: {reason}")
        return
    rows = run_on_hosts(5 if options.quick else 15)
    show(rows)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
