"""What does an FSDP2 step cost on one host, through shared memory beside torch's own collectives?

Two local processes of one thread each train four MLP blocks of width 768 (18.9 M parameters, fp32, SGD, batch 32),
each block and the rest a unit of FSDP2, over gloo. All variants take turns, so that whatever else the machine does
falls on all alike.

``torch_malloc_tuned`` is a control: stock FSDP2 in processes whose malloc keeps freed memory. By default each
all-gather pays for the page faults of new memory.

``comm_share`` is the share of a profiled step in which a collective runs, waiting for the other rank included; it is
rank 0's. ``parameter_pss_bytes`` is the physical memory of all parameters, sharded and unsharded, while every unit
is unsharded: summed over the ranks, memory that they share counted once.

    python -m bench.fsdp_step [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing as mp
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import fsdp_tp
from fsdp_tp.train.metrics import CommunicationShare

WORLD_SIZE = 2
WIDTH, BLOCKS, BATCH = 768, 4, 32
WARM_UP = 3
TUNED_MALLOC = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592"
VARIANTS = {  # what it is to comm=, and in which processes it runs
    "torch": ("torch", "plain"),
    "torch_malloc_tuned": ("torch", "tuned"),
    "shared": ("shared", "plain"),
    "zero_copy": ("zero_copy", "plain"),
}


class Trainer:
    """One model and its optimizer, of one variant."""

    def __init__(self, comm: str) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False)
                )
                for _ in range(BLOCKS)
            )
        )  # fmt: skip
        for block in (*self.model, self.model):
            fsdp_tp.fully_shard(block, comm=comm)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(self) -> float:
        loss = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def measure_seconds(self) -> float:
        dist.barrier()
        began = time.perf_counter()
        self.step()
        return time.perf_counter() - began

    def measure_share(self) -> float | None:
        dist.barrier()
        with CommunicationShare(enabled=True) as communication:
            self.step()
        return communication.share

    def measure_memory(self) -> int:
        sharded = [parameter.to_local() for parameter in self.model.parameters()]  # type: ignore[attr-defined]
        units = [unit for unit in self.model.modules() if isinstance(unit, FSDPModule)]
        for unit in units:
            unit.unshard()
        dist.barrier()
        size = physical_bytes([*sharded, *self.model.parameters()])
        dist.barrier()
        for unit in units:
            unit.reshard()
        return size


def physical_bytes(tensors: Iterable[Tensor]) -> int:
    """Proportional share (PSS) of this process in the memory of ``tensors``, all of whose pages are present."""
    spans = {(storage.data_ptr(), storage.nbytes()) for tensor in tensors if (storage := tensor.untyped_storage())}
    mappings = []
    for text in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]:
        start, end = (int(each, 16) for each in text.split(maxsplit=1)[0].split("-"))
        resident, proportional = (int(re.search(rf"(?m)^{name}: +(\d+)", text)[1]) for name in ("Rss", "Pss"))  # type: ignore[index]
        mappings.append((start, end, proportional / resident if resident else 0.0))
    pieces = set()  # of a shard and of the whole that it is a slice of, once
    for start, size in spans:
        for low, high, share in mappings:
            if low < start + size and start < high:
                pieces.add((max(low, start), min(high, start + size), share))
    total, reached = 0.0, 0
    for start, end, share in sorted(pieces):
        total += max(0, end - max(start, reached)) * share
        reached = max(reached, end)
    return round(total)


def serve(rank: int, store: str, comms: dict[str, str], connection: Any) -> None:
    torch.set_num_threads(1)
    os.environ["FSDP_TP_BACKEND"] = "gloo"  # the peer is torch's, even where init_mesh knows a faster backend
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD_SIZE), rank=rank, world_size=WORLD_SIZE)
    trainers = {variant: Trainer(comm) for variant, comm in comms.items()}
    gc.collect()
    gc.freeze()  # the collector need not walk through every imported module again
    while (job := connection.recv()) is not None:
        variant, what = job
        connection.send(getattr(trainers[variant], what)())
    dist.destroy_process_group()


class Pair:
    """Two processes that do what they are told, on some of the variants."""

    def __init__(self, directory: str, processes: str, tunables: str) -> None:
        context = mp.get_context("spawn")
        comms = {name: comm for name, (comm, where) in VARIANTS.items() if where == processes}
        kept = os.environ.get("GLIBC_TUNABLES")
        os.environ["GLIBC_TUNABLES"] = tunables
        self.connections, self.members = [], []
        for rank in range(WORLD_SIZE):
            ours, theirs = context.Pipe()
            member = context.Process(target=serve, args=(rank, f"{directory}/{processes}", comms, theirs), daemon=True)
            member.start()
            theirs.close()  # so that a dead member is the end of a file
            self.connections.append(ours)
            self.members.append(member)
        os.environ.pop("GLIBC_TUNABLES") if kept is None else os.environ.update(GLIBC_TUNABLES=kept)

    def __call__(self, variant: str, what: str) -> list[Any]:
        for connection in self.connections:
            connection.send((variant, what))
        return [connection.recv() for connection in self.connections]

    def stop(self) -> None:
        for connection, member in zip(self.connections, self.members, strict=True):
            connection.send(None)
            member.join()


def measure(turns: int, profiled: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        pairs = {"plain": Pair(directory, "plain", ""), "tuned": Pair(directory, "tuned", TUNED_MALLOC)}
        run = {variant: pairs[where] for variant, (_, where) in VARIANTS.items()}
        seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        shares: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for turn in range(WARM_UP + turns):
            for variant, values in seconds.items():
                both = run[variant](variant, "measure_seconds")
                if turn >= WARM_UP:
                    values.append(max(both))
        for _ in range(profiled):
            for variant, values in shares.items():
                values.append(run[variant](variant, "measure_share")[0])
        memory = {variant: sum(run[variant](variant, "measure_memory")) for variant in VARIANTS}
        losses = {variant: run[variant](variant, "step") for variant in VARIANTS}
        for pair in pairs.values():
            pair.stop()
    assert all(each == losses["torch"] for each in losses.values()), losses
    stock = statistics.median(seconds["torch"])
    rows = []
    for variant, values in seconds.items():
        low, middle, high = (1e3 * each for each in statistics.quantiles(values, n=4))
        rows.append({
            "variant": variant, "median_ms": middle, "quartiles_ms": [low, high], "speedup": 1e3 * stock / middle,
            "comm_share": statistics.median(shares[variant]), "parameter_pss_bytes": memory[variant],
            "parameter_copies": memory[variant] / (4 * 8 * WIDTH**2 * BLOCKS),
        })  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("variant", "median", "quartiles", "stock / this", "communication", "copies of the parameters")
    for row in rows:
        low, high = row["quartiles_ms"]
        table.add_row(
            row["variant"], f"{row['median_ms']:.1f} ms", f"{low:.1f} to {high:.1f}", f"{row['speedup']:.2f}",
            f"{row['comm_share']:.0%}", f"{row['parameter_copies']:.2f}",
        )  # fmt: skip
    console = Console(width=120)
    console.print(f"{BLOCKS} MLP blocks of width {WIDTH}, fp32, SGD, batch {BATCH}, 2 ranks")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = measure(*((7, 3) if options.quick else (40, 9)))
    show(rows)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
