"""What does a tensor-parallel step cost, ours beside torch's own ``parallelize_module``?

Two local processes split one Llama-architecture model; both versions train in turns in the same
processes, so that whatever else the machine does falls on both alike.

    python -m bench.tensor_parallel [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_tp

WORLD_SIZE = 2
ROWS, SEQUENCE, VOCABULARY = 4, 128, 512


def build() -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return fsdp_tp.initialize(LlamaForCausalLM(config), seed=0)


def ours(mesh: fsdp_tp.ParallelMesh) -> nn.Module:
    return fsdp_tp.parallelize(build(), mesh)


def torchs(mesh: fsdp_tp.ParallelMesh) -> nn.Module:
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    return parallelize_module(build(), mesh.tensor, plan)


def one_process(mesh: fsdp_tp.ParallelMesh) -> nn.Module:
    return build()


VERSIONS: dict[str, Callable[[fsdp_tp.ParallelMesh], nn.Module]] = {
    "fsdp_tp.parallelize": ours,
    "torch parallelize_module": torchs,
    "whole model on each process": one_process,
}


def worker(rank: int, store: str, rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, WORLD_SIZE), rank=rank, world_size=WORLD_SIZE
    )  # fmt: skip
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=WORLD_SIZE)
    ids = torch.randint(0, VOCABULARY, (ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    models = {name: make(mesh) for name, make in VERSIONS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    losses = {}
    for turn in range(rounds + 2):
        for name, model in models.items():
            dist.barrier()
            began = time.perf_counter()
            logits = model(ids[:, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            if turn >= 2:  # the first turns warm up
                seconds[name].append(time.perf_counter() - began)
            losses[name] = loss.item()
            model.zero_grad()
    if rank == 0:
        results.put((seconds, losses))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        arguments = (f"{directory}/store", 5 if options.quick else 30, results)
        mp.spawn(worker, arguments, nprocs=WORLD_SIZE)
        seconds, losses = results.get()
    assert max(losses.values()) - min(losses.values()) < 1e-5 * min(losses.values()), losses

    ours_median = statistics.median(seconds["fsdp_tp.parallelize"])
    table = Table("forward and backward", "median, ms", "quartiles, ms", "time relative to ours")
    report = {}
    for name, values in seconds.items():
        low, middle, high = (1e3 * value for value in statistics.quantiles(values, n=4))
        table.add_row(name, f"{middle:.1f}", f"{low:.1f} to {high:.1f}", f"{middle / 1e3 / ours_median:.2f}")
        report[name] = {
            "median_ms": middle,
            "quartiles_ms": [low, high],
            "relative_to_ours": middle / 1e3 / ours_median,
        }
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
