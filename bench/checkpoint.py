"""How fast do checkpoints reach the disk and come back, beside torch's own and the disk itself?

Four local processes hold 200 M parameters in fp32 and their AdamW state (2.4 GB), fully sharded. Variants take turns:
``ours``; ``torch_dcp``, torch's distributed checkpoint as it comes; ``torch_save``, rank 0 gathers everything and calls
torch.save, and every rank maps the file; ``disk``, one process that writes as many bytes, waits for the disk, and reads
them. Ours and the disk wait for the disk (fsync); torch's do so too here, by one fsync of each file afterwards, which
counts. Before anything is read, its pages are dropped from the page cache.

``load_unverified`` does not compare digests. ``reshard`` is a load into replicate 2 x shard 2. ``async_save`` is how
long it keeps a training step, beside a plain copy of the same tensors. ``peak_extra_bytes`` is the most memory
of its own that any rank had beyond what it had before.

    python -m bench.checkpoint [--quick] [--json FILE] [--directory DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import fsdp_tp
from fsdp_tp import checkpoint
from fsdp_tp.checkpoint.chunks import local_of

WORLD_SIZE = 4
WIDTH = 2048
BLOCK = 8 * WIDTH**2  # parameters
PIECE = 4 << 20


class Peak:
    """While entered, looks how much memory this process has that is not a file's."""

    def __enter__(self) -> Peak:
        self.before = self.most = _own_memory()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.most = max(self.most, _own_memory())

    def __exit__(self, *exception: Any) -> None:
        self._stop.set()
        self._thread.join()
        self.extra = max(self.most, _own_memory()) - self.before


