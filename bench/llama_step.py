"""Which share of a Llama's training step is communication, ours beside gloo's?

Two local processes of one thread each train six layers of hidden size 512 with a vocabulary of 8192 on 2,048 tokens a
step, bf16, once split over the tensor axis and once sharded by FSDP2. The loss and AdamW included. Both paths take
turns in the same processes: ``ours`` is what ``init_mesh`` and ``wrap`` choose by themselves, ``gloo`` torch's own
backend and hooks.

``comm_share`` is the share of a profiled step in which a collective runs, waiting for the other rank included:
the two ranks share one machine, and one is often a little behind. ``comm_ms`` is that share of a step that was not
profiled. ``moving_ms`` counts of each collective the time of the rank that came last to it.

    python -m bench.llama_step [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_tp
from fsdp_tp.train.metrics import CommunicationShare

WORLD_SIZE = 2
TOKENS, SEQUENCE, VOCABULARY = 2048, 256, 8192
WARM_UP = 2
LAYOUTS = {"tensor 2": WORLD_SIZE, "shard 2": 1}  # tensor parallel degree; the rest of the world shards
PATHS = ("gloo", "ours")


class Trainer:
    def __init__(self, layout: str, path: str) -> None:
        if path == "gloo":
            os.environ["FSDP_TP_BACKEND"] = "gloo"
        self.mesh = fsdp_tp.init_mesh(tensor_parallel_degree=LAYOUTS[layout])
        os.environ.pop("FSDP_TP_BACKEND", None)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1408, num_hidden_layers=6,
            num_attention_heads=8, num_key_value_heads=4, head_dim=64, use_cache=False,
        )  # fmt: skip
        model = fsdp_tp.initialize(LlamaForCausalLM(config), seed=0)
        self.model = fsdp_tp.wrap(
            model, self.mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            loss_parallel=True, sequence_parallel=True, comm="torch" if path == "gloo" else "auto",
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        rows = TOKENS // SEQUENCE // self.mesh.data_size
        generator = torch.Generator().manual_seed(self.mesh.data_rank)
        ids = torch.randint(0, VOCABULARY, (rows, SEQUENCE + 1), generator=generator)
        self.ids, self.target = ids[:, :-1], ids[:, 1:].contiguous()

    def step(self) -> float:
        logits = self.model(self.ids).logits
        loss = fsdp_tp.vocab_parallel_cross_entropy(logits, self.target, mesh=self.mesh)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def moving_milliseconds(spans: list[tuple[float, float]]) -> float:
    """Sum over the collectives of this rank's group of the time of the rank that came last, and so did not wait."""
    everybodys: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(everybodys, [end - start for start, end in spans])
    assert len({len(durations) for durations in everybodys}) == 1
    return sum(map(min, *everybodys)) / 1e3


def measure(rank: int, store: str, turns: int, profiled: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD_SIZE), rank=rank, world_size=WORLD_SIZE)
    rows = []
    for layout in LAYOUTS:
        trainers = {path: Trainer(layout, path) for path in PATHS}
        seconds: dict[str, list[float]] = {path: [] for path in PATHS}
        losses: dict[str, list[float]] = {path: [] for path in PATHS}
        shares: dict[str, list[float]] = {path: [] for path in PATHS}
        moving: dict[str, list[float]] = {path: [] for path in PATHS}
        gc.collect()
        gc.freeze()  # the collector need not walk through every imported module again
        for turn in range(WARM_UP + turns):
            for path, trainer in trainers.items():
                dist.barrier()
                began = time.perf_counter()
                losses[path].append(trainer.step())
                dist.barrier()
                if turn >= WARM_UP:
                    seconds[path].append(time.perf_counter() - began)
        for _ in range(profiled):
            for path, trainer in trainers.items():
                dist.barrier()
                with CommunicationShare(enabled=True) as communication:
                    trainer.step()
                assert communication.share is not None
                shares[path].append(communication.share)
                moving[path].append(moving_milliseconds(communication.spans))
        for path in PATHS:
            milliseconds, share = 1e3 * statistics.median(seconds[path]), statistics.median(shares[path])
            rows.append({
                "layout": layout, "variant": path, "median_ms": milliseconds, "comm_share": share,
                "comm_ms": share * milliseconds, "moving_ms": statistics.median(moving[path]), "losses": losses[path],
            })  # fmt: skip
    if rank == 0:
        results.put(rows)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(measure, (f"{directory}/store", *((5, 3) if options.quick else (20, 9)), results), nprocs=WORLD_SIZE)
    rows = results.get()
    table = Table(
        "layout", "collectives", "step", "communication", "share of the step", "of gloo's", "moving", "of gloo's"
    )
    for row in rows:
        gloo = next(each for each in rows if each["layout"] == row["layout"] and each["variant"] == "gloo")
        table.add_row(
            row["layout"], row["variant"], f"{row['median_ms']:.0f} ms", f"{row['comm_ms']:.0f} ms",
            f"{row['comm_share']:.0%}", f"{row['comm_share'] / gloo['comm_share']:.2f}",
            f"{row['moving_ms']:.0f} ms", f"{row['moving_ms'] / gloo['moving_ms']:.2f}",
        )  # fmt: skip
    console = Console(width=110)
    console.print(f"Llama of 6 layers, hidden 512, vocabulary {VOCABULARY}, {TOKENS} tokens a step, bf16, 2 ranks")
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
