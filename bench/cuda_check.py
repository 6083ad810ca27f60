"""Are the CUDA kernels (kernels/cuda) right, and how near are they to the speed of a copy?

One GPU stands for several: 2, 4 and 8 virtual ranks launch on streams of their own. Every result is compared with
fp64, within the rounding of fp32 sums, and to the bit with sums in the order of ranks; sizes are odd, empty and large,
dtypes are all there are. Then kernels are timed against a copy of device memory, measured first: bytes that all ranks
read and write together, per second. (Between real GPUs the links decide; here ranks share the memory's bandwidth, and
the caches what several of them read.) Without a GPU it says so and exits 0. Takes less than two minutes.

On a fresh machine with torch and CUDA 12.8 or later, from the root of the repository, either of

    cmake -S . -B build/cuda -DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$PWD/fsdp_tp/_lib && cmake --build build/cuda \
        --target fsdp_tp_cuda && python3 -m bench.cuda_check
    mkdir -p fsdp_tp/_lib && nvcc -O3 -std=c++20 -fmad=false -Ikernels -Xcompiler -fPIC -shared -arch=native \
        -o fsdp_tp/_lib/libfsdp_tp_cuda.so kernels/cuda/fsdp_tp_cuda.cu && python3 -m bench.cuda_check

    python -m bench.cuda_check [--quick] [--json FILE] [--emulation FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_tp.comm.symmetric import Kernels, PeerMemory, load

KIB, MIB = 1 << 10, 1 << 20
WORLDS = (2, 4, 8)
SUMS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float16, torch.float16),
]
COUNTS = (0, 1, 7, 8, 9, 17, 1000, 2047, 16_385, 100_003)
LARGE = 5_000_001
ALIGNMENT = 256
LARGE_BYTES = 512 * MIB


class VirtualRanks:
    """Ranks on one device, each with a buffer, a signal pad and a stream."""

    def __init__(self, kernels: Kernels, device: torch.device, world: int, size: int, timeout: float = 20.0) -> None:
        self.world, self.device = world, device
        size = -(-size // ALIGNMENT) * ALIGNMENT
        self.memory = torch.zeros(world, size, dtype=torch.uint8, device=device)
        pads = torch.zeros(world, kernels.signal_words(world, 64), dtype=torch.int32, device=device)
        pointers = [[row.data_ptr() for row in rows] for rows in (self.memory, pads)]
        table = torch.tensor(pointers, device=device)
        blocks = 2
        if device.type == "cuda":
            # All ranks' blocks must fit at once; a multiprocessor has room for one at least.
            blocks = torch.cuda.get_device_properties(device).multi_processor_count // world
            self.streams = [torch.cuda.Stream(device) for _ in range(world)]
        self.ranks = [
            PeerMemory(
                kernels,
                buffers=table[0].data_ptr(),
                signals=table[1].data_ptr(),
                signal_bytes=pads[0].nbytes,
                rank=rank,
                world=world,
                device=device,
                timeout=timeout,
                max_blocks=min(blocks, 64),
            )
            for rank in range(world)
        ]
        self._pads, self._table = pads, table
        self._threads = ThreadPoolExecutor(world)  # an emulated kernel runs in the thread that launches it

    def launch(self, call: Callable[[int, PeerMemory], object], ranks: range | list[int] | None = None) -> None:
        """Each rank's call, on its stream, behind what is on the current stream and before what comes next."""
        chosen = list(range(self.world) if ranks is None else ranks)
        if self.device.type != "cuda":
            list(self._threads.map(lambda rank: call(rank, self.ranks[rank]), chosen))
            return
        current = torch.cuda.current_stream(self.device)
        for rank in chosen:
            self.streams[rank].wait_stream(current)
        for rank in chosen:
            with torch.cuda.stream(self.streams[rank]):
                call(rank, self.ranks[rank])
        for rank in chosen:
            current.wait_stream(self.streams[rank])

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for rank in self.ranks:
            rank.raise_if_failed()

    def reset(self) -> None:
        """After a rank gave up."""
        self._pads.zero_()
        for rank in self.ranks:
            rank._report.zero_()


# --- Right? -------------------------------------------------------------------------------------


@dataclass
class Check:
    """Of one kernel, world and pair of dtypes: how many cases, how many of them wrong, and the worst error of all,
    as a share of what rounding allows."""

    op: str
    world: int
    dtype: str
    out_dtype: str
    cases: int = 0
    wrong: int = 0
    worst: float = 0.0


