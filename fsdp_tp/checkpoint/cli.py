"""The command line: ``python -m fsdp_tp.checkpoint --help``. One process; nothing of a checkpoint is executed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fsdp_tp.checkpoint.convert import DTYPES, from_hugging_face, to_hugging_face
from fsdp_tp.checkpoint.directory import complete_checkpoints, is_complete, was_checkpoint
from fsdp_tp.checkpoint.inspection import describe, show
from fsdp_tp.checkpoint.manifest import Manifest

EXIT_DAMAGED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line ``arguments``; returns the exit status."""
    try:
        status: int = tyro.extras.subcommand_cli_from_dict(
            {"inspect": inspect, "verify": verify, "convert": convert},
            prog="python -m fsdp_tp.checkpoint",
            description="Looks into checkpoints, checks them, and converts them to and from Hugging Face.",
            args=sys.argv[1:] if arguments is None else arguments,
        )
        return status
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def inspect(path: tyro.conf.Positional[Path], /, *, all: bool = False, json: bool = False) -> int:
    """Shows what a checkpoint holds; its tensors are not read.

    Args:
        path: A checkpoint, or a directory of them: then the newest.
        all: One row for each tensor of the optimizer too.
        json: Print JSON, with sizes in bytes.
    """
    checkpoint = _checkpoint_at(path)
    manifest = Manifest.read(checkpoint)
    description = describe(checkpoint, manifest, each_of_optimizer=all)
    if json:
        _print_json(description)
    else:
        show(description)
    for problem in manifest.wrong_sizes(checkpoint, manifest.files):
        print(problem, file=sys.stderr)
    return 0


def verify(paths: tyro.conf.Positional[tuple[Path, ...]], /) -> int:
    """Reads all files of checkpoints and compares their sizes and digests with what was written. Exit status: 0 all are
    complete and undamaged, 1 one is not, 2 there is nothing to verify.

    Args:
        paths: Checkpoints, or directories of them: then all.
    """
    if not paths:
        raise ValueError("verify needs the path of a checkpoint, or of a directory of them")
    checkpoints = [checkpoint for path in paths for checkpoint in _checkpoints_at(path)]
    damaged = False
    for checkpoint in checkpoints:
        problems = _problems(checkpoint)
        damaged = damaged or bool(problems)
        for problem in problems:
            print(problem)
        if not problems:
            print(f"{checkpoint} is complete and undamaged")
    return EXIT_DAMAGED if damaged else 0


def convert(
    source: tyro.conf.Positional[Path],
    target: tyro.conf.Positional[Path],
    /,
    *,
    to: Literal["hf", "fsdp_tp"],
    config: Path | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
) -> int:
    """Converts the model of a checkpoint, to Hugging Face or from it; takes memory for the model.

    Args:
        source: A checkpoint, or a directory of them: then the newest. With --to fsdp_tp: a Hugging Face directory.
        target: New.
        to: hf: what from_pretrained loads. fsdp_tp: what fsdp_tp.checkpoint.load loads.
        config: Hugging Face config.json, or a directory with one. Not needed of what fsdp_tp.train saved, nor of a
            Hugging Face directory that has one.
        dtype: Of the result; by default what the source has, of several the one that holds all.
    """
    chosen = None if dtype is None else DTYPES[dtype]
    if to == "hf":
        source = _checkpoint_at(source)
        to_hugging_face(source, target, config, chosen)
    else:
        from_hugging_face(source, target, config, chosen)
    print(f"{source} -> {target}")
    return 0


def _checkpoint_at(path: Path) -> Path:
    """Itself or the newest in it."""
    if is_complete(path):
        return path
    if found := complete_checkpoints(path):
        return found[0]
    raise ValueError(f"{path} is neither a complete checkpoint nor a directory of checkpoints")


def _checkpoints_at(path: Path) -> list[Path]:
    """Itself or all in it, damaged ones too: a checkpoint has its name only when it has been complete."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory")
    inside = sorted(each for each in path.iterdir() if not each.name.startswith(".") and was_checkpoint(each))
    return [path] if was_checkpoint(path) or not inside else inside


def _problems(path: Path) -> list[str]:
    """As ``find_problems`` in one process, with progress on stderr."""
    try:
        manifest = Manifest.read(path)
    except (OSError, ValueError) as error:
        return [str(error)]
    found = []
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(path.name, total=sum(file.size for file in manifest.files.values()))
        for name, file in manifest.files.items():
            progress.update(task, description=f"{path.name}/{name}")
            found += manifest.problems(path, [name])
            progress.advance(task, file.size)
    return found


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))
