"""Files of tensors: safetensors, written in one pass with their digests, and read in parts.

Whoever wants the tensors of such a file can open it with safetensors; only checkpoints need more, and have it in their
manifest (:mod:`fsdp_tp.checkpoint.manifest`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from fsdp_tp.checkpoint.new_file import NewFile

# What safetensors calls them.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PIECE = 16 << 20
"""Bytes of a tensor that have a digest of their own. A part of the format."""
_STEP = 1 << 20  # bytes that are still in a cache when they are used a second time


@dataclass(frozen=True)
class Written:
    """A new file."""

    size: int
    header_size: int
    header_digest: str
    starts: dict[str, int]
    """The byte at which each tensor begins."""
    digests: dict[str, tuple[str, ...]]
    """Of each tensor's bytes, for every :data:`PIECE` of them."""


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """Raises ValueError for a dtype that safetensors does not have."""
    if dtype not in NAMES:
        raise ValueError(f"{name} has dtype {dtype}; a checkpoint holds {', '.join(map(str, NAMES))}")
    return NAMES[dtype]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None) -> Written:
    """Writes a new safetensors file and waits until it is on the disk.

    Args:
        tensors: on the CPU, contiguous.
        metadata: of the file, for its readers.
    """
    # Large types first: so all values are where their types may be in memory, and can be used from a mapped file.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
    entries: dict[str, dict[str, Any]] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.nbytes
        entries[name] = {
            "dtype": dtype_name(name, tensor.dtype), "shape": list(tensor.shape), "data_offsets": [position, end],
        }  # fmt: skip
        position = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    with NewFile(path) as file:
        header_digest = _append(file, header)
        digests = {}
        for name, tensor in tensors.items():
            data = _bytes_of(tensor)
            digests[name] = tuple(_append(file, data[at : at + PIECE]) for at in range(0, len(data), PIECE))
    starts = {name: len(header) + entries[name]["data_offsets"][0] for name in tensors}
    return Written(file.size, len(header), header_digest, starts, digests)


def _append(file: NewFile, data: np.ndarray) -> str:
    """Returns the digest."""
    state = xxhash.xxh3_64()
    for at in range(0, len(data), _STEP):
        state.update(memoryview(data[at : at + _STEP]))  # type: ignore[arg-type]
        file.append(data[at : at + _STEP])
    return str(state.hexdigest())


def read_into(path: Path, start: int, out: Tensor) -> list[str]:
    """Reads bytes of a file, from the byte ``start`` on, into all of ``out``: contiguous, on the CPU.

    Returns:
        The digest of every :data:`PIECE` of them.
    """
    data = _bytes_of(out)
    with path.open("rb", buffering=0) as file:
        digests = []
        for at in range(0, len(data), PIECE):
            piece = data[at : at + PIECE]
            parts = (piece[step : step + _STEP] for step in range(0, len(piece), _STEP))
            digests.append(_read(file.fileno(), start + at, parts))
        return digests


def digest_of(path: Path, start: int, size: int) -> str:
    """Of bytes of a file. Raises OSError."""
    buffer = np.empty(min(_STEP, size), np.uint8)
    with path.open("rb", buffering=0) as file:
        return _read(file.fileno(), start, (buffer[: size - at] for at in range(0, size, _STEP)))


def _read(file: int, start: int, parts: Iterable[np.ndarray]) -> str:
    """Reads into one after another; returns the digest of all."""
    state = xxhash.xxh3_64()
    for part in parts:
        at = 0
        while at < len(part):
            count = os.preadv(file, [memoryview(part[at:])], start)  # type: ignore[arg-type]
            if count == 0:
                raise OSError(f"the file ends at byte {start:,}")
            at, start = at + count, start + count
        state.update(memoryview(part))  # type: ignore[arg-type]
    return str(state.hexdigest())


def run_start(shape: tuple[int, ...], wanted: tuple[slice, ...]) -> int | None:
    """Where in a tensor of ``shape`` the values of a part begin if they lie one after another, else None."""
    sizes = [part.stop - part.start for part in wanted]
    dim = len(shape) - 1
    while dim >= 0 and sizes[dim] == shape[dim]:
        dim -= 1
    if dim > 0 and math.prod(sizes[:dim]) != 1:
        return None
    return sum(part.start * math.prod(shape[dim + 1 :]) for dim, part in enumerate(wanted))


def read_apart(path: Path, start: int, shape: tuple[int, ...], wanted: tuple[slice, ...], out: Tensor) -> None:
    """Reads a part whose values do not lie one after another, of a tensor of ``shape`` and ``out``'s dtype, whose first
    byte is ``start`` of a file, into ``out``, on the CPU."""
    size = math.prod(shape) * out.itemsize
    mapped = np.memmap(path, dtype=np.uint8, mode="c", offset=start, shape=(size,))
    whole = torch.from_numpy(mapped)
    if start % out.itemsize:
        whole = whole.clone()
    out.copy_(whole.view(out.dtype).view(shape)[wanted])


def sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """A file that is there with all of its text or not at all."""
    temporary = path.with_name(f".{path.name}.incomplete")
    temporary.write_text(text)
    sync(temporary)
    temporary.rename(path)


def bytes_in(directory: Path) -> int:
    count = 0
    for path in directory.iterdir():
        with suppress(FileNotFoundError):  # somebody has just given the file its name
            count += path.stat().st_size
    return count


def _bytes_of(tensor: Tensor) -> np.ndarray:
    data: np.ndarray = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
    return data
