"""Dotted paths of modules and parameters, as ``named_modules`` gives them; ``""`` is the model itself."""

from __future__ import annotations


def join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def parent_of(path: str) -> str:
    return path.rpartition(".")[0]


def lineage(path: str) -> list[str]:
    """``a.b.c`` -> ``[a.b.c, a.b, a, ""]``."""
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]


def is_within(path: str, ancestor: str) -> bool:
    """Whether ``ancestor`` is ``path`` or around it."""
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")