def random_numbers(count: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    """Magnitudes over many binades, so that additions round, of either sign, and zeros."""
    scale = torch.randint(-8, 5, (count,), device=device, generator=generator).float().exp2()
    return (torch.randn(count, device=device, generator=generator) * scale).mul(scale > 2**-8).to(dtype)


def guarded(count: int, dtype: torch.dtype, device: torch.device, shift: int) -> tuple[Tensor, Tensor]:
    """A tensor at an address that is ``shift`` elements off, and the tensor around it, of sevens."""
    whole = torch.full((count + shift + 64,), 7, dtype=dtype, device=device)
    return whole[32 + shift : 32 + shift + count], whole


def margins_untouched(whole: Tensor, count: int, shift: int) -> bool:
    return bool((whole[: 32 + shift] == 7).all()) and bool((whole[32 + shift + count :] == 7).all())


def check_all_gather(ranks: VirtualRanks, count: int, generator: torch.Generator, check: Check) -> None:
    dtype = torch.uint8
    shift, offset = count % 5, 16 * (count % 3) + count % 2
    inputs = torch.randint(0, 255, (ranks.world, count), dtype=dtype, device=ranks.device, generator=generator)
    ranks.memory[:, offset : offset + count] = inputs
    outs = [guarded(count * ranks.world, dtype, ranks.device, shift) for _ in range(ranks.world)]
    ranks.launch(lambda rank, peers: peers.all_gather(outs[rank][0], size=count, offset=offset))
    ranks.finish()
    right = all(
        torch.equal(out.view(ranks.world, count), inputs) and margins_untouched(whole, out.numel(), shift)
        for out, whole in outs
    )
    check.cases += 1
    check.wrong += not right


def check_sum(
    ranks: VirtualRanks,
    count: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    generator: torch.Generator,
    check: Check,
) -> None:
    world, device = ranks.world, ranks.device
    scatter, shift, offset = check.op == "reduce_scatter", count % 5, dtype.itemsize * (count % 11)
    scale = 1.0 if count % 2 else 1.0 / world
    numel = count * (world if scatter else 1)
    inputs = random_numbers(world * numel, dtype, device, generator).view(world, numel)
    staged = not scatter and count % 3 != 0  # else the input lies in the buffer already
    if not staged:
        ranks.memory[:, offset : offset + inputs[0].nbytes] = inputs.view(torch.uint8)
    outs = [guarded(count, out_dtype, device, shift) for _ in range(world)]

    def call(rank: int, peers: PeerMemory) -> None:
        if scatter:
            peers.reduce_scatter(outs[rank][0], dtype=dtype, offset=offset, scale=scale)
        else:
            given = inputs[rank] if staged else None
            peers.all_reduce(outs[rank][0], given, dtype=dtype, offset=offset, scale=scale)

    ranks.launch(call)
    ranks.finish()
    for rank, (out, whole) in enumerate(outs):
        parts = inputs[:, rank * count : (rank + 1) * count] if scatter else inputs
        in_order = parts[0].float()
        for part in parts[1:]:
            in_order = in_order + part.float()
        right = torch.equal((in_order * scale).to(out_dtype), out) and margins_untouched(whole, count, shift)
        exact, magnitude = parts.double().sum(0) * scale, parts.double().abs().sum(0) * scale
        # World - 1 additions and a product round to fp32, the result once more to its own type; and fp16 has
        # subnormal numbers in this range.
        allowed = magnitude * world * 2**-24 + exact.abs() * torch.finfo(out_dtype).eps / 2 * 1.01 + 2**-24
        worst = float(((out.double() - exact).abs() / allowed).max()) if count else 0.0
        check.cases += 1
        check.wrong += not (right and worst <= 1)
        check.worst = max(check.worst, worst)


def checks(kernels: Kernels, device: torch.device, worlds: tuple[int, ...], counts: tuple[int, ...]) -> Iterator[Check]:
    generator = torch.Generator(device).manual_seed(0)
    for world in worlds:
        ranks = VirtualRanks(kernels, device, world, (max(counts) * world + 16) * 4)
        check = Check("all_gather", world, "bytes", "bytes")
        for count in counts:
            check_all_gather(ranks, count, generator, check)
        yield check
        for op in ("reduce_scatter", "all_reduce"):
            for dtype, out_dtype in SUMS:
                check = Check(op, world, name(dtype), name(out_dtype))
                for count in counts:
                    check_sum(ranks, count, dtype, out_dtype, generator, check)
                yield check


def check_a_missing_rank(kernels: Kernels, device: torch.device) -> str | None:
    """What is wrong if one of three ranks does not come: the others must say which."""
    ranks = VirtualRanks(kernels, device, 3, 64, timeout=0.2)
    outs = torch.zeros(3, 4, device=device)
    ranks.launch(lambda rank, peers: peers.all_reduce(outs[rank]), [0, 2])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    reports = [int(peers._report.item()) for peers in ranks.ranks]
    return None if reports == [2, 0, 2] else f"rank 1 of 3 did not come, and the ranks report {reports}"


# --- Fast? --------------------------------------------------------------------------------------


def seconds(body: Callable[[], object], rounds: int) -> float:
    """Median of the time on the GPU."""
    times = []
    for _ in range(2):
        body()
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        body()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_bandwidth(device: torch.device, rounds: int) -> float:
    """Bytes read and written a second."""
    source = torch.ones(LARGE_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), rounds)


