"""Files that are there whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, lines: Iterable[str]) -> None:
    """Writes ``lines``, which end themselves, and makes the directory if need be; an interruption leaves what was
    there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(lines)
    temporary.replace(path)
