"""Is the hybrid shard degree that ``--hybrid-shard-degree auto`` chooses the one whose steps are fastest?

Two "hosts" on this machine (:mod:`bench.namespaces`), two ranks on each, joined by links of several rates. On each,
:func:`fsdp_tp.degree.measure` times the collectives and predicts the communication of a step of the model of
:mod:`bench.hosts` for every degree; then steps of that model are timed for every degree, taking turns.

A choice is right if no other degree's steps are faster by more than 5 %: degrees 1 and 2 send the same bytes over the
link, and differ by what happens inside a host.

    python -m bench.degree [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.hosts import BLOCKS, PARAMETER_BYTES, make_trainer, measure
from bench.namespaces import Namespaces, run_job, unavailable

RATES = ("100mbit", "300mbit", "1gbit", "3gbit", "10gbit")
TOLERANCE = 1.05


def work(results: Path, turns: int) -> None:
    """One rank. Rank 0 writes ``[degree, predicted seconds, chosen, [seconds, ...]]`` of all degrees to ``results``."""
    import torch
    import torch.distributed as dist

    from fsdp_tp import degree
    from fsdp_tp.comm.backend import register
    from fsdp_tp.config import ParallelConfig

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # names of older torch
    register()
    dist.init_process_group("gloo")
    units = [degree.Unit(PARAMETER_BYTES // 4 // BLOCKS, False)] * BLOCKS
    began = time.perf_counter()
    candidates = degree.measure(ParallelConfig(), units)
    chosen = degree.choose(candidates)
    if dist.get_rank() == 0:
        print(f"measuring all degrees took {time.perf_counter() - began:.1f} s", flush=True)
    steps = {each.degree: make_trainer("auto", each.degree) for each in candidates}
    seconds: dict[int, list[float]] = {each: [] for each in steps}
    for turn in range(1 + turns):
        for each, step in steps.items():
            took = measure(step)[0]
            if turn:  # the first warms up
                seconds[each].append(took)
        if dist.get_rank() == 0:
            print(f"turn {turn + 1} of {1 + turns}", flush=True)
    if dist.get_rank() == 0:
        found = [[each.degree, each.seconds, each is chosen, seconds[each.degree]] for each in candidates]
        results.write_text(json.dumps(found))
    dist.destroy_process_group()


def run_on_hosts(rate: str, turns: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory, Namespaces(2, rate=rate) as hosts:
        reached = min(hosts.bytes_per_second(0, 1), hosts.bytes_per_second(1, 0))
        print(f"two hosts, {rate} between them: a plain socket gets {reached / 1e6:.1f} MB/s", flush=True)
        results = Path(directory) / "results.json"
        run_job(hosts, ["-m", "bench.degree", "--worker", results, "--turns", turns])
        found = json.loads(results.read_text())
    return [
        {
            "rate": rate, "degree": degree, "predicted_communication_ms": 1e3 * predicted, "chosen": chosen,
            "median_ms": 1e3 * statistics.median(seconds),
        }
        for degree, predicted, chosen, seconds in found
    ]  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("link", "degree", "communication, predicted", "step, measured", "choice")
    for rate in RATES:
        those = [row for row in rows if row["rate"] == rate]
        fastest = min(row["median_ms"] for row in those)
        for row in those:
            right = row["median_ms"] <= TOLERANCE * fastest
            verdict = f"chosen, {'right' if right else 'wrong'}: {row['median_ms'] / fastest:.2f} of the fastest"
            table.add_row(
                rate, str(row["degree"]), f"{row['predicted_communication_ms']:.0f} ms", f"{row['median_ms']:.0f} ms",
                verdict if row["chosen"] else "",
            )  # fmt: skip
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
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
    rows = [row for rate in RATES for row in run_on_hosts(rate, 3 if options.quick else 7)]
    show(rows)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
