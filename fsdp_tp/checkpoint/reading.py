"""Reads checkpoints: of each tensor, what this rank needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_tp.checkpoint.chunks import Box, box_of, local_of
from fsdp_tp.checkpoint.files import DTYPES, read_apart, read_into, run_start
from fsdp_tp.checkpoint.manifest import Chunk, Damaged, Manifest, Piece, Stored, damage_of, is_intact
from fsdp_tp.checkpoint.rank_0 import from_all_ranks, on_rank_0, require_success


def read_manifest(path: Path) -> Manifest:
    """What rank 0 reads, on every rank; every rank must call it. Raises :class:`Damaged`."""
    return on_rank_0(lambda: Manifest.read(path))


def read_tensors(path: Path, manifest: Manifest, targets: Mapping[str, Tensor], *, verify: bool) -> int:
    """Reads stored tensors into ``targets``, this rank's box of each; every rank must call it, with the same names.

    Args:
        verify: compares the digest of every piece of these tensors. A piece that no rank reads whole, since the
            layout is another, is read again by one.

    Returns:
        How many bytes this rank has read of what it needs.

    Raises:
        ValueError: on every rank: a shape differs.
        Damaged: on every rank: a file is damaged or cannot be read. ``targets`` have changed.
    """
    found = {name: _find(manifest, name, target) for name, target in targets.items()}
    reader, error = _Reader(path, manifest, verify), None
    try:
        for name, target in targets.items():
            reader.read(name, found[name], target)
    except (OSError, ValueError) as caught:
        error = caught
    _require_intact(path, error)
    if verify:
        pieces = [piece for stored in found.values() for piece in stored.pieces()]
        headers = [manifest.header_of(file) for file in dict.fromkeys(piece.file for piece in pieces)]
        _check_rest(path, [*headers, *pieces], reader.intact)
    return reader.count


def _find(manifest: Manifest, name: str, target: Tensor) -> Stored:
    stored = manifest.find(name)
    assert stored is not None, name
    if tuple(target.shape) != stored.shape:
        raise ValueError(f"{name} is {stored.shape} in the checkpoint and {tuple(target.shape)} here")
    return stored


class _Reader:
    """Reads this rank's boxes."""

    def __init__(self, path: Path, manifest: Manifest, verify: bool) -> None:
        self._path, self._manifest, self._verify = path, manifest, verify
        self._files: set[str] = set()
        self.count = 0
        """Bytes."""
        self.intact: set[Piece] = set()
        """Pieces that were read whole and are as they were written."""

    @torch.no_grad()
    def read(self, name: str, stored: Stored, target: Tensor) -> None:
        mine, local, dtype = box_of(target), local_of(target), DTYPES[stored.dtype]
        on_cpu = local if local.device.type == "cpu" and local.dtype == dtype else None
        into = torch.empty(local.shape, dtype=dtype) if on_cpu is None else on_cpu
        covered = 0
        for chunk in stored.chunks:
            if mine.numel and (both := mine & chunk.box) is not None:
                part = into[both.within(mine)]
                out = part if part.is_contiguous() else torch.empty(both.shape, dtype=dtype)
                self._read_part(chunk, both, out)
                if out is not part:
                    part.copy_(out)
                covered += both.numel
        if covered != mine.numel:
            raise Damaged(f"there are {covered:,} of the {mine.numel:,} values of {name} that a rank needs")
        if on_cpu is None:
            local.copy_(into)
        self.count += covered * dtype.itemsize

    def _read_part(self, chunk: Chunk, box: Box, out: Tensor) -> None:
        if chunk.file not in self._files and (wrong := self._manifest.wrong_sizes(self._path, [chunk.file])):
            raise Damaged(wrong[0])
        self._files.add(chunk.file)
        path, shape, wanted = self._path / chunk.file, chunk.box.shape, box.within(chunk.box)
        first = run_start(shape, wanted)
        if first is None:
            read_apart(path, chunk.start, shape, wanted, out)
            return
        begin, data = first * out.itemsize, out.reshape(-1).view(torch.uint8)
        for piece in chunk.pieces(chunk.box.numel * out.itemsize):
            at = piece.start - chunk.start - begin  # in what is read
            part = data[max(at, 0) : max(at + piece.size, 0)]
            digests = read_into(path, piece.start + max(-at, 0), part) if len(part) else []
            if self._verify and len(part) == piece.size:
                if digests != [piece.digest]:
                    raise Damaged(damage_of(path))
                self.intact.add(piece)


def _check_rest(path: Path, pieces: list[Piece], intact: set[Piece]) -> None:
    """Of the pieces that no rank has found intact each rank reads its share."""
    mine = np.packbits(np.array([piece in intact for piece in pieces], bool))
    known = np.unpackbits(np.bitwise_or.reduce(from_all_ranks(mine)), count=len(pieces))
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    left, error = [piece for piece, is_known in zip(pieces, known, strict=True) if not is_known], None
    try:
        for piece in left[rank::size]:
            if not is_intact(path, piece):
                raise Damaged(damage_of(path / piece.file))
    except (OSError, ValueError) as caught:
        error = caught
    _require_intact(path, error)


def _require_intact(path: Path, error: Exception | None) -> None:
    try:
        require_success(f"checkpoint {path} cannot be read", error)
    except (OSError, ValueError) as caught:
        raise Damaged(str(caught)) from error


def find_problems(path: Path, *, verify: bool) -> list[str]:
    """What is wrong with a checkpoint's manifest, the sizes of its files and, to ``verify``, their bytes.

    The same on all ranks, each of which looks at its share of the files; every rank must call it.
    """
    try:
        manifest = read_manifest(path)
    except Damaged as damage:
        return [str(damage)]
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    files = list(manifest.files)[rank::size]
    own = manifest.problems(path, files) if verify else manifest.wrong_sizes(path, files)
    return [problem for problems in from_all_ranks(own) for problem in problems]