def timings(kernels: Kernels, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """Large messages against the copy, whole ranks together; small all-reduces in microseconds."""
    copied = copy_bandwidth(device, rounds)
    yield {"op": "copy", "world": 1, "dtype": "bytes", "bytes": LARGE_BYTES, "gb_s": copied / 1e9, "ratio": 1.0}
    for world in WORLDS:
        whole = LARGE_BYTES
        ranks = VirtualRanks(kernels, device, world, whole, timeout=5.0)
        gathered = torch.empty(world, whole // 2, dtype=torch.uint8, device=device)
        size = whole // 2 // world
        yield measure(
            ranks,
            "all_gather",
            "bytes",
            size * world,
            2 * size * world * world,
            copied,
            rounds,
            lambda rank, peers, out=gathered, n=size: peers.all_gather(out[rank], size=n),
        )
        for dtype, out_dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32)):
            count = whole // dtype.itemsize // world
            outs = torch.empty(world, count, dtype=out_dtype, device=device)
            ranks.memory.zero_()
            moved = world * count * (world * dtype.itemsize + out_dtype.itemsize)
            yield measure(
                ranks,
                "reduce_scatter",
                f"{name(dtype)} to {name(out_dtype)}",
                whole,
                moved,
                copied,
                rounds,
                lambda rank, peers, out=outs, d=dtype: peers.reduce_scatter(out[rank], dtype=d, scale=0.5),
            )
        for size in (8 * KIB, 64 * KIB, MIB):
            inputs = torch.zeros(world, size // 2, dtype=torch.bfloat16, device=device)
            results = torch.zeros_like(inputs)
            moved = world * size * (world + 3)  # the input is read and staged, all are read, a result is written
            yield measure(
                ranks,
                "all_reduce",
                "bfloat16",
                size,
                moved,
                copied,
                rounds,
                lambda rank, peers, a=inputs, b=results: peers.all_reduce(b[rank], a[rank]),
                calls=20,
            )
        ranks.finish()


def measure(
    ranks: VirtualRanks,
    op: str,
    dtype: str,
    size: int,
    moved: int,
    copied: float,
    rounds: int,
    call: Callable[[int, PeerMemory], object],
    calls: int = 1,
) -> dict[str, Any]:
    def row() -> None:
        ranks.launch(lambda rank, peers: [call(rank, peers) for _ in range(calls)])

    body, how = row, "streams"
    if calls > 1:  # launches from Python take longer than these kernels
        row()
        ranks.finish()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            row()
        graph.replay()
        try:
            ranks.finish()
            body, how = graph.replay, "graph"
        except dist.DistBackendError:  # it ran the ranks one after the other
            ranks.reset()
    taken = seconds(body, rounds) / calls
    ranks.finish()
    return {
        "op": op,
        "world": ranks.world,
        "dtype": dtype,
        "bytes": size,
        "us": taken * 1e6,
        "gb_s": moved / taken / 1e9,
        "ratio": moved / taken / copied,
        "launched_by": how,
    }


# --- Both ---------------------------------------------------------------------------------------


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--emulation",
        type=Path,
        metavar="FILE",
        help="check this build for the CPU of the same code, without timing it",
    )
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    if options.emulation is not None:
        kernels, device = Kernels(options.emulation), torch.device("cpu")
    elif not torch.cuda.is_available():
        print("no GPU")
        return 0
    else:
        kernels, device = load(), torch.device("cuda", torch.cuda.current_device())
        if isinstance(kernels, str):
            print(f"{kernels}; the docstring of bench/cuda_check.py says how to build them")
            return 1
        if (status := kernels.available()) != 0:
            print(f"the CUDA kernels do not run here: {kernels.sentence(status)}")
            return 1
        properties = torch.cuda.get_device_properties(device)
        print(f"{properties.name}, {properties.multi_processor_count} multiprocessors, torch {torch.__version__}")
    on_gpu = device.type == "cuda"
    counts = (0, 1, 9, 17, 1000, 4097) if not on_gpu else COUNTS if options.quick else (*COUNTS, LARGE)

    found: dict[str, Any] = {"device": properties.name if on_gpu else "emulation", "checks": [], "timings": []}
    wrong = 0
    print(f"\n{'kernel':15} {'ranks':>5} {'input':>9} {'output':>9} {'cases':>6} {'wrong':>6} {'error / allowed':>16}")
    for check in checks(kernels, device, WORLDS, counts):
        found["checks"].append(vars(check))
        wrong += check.wrong
        print(
            f"{check.op:15} {check.world:5} {check.dtype:>9} {check.out_dtype:>9} {check.cases:6} {check.wrong:6} "
            f"{check.worst:16.3f}"
        )
    if problem := check_a_missing_rank(kernels, device):
        print(problem)
        wrong += 1
    else:
        print("a rank that does not come is named by the others")
    if on_gpu:
        print(f"\n{'kernel':15} {'ranks':>5} {'dtypes':>21} {'KiB':>8} {'us':>10} {'GB/s':>8} {'of copy':>8}")
        for timing in timings(kernels, device, 5 if options.quick else 20):
            found["timings"].append(timing)
            print(
                f"{timing['op']:15} {timing['world']:5} {timing['dtype']:>21} {timing['bytes'] // KIB:8} "
                f"{timing.get('us', 0):10.1f} {timing['gb_s']:8.0f} {timing['ratio']:8.2f}"
            )
    found["wrong"] = wrong
    print(f"\n{wrong} wrong, {time.perf_counter() - start:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
