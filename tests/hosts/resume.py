"""A training script that saves after every step and goes on from the newest checkpoint, for runs that fail.

    torchrun --nnodes 2 --nproc-per-node 2 --max-restarts 3 ... -m tests.hosts.resume DIRECTORY TIMEOUT

What a rank raises is written to ``DIRECTORY/errors``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fsdp_tp
from fsdp_tp import checkpoint
from fsdp_tp.comm.backend import cpu_backend

STEPS, WIDTH = 6, 512


def build() -> tuple[nn.Module, int]:
    """The model and the number of its parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
    return model, sum(parameter.numel() for parameter in model.parameters())


def train(directory: Path, timeout: float) -> None:
    mesh = fsdp_tp.init_mesh(hybrid_shard_degree=2, timeout=timedelta(seconds=timeout))
    model, _ = build()
    for unit in (model[0], model[2], model):
        fsdp_tp.fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    done = 0
    if path := checkpoint.latest(directory):
        done = checkpoint.load(path, model=model, optimizer=optimizer)["step"]
    for step in range(done + 1, STEPS + 1):
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + mesh.data_rank))
        (model(batch) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save(directory / f"step-{step}", model=model, optimizer=optimizer, extra={"step": step})


def main() -> None:
    directory, timeout = Path(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    # Processes of a busy machine may take longer to come than a collective may take later.
    dist.init_process_group(cpu_backend(), timeout=timedelta(seconds=60))
    try:
        train(directory, timeout)
    except Exception as error:
        text = json.dumps({"rank": dist.get_rank(), "time": time.time(), "error": f"{type(error).__name__}: {error}"})
        temporary = directory / f"{os.getpid()}.incomplete"
        temporary.write_text(text)
        temporary.rename(directory / "errors" / f"{os.getpid()}.json")
        # torchrun ends the other ranks of a host as soon as one has failed, and a rank must not be told by the end of
        # another that something is wrong: let all speak.
        deadline = time.monotonic() + 30
        while len(list((directory / "errors").iterdir())) < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(0.05)
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
