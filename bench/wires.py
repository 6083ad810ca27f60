"""What do wires of fewer bits do to a training curve?

Two "hosts" on this machine (:mod:`bench.namespaces`), two ranks on each, fully sharded, so that parameters and
gradients cross the link. :mod:`fsdp_tp.train` runs the same job over exact values and over every wire between hosts,
50 steps each, and the losses are compared.

A wire changes single steps by chance, up or down; what matters is whether the curve goes elsewhere, so the mean of the
last ten losses stands beside the largest gap of a step.

    python -m bench.wires [--quick] [--json FILE] [--picture FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.namespaces import Namespaces, run_job, unavailable

VARIANTS = {"exact": "auto", "bf16 sums": "fp32_accumulate:hosts", "int8": "int8:hosts"}  # what it is to comm=
COLORS = {"exact": "#000000", "bf16 sums": "#0072b2", "int8": "#d55e00"}
DASHES: dict[str, Any] = {"exact": "-", "bf16 sums": (0, (5, 2)), "int8": (0, (1, 1))}
LAST = 10
PARAMETERS = "3.1 M"  # of this job
JOB = (
    "-m fsdp_tp.train --hidden-size 256 --intermediate-size 704 --num-layers 4 --global-batch-size 16 "
    "--measure-communication-every 0"
).split()


def losses_of(comm: str, steps: int) -> list[float]:
    with tempfile.TemporaryDirectory() as output, Namespaces(2, rate="10gbit") as hosts:
        run_job(hosts, [*JOB, "--steps", steps, "--comm", comm, "--output", output])
        lines = (Path(output) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def compare(losses: list[float], exact: list[float]) -> dict[str, float]:
    gaps = [abs(a / b - 1) for a, b in zip(losses, exact, strict=True)]
    end, exact_end = statistics.mean(losses[-LAST:]), statistics.mean(exact[-LAST:])
    return {"largest_gap": max(gaps), "end": end, "end_gap": abs(end / exact_end - 1)}


def draw(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "wires"})

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    loss, gap = figure.subplots(1, 2)
    steps = range(1, len(curves["exact"]) + 1)
    for name, losses in curves.items():
        how: dict[str, Any] = {"color": COLORS[name], "linestyle": DASHES[name], "label": name}
        loss.plot(steps, losses, linewidth=1.6, **how)
        if name != "exact":
            gap.plot(steps, [abs(a / b - 1) for a, b in zip(losses, curves["exact"], strict=True)], **how)
    loss.set(xlabel="step", ylabel="loss", title="Loss, over exact values and over each wire")
    gap.set(xlabel="step", yscale="log", title="Relative gap of the loss to exact values")
    for axes in (loss, gap):
        axes.legend(frameon=False)
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def show(rows: list[dict[str, Any]], steps: int) -> None:
    table = Table("between hosts", "largest gap of a step's loss", f"mean of the last {LAST}", "its gap")
    for row in rows:
        gaps = [f"{row[name]:.1e}" if row["variant"] != "exact" else "" for name in ("largest_gap", "end_gap")]
        table.add_row(row["variant"], gaps[0], f"{row['end']:.4f}", gaps[1])
    console = Console(width=120)
    console.print(f"Llama of {PARAMETERS} parameters, fp32, AdamW, {steps} steps, fully sharded over 2 hosts x 2 ranks")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--picture", type=Path, help="draw the curves into this .svg or .png")
    options = parser.parse_args()
    if reason := unavailable():
        print(f"skipped: {reason}")
        return
    steps = 15 if options.quick else 50
    curves = {}
    for name, comm in VARIANTS.items():
        print(f"{name}: {steps} steps", flush=True)
        curves[name] = losses_of(comm, steps)
    rows = [{"variant": name, "losses": each, **compare(each, curves["exact"])} for name, each in curves.items()]
    show(rows, steps)
    if options.picture:
        draw(curves, options.picture)
        print(f"curves: {options.picture}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
