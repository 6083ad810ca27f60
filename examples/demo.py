"""``make demo``: a Llama-architecture model on eight local processes, beside the same run on one.

Eight processes: tensor 2 x shard 2 x replicate 2. One process: the first steps of the same job,
with the same weights and batches. Prints both curves and their largest relative gap, draws
them, and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from fsdp_tp.parity import compare_curves

LAYOUT = {"tensor": 2, "shard": 2, "replicate": 2}
WORLD_SIZE = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of the eight processes")
    parser.add_argument("--reference-steps", type=int, default=20, help="steps of the one process beside them")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="emptied first")
    options = parser.parse_args()
    reference_steps = min(options.steps, options.reference_steps)
    shutil.rmtree(options.output, ignore_errors=True)

    print(f"One process, {reference_steps} steps (half a minute on two cores):", flush=True)
    # The schedule of learning rates is that of all steps; only then is it the same job.
    one = train(1, options.output / "one", options.steps, stop_after=reference_steps)
    print(f"\nEight processes, {options.steps} steps (two and a half minutes on two cores):", flush=True)
    eight = train(
        WORLD_SIZE,
        options.output / "eight",
        options.steps,
        "--tensor-parallel-degree", str(LAYOUT["tensor"]),
        "--hybrid-shard-degree", str(LAYOUT["shard"]),
    )  # fmt: skip

    metrics = {name: options.output / name / "metrics.jsonl" for name in ("one", "eight")}
    (compared,) = compare_curves(metrics["one"], [metrics["eight"]]).results
    gaps = compared.comparison.loss_gaps
    picture = options.output / "curves.png"
    draw(one, eight, gaps, picture)
    Console().print(comparison(one, eight, gaps))
    print(f"largest relative gap over {len(gaps)} steps: {max(gaps):.1e} (fp32 rounds at 6e-08)")
    print(f"both curves: {picture}")
    result = {
        "first_loss": eight[0]["loss"],
        "last_loss": eight[-1]["loss"],
        "tokens_per_second": round(median(line["tokens_per_second"] for line in eight), 1),
        "world_size": WORLD_SIZE,
        "layout": LAYOUT,
        "parity_max_relative_gap": max(gaps),
    }
    print(json.dumps(result))
    return 0


def train(processes: int, output: Path, steps: int, *options: str, stop_after: int | None = None) -> list[Any]:
    """Runs the trainer, its output going to the terminal; returns its metrics, one object a step."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
        "-m", "fsdp_tp.train", "--output", str(output), "--steps", str(steps), *options,
    ]  # fmt: skip
    if stop_after is not None:
        command += ["--stop-after", str(stop_after)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def comparison(one: list[Any], eight: list[Any], gaps: list[float]) -> Table:
    table = Table("step", "loss, one process", "loss, eight processes", "relative gap")
    last = len(gaps) - 1
    shown = sorted({0, 1, 2, 4, 9, *range(19, len(eight), 20), last, len(eight) - 1})
    for index in (index for index in shown if index < len(eight)):
        compared = index <= last
        table.add_row(
            str(index + 1),
            f"{one[index]['loss']:.7f}" if compared else "",
            f"{eight[index]['loss']:.7f}",
            f"{gaps[index]:.1e}" if compared else "",
        )
    return table


def draw(one: list[Any], eight: list[Any], gaps: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curves, difference) = plt.subplots(
        2, 1, figsize=(8, 6.5), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    steps = [line["step"] for line in eight]
    layout = " x ".join(f"{axis} {size}" for axis, size in LAYOUT.items())
    losses = [line["loss"] for line in eight]
    curves.plot(steps, losses, color="#1f5fa8", linewidth=2, label=f"{WORLD_SIZE} processes: {layout}")
    curves.plot(
        [line["step"] for line in one], [line["loss"] for line in one],
        "o", color="#d1661c", markersize=5, markerfacecolor="none", label="1 process",
    )  # fmt: skip
    curves.set_ylabel("loss (nats a token)")
    curves.set_title("The same training job on one and on eight processes")
    curves.legend(frameon=False)
    # A gap of zero has no place on a log scale: draw it at the bottom.
    difference.semilogy(steps[: len(gaps)], [max(gap, 1e-9) for gap in gaps], "o", color="#555555", markersize=3)
    difference.axhline(6e-8, color="#999999", linewidth=1, linestyle="--")
    difference.text(steps[-1], 6e-8, "fp32 rounding", ha="right", va="bottom", color="#777777")
    difference.set_ylabel("relative gap\n(0 drawn at 1e-9)")
    difference.set_xlabel("optimizer step")
    for axes in (curves, difference):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
