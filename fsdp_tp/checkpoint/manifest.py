"""What a checkpoint's directory holds: ``manifest.json``, written last.

Nothing of a checkpoint is executed: the manifest is JSON, tensors are safetensors, and a manifest names files of its
own directory only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import xxhash

from fsdp_tp.checkpoint.chunks import Box
from fsdp_tp.checkpoint.files import DTYPES, PIECE, digest_of, write_text

MANIFEST = "manifest.json"
_VERSION = 2


class Damaged(ValueError):
    """A checkpoint is not what was written; the message names the file."""


@dataclass(frozen=True)
class File:
    size: int
    """In bytes, as the others."""
    header_size: int
    """Before the first tensor."""
    header_digest: str
    """xxh3, 64 bits, as the others."""


@dataclass(frozen=True)
class Piece:
    """Bytes of a file, and their digest."""

    file: str
    start: int
    size: int
    digest: str


@dataclass(frozen=True)
class Chunk:
    file: str
    start: int
    """Its first byte in the file."""
    box: Box
    digests: tuple[str, ...]
    """Of every :data:`PIECE` bytes."""

    @staticmethod
    def from_json(entry: dict[str, Any]) -> Chunk:
        box = Box(tuple(entry["box"]["offset"]), tuple(entry["box"]["shape"]))
        return Chunk(entry["file"], entry["start"], box, tuple(entry["digests"]))

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "start": self.start, "box": vars(self.box), "digests": self.digests}

    def pieces(self, nbytes: int) -> list[Piece]:
        """Of its ``nbytes``."""
        return [
            Piece(self.file, self.start + at, min(PIECE, nbytes - at), digest)
            for at, digest in zip(range(0, nbytes, PIECE), self.digests, strict=True)
        ]


@dataclass(frozen=True)
class Stored:
    """A tensor: global, in the names and order of one process."""

    dtype: str
    """As safetensors says it."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        return self.itemsize * Box((), self.shape).numel

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    def pieces(self) -> list[Piece]:
        return [piece for chunk in self.chunks for piece in chunk.pieces(self.itemsize * chunk.box.numel)]


@dataclass(frozen=True)
class Manifest:
    extra: dict[str, Any]
    layout: str
    """That wrote it, for humans."""
    files: dict[str, File]
    tensors: dict[str, Stored]
    """Of the model by their names, of the optimizer as ``optimizer.state.<parameter>.<key>``."""
    aliases: dict[str, str]
    """Further names of tied tensors."""
    values: dict[str, Any]
    """What is no tensor: the optimizer's groups and state, the scheduler, random states. Keys are strings."""

    def write(self, directory: Path) -> None:
        body = {
            **vars(self),
            "files": {name: vars(file) for name, file in self.files.items()},
            "tensors": {
                name: {**vars(stored), "chunks": [chunk.to_json() for chunk in stored.chunks]}
                for name, stored in self.tensors.items()
            },
        }
        write_text(directory / MANIFEST, json.dumps({"version": _VERSION, "digest": _digest(body), **body}))

    @staticmethod
    def read(directory: Path) -> Manifest:
        """Raises :class:`Damaged`."""
        path = directory / MANIFEST
        try:
            body = json.loads(path.read_text())
            version, digest = body.pop("version"), body.pop("digest")
        except FileNotFoundError:
            raise Damaged(f"{directory} is not a complete checkpoint: it has no {MANIFEST}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"{path} is damaged: {error}") from None
        if version != _VERSION:
            raise Damaged(f"{path} has version {version}; this fsdp_tp reads {_VERSION}")
        if digest != _digest(body):
            raise Damaged(f"{path} is damaged: its digest is not that of its content")
        try:
            manifest = Manifest(
                body["extra"],
                body["layout"],
                {name: File(**file) for name, file in body["files"].items()},
                {name: _stored(entry) for name, entry in body["tensors"].items()},
                body["aliases"],
                body["values"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"{path} is damaged: {error!r}") from None
        manifest._check(path)
        return manifest

    def _check(self, path: Path) -> None:
        """That files are in its directory, tensors in the files, and every byte of those has a digest. Raises
        :class:`Damaged`."""
        for name in self.files:
            if PurePath(name).name != name or name in (".", ".."):
                raise Damaged(f"{path} names the file {name!r}, which is not one of its directory")
        digested = {name: file.header_size for name, file in self.files.items()}
        try:
            for stored in self.tensors.values():
                for piece in stored.pieces():
                    digested[piece.file] += piece.size
        except (KeyError, ValueError) as error:
            raise Damaged(f"{path} is damaged: {error!r}") from None
        for name, file in self.files.items():
            if digested[name] != file.size:
                raise Damaged(f"{path} is damaged: {name} has {file.size:,} bytes and digests of {digested[name]:,}")

    def problems(self, directory: Path, files: Iterable[str]) -> list[str]:
        """What is wrong with some of its files; all their bytes are read."""
        pieces: dict[str, list[Piece]] = {name: [self.header_of(name)] for name in files}
        for stored in self.tensors.values():
            for piece in stored.pieces():
                if piece.file in pieces:
                    pieces[piece.file].append(piece)
        found = []
        for name in pieces:
            found += self.wrong_sizes(directory, [name]) or _damage(directory, pieces[name])
        return found

    def header_of(self, file: str) -> Piece:
        return Piece(file, 0, self.files[file].header_size, self.files[file].header_digest)

    def wrong_sizes(self, directory: Path, files: Iterable[str]) -> list[str]:
        """Which of some files are not as long as they were, or not there."""
        found = []
        for path, expected in ((directory / name, self.files[name].size) for name in files):
            try:
                if path.is_symlink():
                    found.append(f"{path} is a link, and was a file")
                elif (size := path.stat().st_size) != expected:
                    found.append(f"{path} has {size:,} bytes and had {expected:,}")
            except OSError as error:
                found.append(f"{path} cannot be read: {error}")
        return found

    def find(self, name: str) -> Stored | None:
        return self.tensors.get(self.aliases.get(name, name))


def _stored(entry: dict[str, Any]) -> Stored:
    chunks = (Chunk.from_json(chunk) for chunk in entry["chunks"])
    return Stored(entry["dtype"], tuple(entry["shape"]), tuple(chunks))


def _damage(directory: Path, pieces: Iterable[Piece]) -> list[str]:
    """What is wrong with the first of them that is not what was written."""
    for piece in pieces:
        try:
            if not is_intact(directory, piece):
                return [damage_of(directory / piece.file)]
        except OSError as error:
            return [f"{directory / piece.file} cannot be read: {error}"]
    return []


def is_intact(directory: Path, piece: Piece) -> bool:
    """Raises OSError: it cannot be read."""
    return digest_of(directory / piece.file, piece.start, piece.size) == piece.digest


def damage_of(path: Path) -> str:
    return f"{path} is damaged: its digest is not what was written"


def _digest(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
