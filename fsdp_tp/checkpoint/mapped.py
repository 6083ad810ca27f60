"""The tensors of a safetensors file, mapped into memory: bytes are read when they are used, and only those."""

from __future__ import annotations

import json
import math
import mmap
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_tp.checkpoint.files import DTYPES

# Others' files may have more than ours.
_DTYPES = DTYPES | {
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_LENGTH_BYTES = 8


def map_safetensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a safetensors file as views of its bytes, which are read when they are used.

    The format: eight bytes that hold the length of a header (little-endian), the header (JSON: for every name a
    dtype, a shape and two offsets), and the bytes that the offsets count. A tensor whose bytes are not
    aligned to its dtype is copied. Nothing written to a tensor reaches the file, but it takes memory: don't.

    Args:
        path: of a file that nobody changes as long as the tensors live (one that becomes shorter ends the process).

    Returns:
        The tensors on the CPU, in the order of the header.

    Raises:
        ValueError: the file is not a safetensors file, or is cut off, or has a dtype that torch does not have.
    """
    path = Path(path)
    with path.open("rb") as file:
        if not (size := os.fstat(file.fileno()).st_size):
            raise ValueError(f"{path} is not a safetensors file: it is empty")
        # Private: torch knows no read-only tensors, and this way the file is safe from writes.
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    length = int.from_bytes(memory[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + length
    if start > size:
        raise ValueError(f"{path} is not a complete safetensors file: a header of {length} bytes in {size}")
    try:
        header = json.loads(memory[_LENGTH_BYTES:start].decode())
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a safetensors file: its header cannot be read: {error}") from None
    return {name: _tensor(memory, start, entry, f"{name} in {path}") for name, entry in entries.items()}


def _tensor(memory: mmap.mmap, start: int, entry: Any, what: str) -> Tensor:
    dtype, shape, offset, end = _checked(entry, what)
    count = math.prod(shape)
    if end - offset != count * dtype.itemsize:
        raise ValueError(
            f"{what} has {end - offset} bytes; its shape {shape} in {dtype} takes {count * dtype.itemsize}"
        )
    if start + end > len(memory):
        raise ValueError(f"{what} ends at byte {start + end}, the file at {len(memory)}: it is cut off")
    if not count:
        return torch.empty(shape, dtype=dtype)
    offset += start
    if offset % dtype.itemsize:
        return torch.frombuffer(bytearray(memory[offset : start + end]), dtype=dtype).view(shape)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


def _checked(entry: Any, what: str) -> tuple[torch.dtype, list[int], int, int]:
    try:
        name, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        is_valid = isinstance(name, str) and all(type(size) is int and size >= 0 for size in (*shape, start, end))
    except (KeyError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise ValueError(f"{what} has the entry {entry!r}, which is not one of a safetensors file")
    if name not in _DTYPES:
        raise ValueError(f"{what} has dtype={name!r}, which is none of {', '.join(_DTYPES)}")
    return _DTYPES[name], list(shape), start, end
