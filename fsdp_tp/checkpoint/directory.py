"""The checkpoints in a directory."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from fsdp_tp.checkpoint.manifest import MANIFEST

logger = logging.getLogger("fsdp_tp")


def complete_checkpoints(directory: Path) -> list[Path]:
    """Directories whose names end in a number and that have a manifest, newest first."""
    if not directory.is_dir():
        return []
    numbered = [path for path in directory.iterdir() if split_number(path)[1] >= 0 and not path.name.startswith(".")]
    return sorted(filter(is_complete, numbered), key=lambda path: (split_number(path)[1], path), reverse=True)


def split_number(path: Path) -> tuple[str, int]:
    """The name of a checkpoint without the number at its end, and that; -1 for none."""
    match = re.fullmatch(r"(.*?)([0-9]*)", path.name, re.DOTALL)
    assert match is not None, path
    return match[1], int(match[2] or -1)


def is_complete(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def was_checkpoint(path: Path) -> bool:
    """Whether it is one, or what is left of one: it had its name only when it was complete."""
    return is_complete(path) or any(path.glob(f"model-{'[0-9]' * 5}.safetensors"))


def newest_first(directory: Path) -> list[Path]:
    """:func:`complete_checkpoints`; those that do not count are named in the log.

    Raises:
        ValueError: ``directory`` is itself a checkpoint.
    """
    if is_complete(directory):
        raise ValueError(f"{directory} is a checkpoint itself and not a directory of checkpoints; load it")
    others = directory.iterdir() if directory.is_dir() else ()
    for path in sorted(path for path in others if not path.name.startswith(".") and was_checkpoint(path)):
        if split_number(path)[1] < 0:
            if not _ASIDE.search(path.name):
                logger.warning("%s is passed over: its name does not end in a number", path)
        elif not is_complete(path):
            logger.warning("%s is passed over: it has no %s", path, MANIFEST)
    return complete_checkpoints(directory)


_ASIDE = re.compile(r"\.damaged-[0-9]+\.old$")


def name_aside(path: Path) -> Path:
    """A new one for a damaged checkpoint; nothing finds it there but who looks for it."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}.old")).exists():
        number += 1
    return aside