def _own_memory() -> int:
    with open("/proc/self/status") as lines:
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def build(blocks: int, degree: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = fsdp_tp.init_mesh(hybrid_shard_degree=degree)
    with torch.device("meta"):
        model = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False))
                for _ in range(blocks)
            )
        )
    for unit in (*model, model):
        fsdp_tp.fully_shard(unit, mesh=mesh)
    model.to_empty(device="cpu")
    fsdp_tp.initialize(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def flush(directory: Path) -> None:
    """Files onto the disk, one fsync each, by rank 0."""
    if dist.get_rank() == 0:
        for path in (directory, *directory.rglob("*")):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    dist.barrier()


def drop(directory: Path) -> None:
    """Of the page cache."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in (path for path in directory.rglob("*") if path.is_file()):
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    dist.barrier()


def write_disk(path: Path, size: int) -> None:
    if dist.get_rank() == 0:
        path.mkdir()
        piece = memoryview(os.urandom(PIECE))
        with (path / "file").open("wb", buffering=0) as file:
            for _ in range(size // PIECE):
                file.write(piece)
            os.fsync(file.fileno())
    dist.barrier()


def read_disk(path: Path) -> None:
    if dist.get_rank() == 0:
        buffer = memoryview(bytearray(PIECE))
        with (path / "file").open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    dist.barrier()


class Cases:
    """What is timed: ``(op, variant)`` -> a call that every rank makes, for the number of a turn."""

    def __init__(self, directory: Path, blocks: int) -> None:
        self.directory, self.bytes = directory, 12 * BLOCK * blocks
        self.model, self.optimizer = build(blocks, 0)
        self.resharded = build(blocks, 2)
        self.calls: dict[tuple[str, str], Callable[[int], None]] = {
            ("save", "disk"): lambda turn: write_disk(self.path("disk", turn), self.bytes),
            ("save", "ours"): lambda turn: checkpoint.save(self.path("ours", turn), **self.both),
            ("save", "torch_dcp"): self.save_dcp,
            ("save", "torch_save"): self.save_whole,
            ("load", "disk"): lambda turn: read_disk(self.path("disk", turn)),
            ("load", "ours"): self.load,
            ("load_unverified", "ours"): lambda turn: self.load(turn, verify=False),
            ("load", "torch_dcp"): self.load_dcp,
            ("load", "torch_save"): self.load_whole,
            ("reshard", "ours"): self.reshard,
            ("save_hf", "ours"): lambda turn: checkpoint.save_hf(self.model, self.path("hf", turn)),
            ("load_hf", "ours"): lambda turn: checkpoint.load_hf(self.model, self.path("hf", turn)),
        }

    def path(self, kind: str, turn: int) -> Path:
        return self.directory / f"{kind}-{turn}"

    @property
    def both(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def bytes_of(self, op: str) -> int:
        return self.bytes // 3 if op.endswith("_hf") else self.bytes

    def read_from(self, op: str, variant: str, turn: int) -> Path:
        kind = "hf" if op == "load_hf" else variant
        return self.path(kind, turn)

    def load(self, turn: int, *, verify: bool = True) -> None:
        checkpoint.load(self.path("ours", turn), **self.both, verify=verify)

    def reshard(self, turn: int) -> None:
        model, optimizer = self.resharded
        checkpoint.load(self.path("ours", turn), model=model, optimizer=optimizer)

    def save_dcp(self, turn: int) -> None:
        state = dict(zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer), strict=True))
        dcp.save(state, checkpoint_id=self.path("torch_dcp", turn))
        flush(self.path("torch_dcp", turn))

    def load_dcp(self, turn: int) -> None:
        state = dict(zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer), strict=True))
        dcp.load(state, checkpoint_id=self.path("torch_dcp", turn))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def save_whole(self, turn: int) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_state_dict(self.model, self.optimizer, options=options)
        path = self.path("torch_save", turn)
        if dist.get_rank() == 0:
            path.mkdir()
            torch.save(state, path / "file")
        dist.barrier()
        flush(path)

    def load_whole(self, turn: int) -> None:
        state = torch.load(self.path("torch_save", turn) / "file", weights_only=True, mmap=True)
        options = StateDictOptions(full_state_dict=True)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state[0], optim_state_dict=state[1], options=options
        )


def blocked(cases: Cases, turn: int) -> tuple[float, float]:
    """Seconds until async_save returns, and of a plain copy of the same tensors into memory that is there already;
    medians of a few, in turns."""
    moments = [value for state in cases.optimizer.state.values() for value in state.values()]
    tensors = [local_of(tensor) for tensor in (*cases.model.parameters(), *moments)]
    copies = [tensor.clone() for tensor in tensors]
    ours, plain = [], []
    for number in range(3):
        dist.barrier()
        began = time.perf_counter()
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        dist.barrier()
        plain.append(time.perf_counter() - began)
        began = time.perf_counter()
        checkpoint.async_save(cases.path("async", 3 * turn + number), **cases.both, keep_last=1)
        dist.barrier()
        ours.append(time.perf_counter() - began)
        checkpoint.wait()
    return statistics.median(ours), statistics.median(plain)


def work(rank: int, store: str, directory: Path, blocks: int, turns: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD_SIZE), rank=rank, world_size=WORLD_SIZE)
    cases = Cases(directory, blocks)
    seconds: dict[tuple[str, str], list[float]] = {case: [] for case in cases.calls}
    extra: dict[tuple[str, str], list[int]] = {case: [] for case in cases.calls}
    waits: list[tuple[float, float]] = []
    for turn in range(turns):
        for (op, variant), call in cases.calls.items():
            if "load" in op or op == "reshard":
                drop(cases.read_from(op, variant, turn))
            if rank == 0:
                os.sync()  # what was written or removed before
            dist.barrier()
            with Peak() as peak:
                began = time.perf_counter()
                call(turn)
                dist.barrier()
                took = time.perf_counter() - began
            most = torch.tensor(peak.extra)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            if rank == 0:
                print(f"turn {turn + 1} of {turns}: {op} {variant} {took:.2f} s", flush=True)
            seconds[op, variant].append(took)
            extra[op, variant].append(int(most))
        everybodys: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(everybodys, blocked(cases, turn))
        waits.append(max(everybodys))
        if rank == 0:
            for path in directory.iterdir():
                shutil.rmtree(path)
        dist.barrier()
    if rank == 0:
        rows = [
            {
                "op": op, "variant": variant, "seconds": statistics.median(seconds[op, variant]),
                "mb_per_s": cases.bytes_of(op) / 1e6 / statistics.median(seconds[op, variant]),
                "peak_extra_bytes": statistics.median(extra[op, variant]),
            }
            for op, variant in cases.calls
        ]  # fmt: skip
        # The first one makes its buffers.
        after = waits[1:] or waits
        ours, copy = (statistics.median(each[index] for each in after) for index in (0, 1))
        rows.append({"op": "async_save", "variant": "ours", "seconds": ours, "copy_seconds": copy,
                     "mb_per_s": cases.bytes / 1e6 / ours})  # fmt: skip
        results.put((rows, cases.bytes))
    dist.destroy_process_group()


def show(rows: list[dict[str, Any]], size: int) -> None:
    table = Table("op", "variant", "seconds", "MB/s", "of the disk", "most extra memory of a rank")
    disk = {row["op"]: row["mb_per_s"] for row in rows if row["variant"] == "disk"}
    for row in rows:
        kind = "save" if row["op"].startswith("save") else "load"
        memory = f"{row['peak_extra_bytes'] / 2**20:,.0f} MiB" if "peak_extra_bytes" in row else ""
        share = f"{row['mb_per_s'] / disk[kind]:.2f}"
        if row["op"] == "async_save":
            share = f"{row['seconds'] / row['copy_seconds']:.2f} of a copy"
        table.add_row(row["op"], row["variant"], f"{row['seconds']:.2f}", f"{row['mb_per_s']:,.0f}", share, memory)
    console = Console(width=120)
    console.print(
        f"{size / 12e6:.0f} M parameters and AdamW state, fp32, {size / 1e9:.1f} GB, {WORLD_SIZE} ranks; a rank's "
        f"shards have {size / WORLD_SIZE / 2**20:,.0f} MiB; async_save is until it returns"
    )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the size, fewer rounds")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--directory", type=Path, default=Path("runs"), help="on the disk that is measured")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    blocks, turns = (2, 2) if options.quick else (6, 5)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory, tempfile.TemporaryDirectory() as meeting:
        context = mp.get_context("spawn")
        results = context.Queue()
        arguments = (f"{meeting}/store", Path(directory), blocks, turns, results)
        ranks = [context.Process(target=work, args=(rank, *arguments)) for rank in range(WORLD_SIZE)]
        for rank in ranks:
            rank.start()
        while results.empty() and all(rank.is_alive() for rank in ranks):
            time.sleep(0.2)
        if failed := [rank.exitcode for rank in ranks if rank.exitcode]:
            for rank in ranks:
                rank.kill()
            raise SystemExit(f"a rank ended with {failed[0]}")
        rows, size = results.get()
        for rank in ranks:
            rank.join()
    show(rows, size)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
