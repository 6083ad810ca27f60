"""What does a tensor-parallel step cost, ours beside torch's and transformers' own?

Two local processes of one thread each split one Llama-architecture model. Ours communicates over fsdp_tp_shm, as it
does by itself, and as "ours, gloo" over what all others have. All variants train in turns in the same processes, so
that whatever else the machine does falls on all alike. A step is forward, loss (in fp32) and backward; an
optimizer's step is left out for all alike.

``one_process`` is the whole model on the whole batch in one process, measured while the other core does the
same. Twice its tokens a second is the ideal of two ranks, to which ``of_ideal`` relates every variant.

    python -m bench.tp_step [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import fsdp_tp

WORLD_SIZE = 2
ROWS, SEQUENCE, VOCABULARY, LAYERS = 8, 256, 8192, 6
DTYPES = ("float32", "bfloat16")
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
TINY = SIZES | {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "head_dim": 4}
HALF_OF_TINY = TINY | {"vocab_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
WARM_UP = 2

Mesh = fsdp_tp.ParallelMesh
Step = Callable[[nn.Module, Mesh, Tensor, Tensor], Tensor]


def build(sizes: dict[str, Any], dtype: str) -> nn.Module:
    model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))
    return fsdp_tp.initialize(model, seed=0).to(getattr(torch, dtype))


def torchs(model: nn.Module, mesh: Mesh, *, sequence_parallel: bool = False) -> nn.Module:
    """Each input is made a DTensor once for all column layers that read it, so that its gradient is reduced once."""
    between: Any = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "model.layers.*.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "model.layers.*.mlp": PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate()),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=between),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    if sequence_parallel:
        for name in ("model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm"):
            plan[name] = SequenceParallel(use_local_output=True)
    return parallelize_module(model, mesh.tensor, plan)


def transformers(model: Any, mesh: Mesh) -> nn.Module:
    """What ``from_pretrained(..., distributed_config=...)`` does to a model, but for reading weights from a file,
    which takes the ``accelerate`` package."""
    config, _, manager = model.prepare_distribute_model(DistributedConfig(tp_size=WORLD_SIZE))
    return model.maybe_distribute_model(model, config, manager)


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    positions = torch.arange(ids.shape[1]).unsqueeze(0)  # a model that sees a slice of the sequence could not tell
    return model(ids, position_ids=positions).logits


def whole_loss(model: nn.Module, mesh: Mesh, ids: Tensor, target: Tensor) -> Tensor:
    logits = logits_of(model, ids)
    with record_function("loss"):
        loss = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
    loss.backward()
    return loss


def torch_split_loss(model: nn.Module, mesh: Mesh, ids: Tensor, target: Tensor) -> Tensor:
    with loss_parallel():
        loss = whole_loss(model, mesh, ids, target)
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def our_split_loss(model: nn.Module, mesh: Mesh, ids: Tensor, target: Tensor) -> Tensor:
    logits = logits_of(model, ids)
    with record_function("loss"):
        loss = fsdp_tp.vocab_parallel_cross_entropy(logits, target, mesh=mesh)
    loss.backward()
    return loss


OVER_GLOO = "ours, gloo"
Variants = dict[str, tuple[Callable[[Any, Mesh], nn.Module], Step, str]]
VARIANTS: Variants = {
    "ours": (
        partial(fsdp_tp.parallelize, loss_parallel=True, sequence_parallel=True),
        our_split_loss,
        "loss_parallel, sequence_parallel, fsdp_tp_shm",
    ),
    OVER_GLOO: (
        partial(fsdp_tp.parallelize, loss_parallel=True, sequence_parallel=True),
        our_split_loss,
        "the same, over gloo",
    ),
    "parallelize_module": (torchs, torch_split_loss, "loss_parallel, PrepareModuleInput"),
    "transformers": (transformers, whole_loss, "DistributedConfig(tp_size=2)"),
    "one_process": (lambda model, mesh: model, whole_loss, "the whole model; twice this is the ideal"),
}
MORE_VARIANTS: Variants = {
    "ours, whole sequences": (partial(fsdp_tp.parallelize, loss_parallel=True), our_split_loss, "loss_parallel"),
    "ours, whole logits": (fsdp_tp.parallelize, whole_loss, "no options"),
    "parallelize_module, sequence": (
        partial(torchs, sequence_parallel=True),
        torch_split_loss,
        "loss_parallel, SequenceParallel",
    ),
}


def category(event: Any) -> str:
    """What a profiled operation's own time belongs to, by its name and those that called it."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    called = " ".join(names)
    for what, marks in (
        ("collectives", ("c10d::", "_c10d_functional::")),
        ("loss", ("loss", "CrossEntropy", "LogSoftmax", "NllLoss")),
        ("matrix products and attention", ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product")),
        ("weights and gradients to and from DTensor", ("TorchTensor",)),
    ):
        if any(mark in called for mark in marks):
            return what
    return "norms and all else, element by element"


def where_time_goes(step: Callable[[], Any], steps: int) -> dict[str, float]:
    """Milliseconds of a step, a category: the median of some profiled steps."""
    found: list[Counter[str]] = []
    for _ in range(steps):
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            step()
        milliseconds: Counter[str] = Counter()
        for event in profiled.events():
            milliseconds[category(event)] += event.self_cpu_time_total / 1e3
        found.append(milliseconds)
    return {what: statistics.median(each[what] for each in found) for what in sorted(set().union(*found))}


def measure(rank: int, store: str, quick: bool, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD_SIZE), rank=rank, world_size=WORLD_SIZE)
    os.environ["FSDP_TP_BACKEND"] = "gloo"
    over_gloo = fsdp_tp.init_mesh(tensor_parallel_degree=WORLD_SIZE)
    del os.environ["FSDP_TP_BACKEND"]
    over_memory = fsdp_tp.init_mesh(tensor_parallel_degree=WORLD_SIZE)
    ids = torch.randint(0, VOCABULARY, (ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    ids, target = ids[:, :-1], ids[:, 1:].contiguous()
    variants = VARIANTS if quick else VARIANTS | MORE_VARIANTS
    meshes = {name: over_memory if "ours" in name and name != OVER_GLOO else over_gloo for name in variants}
    report: dict[str, Any] = {}
    for dtype in DTYPES:
        models = {name: make(build(SIZES, dtype), meshes[name]) for name, (make, _, _) in variants.items()}
        seconds: dict[str, list[float]] = {name: [] for name in models}
        losses = {}

        def step(name: str, models: dict[str, nn.Module] = models) -> float:
            models[name].zero_grad()
            return variants[name][1](models[name], meshes[name], ids, target).item()

        gc.collect()
        gc.freeze()  # the collector need not walk through every imported module again
        for turn in range(WARM_UP + (5 if quick else 20)):
            for name in models:
                dist.barrier()
                began = time.perf_counter()
                losses[name] = step(name)
                if turn >= WARM_UP:
                    seconds[name].append(time.perf_counter() - began)
        where = {
            name: where_time_goes(partial(step, name), 3 if quick else 9) for name in ("ours", OVER_GLOO, "one_process")
        }
        everybodys: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(everybodys, seconds)
        # Ranks that work together are done when the last one is; alone, each process is a measurement of its own.
        times = {}
        for name in models:
            combine = statistics.mean if name == "one_process" else max
            times[name] = [combine(turn) for turn in zip(*(each[name] for each in everybodys), strict=True)]
        report[dtype] = {"seconds": times, "losses": losses, "where": where}
    if rank == 0:
        results.put(report)
    dist.destroy_process_group()


def measure_python(rank: int, quick: bool, results: Any) -> None:
    """Processor time of two tokens through a tiny model whose collectives do nothing, less that of a plain model of
    one rank's shapes: kernels take next to nothing, so the difference is the Python of the regions, weights and loss.
    """
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE)
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=WORLD_SIZE)
    ids = torch.tensor([[1, 2]])
    variants = VARIANTS | MORE_VARIANTS
    models = {
        name: make(build(HALF_OF_TINY if name == "one_process" else TINY, "float32"), mesh)
        for name, (make, _, _) in variants.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in models}
    gc.collect()
    gc.freeze()
    for turn in range(WARM_UP + (20 if quick else 100)):
        for name, model in models.items():
            model.zero_grad()
            began = time.process_time()
            variants[name][1](model, mesh, ids, ids)
            if turn >= WARM_UP:
                seconds[name].append(time.process_time() - began)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    results.put({name: 1e3 * (median - medians["one_process"]) / LAYERS for name, median in medians.items()})
    dist.destroy_process_group()


