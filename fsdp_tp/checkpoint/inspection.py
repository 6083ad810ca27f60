"""What a manifest says of its checkpoint, as JSON values and as a table."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Column, Table
from rich.text import Text

from fsdp_tp.checkpoint.manifest import Manifest, Stored
from fsdp_tp.checkpoint.state import OPTIMIZER


def describe(path: Path, manifest: Manifest, *, each_of_optimizer: bool) -> dict[str, Any]:
    """As JSON values. Of the optimizer what it keeps for all parameters under one key is one entry, or each its own."""
    model = {name: stored for name, stored in manifest.tensors.items() if not name.startswith(OPTIMIZER)}
    optimizer = {name: stored for name, stored in manifest.tensors.items() if name.startswith(OPTIMIZER)}
    by_key: dict[str, list[Stored]] = defaultdict(list)
    for name, stored in optimizer.items():
        by_key[name.rpartition(".")[2]].append(stored)
    return {
        "path": str(path),
        "step": manifest.extra.get("step"),
        "layout": manifest.layout,
        "files": {"count": len(manifest.files), "bytes": sum(file.size for file in manifest.files.values())},
        "model": {
            "total": _sum(list(model.values())),
            "tensors": [_one(name, stored) for name, stored in model.items()],
            "tied": manifest.aliases,
        },
        "optimizer": {
            "total": _sum(list(optimizer.values())),
            **(
                {"tensors": [_one(name, stored) for name, stored in optimizer.items()]}
                if each_of_optimizer
                else {"keys": {key: _sum(all_of_key) for key, all_of_key in by_key.items()}}
            ),
        },
    }


def _one(name: str, stored: Stored) -> dict[str, Any]:
    shape = list(stored.shape)
    return {
        "name": name, "dtype": stored.dtype, "shape": shape, "bytes": stored.nbytes, "chunks": len(stored.chunks)
    }  # fmt: skip


def _sum(tensors: list[Stored]) -> dict[str, Any]:
    return {
        "tensors": len(tensors),
        "dtype": ", ".join(sorted({stored.dtype for stored in tensors})),
        "values": sum(math.prod(stored.shape) for stored in tensors),
        "bytes": sum(stored.nbytes for stored in tensors),
        "chunks": sum(len(stored.chunks) for stored in tensors),
    }


def show(description: dict[str, Any]) -> None:
    """On stdout; where that is no terminal, lines are as long as they need to be."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000
    model, optimizer, files = (description[key] for key in ("model", "optimizer", "files"))
    table = Table(Column("tensor", overflow="fold"), "dtype", "shape", *(Column(each, justify="right") for each in (
        "size", "chunks")))  # fmt: skip
    for row in model["tensors"]:
        _add(table, row)
    for name, other in model["tied"].items():
        table.add_row(Text(name), "", f"= {other}")
    table.add_section()
    for row in optimizer.get("tensors", []):
        _add(table, row)
    for key, row in optimizer.get("keys", {}).items():
        _add_sum(table, f"optimizer: {key}", row)
    table.add_section()
    for name in ("model", "optimizer"):
        _add_sum(table, f"total: {name}", description[name]["total"])
    step = description["step"]
    console.print(Text(f"{description['path']}{'' if step is None else f', step {step}'}"))
    console.print(Text(f"written by {description['layout']}; {files['count']} files, {_size(files['bytes'])}"))
    console.print(table)


def _add(table: Table, row: dict[str, Any]) -> None:
    shape = " x ".join(map(str, row["shape"]))
    table.add_row(Text(row["name"]), row["dtype"], shape, decimal(row["bytes"]), str(row["chunks"]))


def _add_sum(table: Table, name: str, row: dict[str, Any]) -> None:
    values = f"{row['values']:,} values in {row['tensors']}"
    table.add_row(Text(name), row["dtype"], values, decimal(row["bytes"]), str(row["chunks"]))


def _size(count: int) -> str:
    return f"{decimal(count)} ({count:,} bytes)"
