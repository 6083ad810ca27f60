"""Reads checkpoints: of each tensor, what this rank needs."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_tp.checkpoint.chunks import box_of, local_of
from fsdp_tp.checkpoint.files import DTYPES, read_box
from fsdp_tp.checkpoint.manifest import MANIFEST, Damaged, Manifest
from fsdp_tp.checkpoint.rank_0 import from_all_ranks, on_rank_0, require_success

logger = logging.getLogger("fsdp_tp")


def read_manifest(path: Path) -> Manifest:
    """What rank 0 reads, on every rank; every rank must call it. Raises :class:`Damaged`."""
    return on_rank_0(lambda: Manifest.read(path))


def read_tensors(path: Path, manifest: Manifest, targets: Mapping[str, Tensor]) -> int:
    """Reads stored tensors into ``targets``, this rank's box of each; every rank must call it.

    Returns:
        How many bytes this rank has read.

    Raises:
        ValueError: on every rank: a shape differs; a file is damaged.
    """
    error, count = None, 0
    try:
        count = sum(_read(path, manifest, name, tensor) for name, tensor in targets.items())
    except (OSError, ValueError) as caught:
        error = caught
    require_success(f"checkpoint {path} cannot be read", error)
    return count


@torch.no_grad()
def _read(path: Path, manifest: Manifest, name: str, target: Tensor) -> int:
    stored = manifest.find(name)
    assert stored is not None, name
    if tuple(target.shape) != stored.shape:
        raise ValueError(f"{name} is {stored.shape} in the checkpoint and {tuple(target.shape)} here")
    mine, local, dtype = box_of(target), local_of(target), DTYPES[stored.dtype]
    on_cpu = local if local.device.type == "cpu" and local.dtype == dtype else None
    into = torch.empty(local.shape, dtype=dtype) if on_cpu is None else on_cpu
    count = covered = 0
    for chunk in stored.chunks:
        if mine.numel and (both := mine & chunk.box) is not None:
            part = into[both.within(mine)]
            wanted = both.within(chunk.box)
            if part.is_contiguous():
                read_box(path / chunk.file, chunk.start, chunk.box.shape, wanted, part)
            else:
                buffer = torch.empty(both.shape, dtype=dtype)
                read_box(path / chunk.file, chunk.start, chunk.box.shape, wanted, buffer)
                part.copy_(buffer)
            covered += both.numel
            count += both.numel * dtype.itemsize
    if covered != mine.numel:
        raise Damaged(f"{path} has {covered:,} of the {mine.numel:,} values of {name} that a rank needs")
    if on_cpu is None:
        local.copy_(into)
    return count


def complete_checkpoints(directory: Path) -> list[Path]:
    """Directories whose names end in a number and that have a manifest, newest first."""
    if not directory.is_dir():
        return []
    numbered = [
        (int(match.group(1)), path)
        for path in directory.iterdir()
        if (match := re.search(r"(\d+)$", path.name)) and not path.name.startswith(".") and is_complete(path)
    ]
    return [path for _, path in sorted(numbered, reverse=True)]


def is_complete(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def find_problems(path: Path) -> list[str]:
    """What is wrong with a checkpoint, the same on all ranks, each of which reads its share of the files; every rank
    must call it."""
    try:
        manifest = read_manifest(path)
    except Damaged as damage:
        return [str(damage)]
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own = manifest.problems(path, list(manifest.files)[rank::size])
    return [problem for problems in from_all_ranks(own) for problem in problems]
