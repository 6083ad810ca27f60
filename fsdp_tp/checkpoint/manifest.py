"""What a checkpoint's directory holds: ``manifest.json``, written last.

Nothing of a checkpoint is executed: the manifest is JSON, tensors are safetensors, and a manifest names files of its
own directory only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

import xxhash

from fsdp_tp.checkpoint.chunks import Box
from fsdp_tp.checkpoint.files import DTYPES, digest_of, write_text

MANIFEST = "manifest.json"
_VERSION = 1


class Damaged(ValueError):
    """A checkpoint is not what was written; the message names the file."""


@dataclass(frozen=True)
class File:
    size: int
    """In bytes."""
    digest: str
    """xxh3, 128 bits."""


@dataclass(frozen=True)
class Chunk:
    file: str
    start: int
    """Its first byte in the file."""
    box: Box

    @staticmethod
    def from_json(entry: dict[str, Any]) -> Chunk:
        box = Box(tuple(entry["box"]["offset"]), tuple(entry["box"]["shape"]))
        return Chunk(entry["file"], entry["start"], box)


@dataclass(frozen=True)
class Stored:
    """A tensor: global, in the names and order of one process."""

    dtype: str
    """As safetensors says it."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        return DTYPES[self.dtype].itemsize * Box((), self.shape).numel


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
    """What is no tensor: the optimizer's groups, the scheduler, random states."""

    def write(self, directory: Path) -> None:
        body = json.loads(json.dumps(asdict(self)))  # as it will be read: keys are strings then
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
        except (ValueError, KeyError, AttributeError) as error:
            raise Damaged(f"{path} is damaged: {error}") from None
        if version != _VERSION:
            raise Damaged(f"{path} has version {version}; this fsdp_tp reads {_VERSION}")
        if digest != _digest(body):
            raise Damaged(f"{path} is damaged: its digest is not that of its content")
        for name in body["files"]:
            if PurePath(name).name != name or name in (".", ".."):
                raise Damaged(f"{path} names the file {name!r}, which is not one of its directory")
        manifest = Manifest(
            body["extra"],
            body["layout"],
            {name: File(**file) for name, file in body["files"].items()},
            {name: _stored(entry) for name, entry in body["tensors"].items()},
            body["aliases"],
            body["values"],
        )
        for stored in manifest.tensors.values():
            for chunk in stored.chunks:
                if chunk.file not in manifest.files or stored.dtype not in DTYPES:
                    raise Damaged(f"{path} is damaged: a tensor is {stored.dtype}, in {chunk.file}")
        return manifest

    def problems(self, directory: Path, files: Iterable[str]) -> list[str]:
        """What is wrong with some of its files; all their bytes are read."""
        found = []
        for name in files:
            path, file = directory / name, self.files[name]
            try:
                size = path.stat().st_size
                if size != file.size:
                    found.append(f"{path} has {size:,} bytes and had {file.size:,}")
                elif digest_of(path) != file.digest:
                    found.append(f"{path} is damaged: its digest is not what was written")
            except OSError as error:
                found.append(f"{path} cannot be read: {error}")
        return found

    def find(self, name: str) -> Stored | None:
        return self.tensors.get(self.aliases.get(name, name))


def _stored(entry: dict[str, Any]) -> Stored:
    chunks = (Chunk.from_json(chunk) for chunk in entry["chunks"])
    return Stored(entry["dtype"], tuple(entry["shape"]), tuple(chunks))


def _digest(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
