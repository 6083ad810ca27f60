"""Files of tensors: safetensors, written in one pass with their digest, and read box by box.

Whoever wants the tensors of such a file can open it with safetensors; only checkpoints need more, and have it in their
manifest (:mod:`fsdp_tp.checkpoint.manifest`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

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
_PIECE = 16 << 20  # bytes, written or read at once


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """Raises ValueError for a dtype that safetensors does not have."""
    if dtype not in NAMES:
        raise ValueError(f"{name} has dtype {dtype}; a checkpoint holds {', '.join(map(str, NAMES))}")
    return NAMES[dtype]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, int], int, str]:
    """Writes a new safetensors file and waits until it is on the disk.

    Args:
        tensors: on the CPU, contiguous.

    Returns:
        The byte at which each tensor begins, the size of the file, and its digest.
    """
    header: dict[str, dict[str, Any]] = {}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.nbytes
        header[name] = {
            "dtype": dtype_name(name, tensor.dtype), "shape": list(tensor.shape), "data_offsets": [position, end],
        }  # fmt: skip
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    digest = xxhash.xxh3_128()
    with path.open("xb", buffering=0) as file:
        for data in (len(text).to_bytes(8, "little"), text, *(_bytes_of(tensor) for tensor in tensors.values())):
            view = memoryview(data)  # type: ignore[arg-type]
            for at in range(0, len(view), _PIECE):
                piece = view[at : at + _PIECE]
                digest.update(piece)
                while len(piece):  # a write may take less than it is given
                    piece = piece[file.write(piece) :]
        os.fsync(file.fileno())
    starts = {name: start + entry["data_offsets"][0] for name, entry in header.items()}
    return starts, start + position, digest.hexdigest()


def read_box(path: Path, start: int, shape: tuple[int, ...], wanted: tuple[slice, ...], out: Tensor) -> None:
    """Reads part of a tensor of ``shape`` and ``out``'s dtype, whose first byte is ``start`` of a file, into ``out``,
    on the CPU. No other part of it is read."""
    if out.numel() == 0:
        return
    runs = _runs(shape, wanted)
    if runs == 1 and out.is_contiguous():
        first = math.prod(shape[1:]) * wanted[0].start if shape else 0
        for dim in range(1, len(shape)):
            first += math.prod(shape[dim + 1 :]) * wanted[dim].start
        _read_into(path, start + first * out.itemsize, out)
        return
    size = math.prod(shape) * out.itemsize
    mapped = np.memmap(path, dtype=np.uint8, mode="c", offset=start, shape=(size,))
    whole = torch.from_numpy(mapped)
    if start % out.itemsize:
        whole = whole.clone()
    out.copy_(whole.view(out.dtype).view(shape)[wanted])


def digest_of(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(_PIECE))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


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


def _runs(shape: tuple[int, ...], wanted: tuple[slice, ...]) -> int:
    """In how many pieces that are apart the part lies."""
    sizes = [part.stop - part.start for part in wanted]
    dim = len(shape) - 1
    while dim >= 0 and sizes[dim] == shape[dim]:
        dim -= 1
    return math.prod(sizes[:dim]) if dim > 0 else 1


def _read_into(path: Path, start: int, out: Tensor) -> None:
    view = memoryview(_bytes_of(out))  # type: ignore[arg-type]
    descriptor = os.open(path, os.O_RDONLY)
    try:
        at = 0
        while at < len(view):
            count = os.preadv(descriptor, [view[at : at + _PIECE]], start + at)
            if count == 0:
                raise OSError(f"{path} ends before byte {start + len(view)}, though its manifest says otherwise")
            at += count
    finally:
        os.close(descriptor)