def rows_of(report: dict[str, Any], python: dict[str, float]) -> list[dict[str, Any]]:
    rows = []
    for dtype, measured in report.items():
        ideal = WORLD_SIZE / statistics.median(measured["seconds"]["one_process"])
        for name, seconds in measured["seconds"].items():
            rates = sorted(ROWS * SEQUENCE / value for value in seconds)
            low, middle, high = statistics.quantiles(rates, n=4)
            row = {
                "variant": name, "dtype": dtype, "tokens_per_second": middle, "quartiles": [low, high],
                "of_ideal": middle / (ideal * ROWS * SEQUENCE), "loss": measured["losses"][name],
                "python_ms_a_layer_and_step": python[name], "configuration": (VARIANTS | MORE_VARIANTS)[name][2],
            }  # fmt: skip
            rows.append(row | ({"ms_by_category": where} if (where := measured["where"].get(name)) else {}))
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    console = Console(width=150)
    table = Table("dtype", "variant", "configuration", "tokens/s", "quartiles", "of ideal", "Python, ms/layer")
    for row in rows:
        low, high = row["quartiles"]
        table.add_row(
            row["dtype"], row["variant"], row["configuration"], f"{row['tokens_per_second']:.0f}",
            f"{low:.0f} to {high:.0f}", f"{row['of_ideal']:.0%}", f"{row['python_ms_a_layer_and_step']:.2f}",
        )  # fmt: skip
    console.print(f"{ROWS} x {SEQUENCE} tokens, hidden 512, {LAYERS} layers, vocabulary {VOCABULARY}, 2 ranks")
    console.print(table)
    for dtype in DTYPES:
        found = {
            row["variant"]: row["ms_by_category"] for row in rows if row["dtype"] == dtype and "ms_by_category" in row
        }
        table = Table(
            f"{dtype}: where a step's time goes (profiled)", "half of one process, ms", "ours, ms", "more, ms",
            f"{OVER_GLOO}, ms", "more, ms",
        )  # fmt: skip
        for what in sorted(set().union(*found.values())):
            half = found["one_process"].get(what, 0) / WORLD_SIZE
            ours = [found[name].get(what, 0) for name in ("ours", OVER_GLOO)]
            table.add_row(what, f"{half:.0f}", *(text for ms in ours for text in (f"{ms:.0f}", f"{ms - half:+.0f}")))
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and only the main variants")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(measure, (f"{directory}/store", options.quick, results), nprocs=WORLD_SIZE)
        report = results.get()
    mp.spawn(measure_python, (options.quick, results), nprocs=1)
    rows = rows_of(report, results.get())
    losses = [row["loss"] for row in rows if row["dtype"] == "float32"]
    assert max(losses) - min(losses) < 1e-5 * min(losses), losses  # fp32 sums in another order
    show(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
