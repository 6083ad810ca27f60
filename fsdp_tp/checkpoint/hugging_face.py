"""Hugging Face checkpoints, read straight into the parts of all ranks, and written from them."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_tp.checkpoint.files import sync, write_tensors
from fsdp_tp.checkpoint.full import Entry, entries_of, match_entries
from fsdp_tp.checkpoint.gather import gather_to_rank_0
from fsdp_tp.checkpoint.mapped import map_safetensors
from fsdp_tp.checkpoint.names import Experts, Storing, find_tensors, is_hugging_face, names_to_store, plain_class
from fsdp_tp.checkpoint.rank_0 import on_rank_0, require_success
from fsdp_tp.checkpoint.temporary import Temporary, remove_abandoned
from fsdp_tp.layers.canonical import own_part_of, stored_part
from fsdp_tp.layers.parameter import own_slices

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FORMAT = {"format": "pt"}  # from_pretrained insists on it


@torch.no_grad()
def load_hf(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Reads a Hugging Face checkpoint into ``model``, in place; every rank must call it.

    Every rank maps the files and copies its parts out of them: no tensor is communicated. Beside its parts a rank
    needs memory for one slice of a tensor, in the dtype of the file, where weights are stored in another order or
    go to another device; for one expert more where files hold them one by one; and otherwise for none.
    Names are matched as ``from_pretrained`` does: with or without the prefix of the base model, with the renamings
    and ignored buffers of older checkpoints, and with experts merged. Of tied parameters one name is enough.

    Args:
        model: with memory for its parameters, in any layout.
        directory: has ``model.safetensors``, or ``model.safetensors.index.json`` and the files that it lists, for
            every rank to see. Any dtype: the model keeps its own.

    Raises:
        ValueError: on every rank, and nothing is loaded: there is no such file, one is damaged, cut off or outside
            of ``directory``; tensors are missing, unexpected, of another shape, or tied in ``model`` and different
            in the files (all are listed); transformers would convert some in a way that is more than joining
            experts; parameters of ``model`` are on the meta device.
        OSError: a file cannot be read, on any rank.
    """
    directory = Path(directory)
    entries = entries_of(model)
    tensors, error = {}, None
    try:
        tensors = map_hf(directory)
    except (OSError, ValueError) as caught:
        error = caught
    require_success(f"{directory} cannot be loaded", error)
    places = on_rank_0(lambda: _match(model, entries, tensors, directory))
    for entry, place in zip(entries, places, strict=True):
        _load_one(entry, place, tensors)


def map_hf(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint; their bytes are read when they are used."""
    if (directory / _SINGLE).is_file():
        return map_safetensors(directory / _SINGLE)
    index = directory / _INDEX
    if not index.is_file():
        raise ValueError(f"neither {_SINGLE} nor {_INDEX} is in {directory}; other formats are not read")
    try:
        weight_map = dict(json.loads(index.read_text())["weight_map"])
        files = sorted(set(weight_map.values()))
        # Not resolved: a cache of downloads holds links to files elsewhere.
        outside = [name for name in files if not name or PurePath(name).is_absolute() or ".." in PurePath(name).parts]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{index} has no weight_map of names to files: {error!r}") from None
    if outside:
        raise ValueError(f"{index} lists {', '.join(map(repr, outside))}: its files must be in its own directory")
    if absent := [name for name in files if not (directory / name).is_file()]:
        raise ValueError(f"{index} lists {', '.join(absent)}, not in {directory}")
    tensors: dict[str, Tensor] = {}
    for name in files:
        found = map_safetensors(directory / name)
        if twice := sorted(found.keys() & tensors.keys()):
            raise ValueError(f"{', '.join(twice[:5])} in {directory / name} and in another file")
        if lost := sorted(key for key, file in weight_map.items() if file == name and key not in found):
            raise ValueError(f"{', '.join(lost)} should be in {directory / name}, as {_INDEX} says, and is not")
        tensors |= found
    return tensors


def _match(
    model: nn.Module, entries: list[Entry], tensors: Mapping[str, Tensor], directory: Path
) -> list[str | Experts]:
    """Where in the files each entry is."""
    found = find_tensors(model, {name for entry in entries for name in entry.names}, tensors)
    shown = {name: place if isinstance(place, Experts) else tensors[place] for name, place in found.items()}
    return [found[name] for name in match_entries(entries, shown, f"the checkpoint in {directory}")]


def _load_one(entry: Entry, place: str | Experts, tensors: Mapping[str, Tensor]) -> None:
    if isinstance(place, str):
        entry.local.copy_(own_part_of(tensors[place], entry.tensor, entry.arrangement))
        return
    experts, *inside = own_slices(entry.tensor)
    arrangement = entry.arrangement
    if arrangement is not None:
        split, dim = arrangement
        assert dim > 0, "experts are not split by their number"
        arrangement = (split, dim - 1)
    for local, keys in zip(entry.local, place.keys[experts], strict=True):
        parts = [tensors[key] for key in keys]
        local.copy_(stored_part(parts[0] if len(parts) == 1 else torch.cat(parts, place.dim), inside, arrangement))


@torch.no_grad()
def save_hf(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5_000_000_000,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a checkpoint that ``from_pretrained`` loads; every rank must call it.

    Rank 0 receives one tensor at a time, part by part, and writes files: beside its parts it needs memory for one
    file and one tensor (two, of experts that files hold one by one), every other rank for a copy of one part.
    What is written is ``model.safetensors``, or several files and ``model.safetensors.index.json``, and for a
    Hugging Face model ``config.json`` and ``generation_config.json``; with the shapes and names that
    ``save_pretrained`` has, tied parameters under one name. The directory is written under another name and renamed
    when it is complete and on the disk.

    Args:
        model: in any layout.
        directory: new or empty.
        max_shard_bytes: of one file; a tensor that is larger has its own.
        dtype: of the floating-point tensors in the files; None: the model's.

    Raises:
        ValueError: on every rank: ``directory`` exists and is not an empty directory; an argument is not legal;
            parameters of ``model`` are on the meta device.
        OSError: on every rank: it cannot be written. Nothing is left.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} must be at least 1")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype} must be None or a floating-point type")
    final = Path(directory)
    entries = entries_of(model)

    def prepare() -> None:
        if final.exists() and not (final.is_dir() and not any(final.iterdir())):
            raise ValueError(f"directory={final} exists and is not empty; save to a new one or remove it")
        if final.parent.is_dir():
            remove_abandoned(final.parent)

    on_rank_0(prepare)
    temporary = Temporary(final)
    try:
        files = _Files(temporary.open(), max_shard_bytes)
        error = _write_tensors(model, entries, files, dtype)

        def complete() -> None:
            try:
                if error is not None:
                    raise error
                files.complete()
                _write_configs(model, temporary.path, dtype)
                for path in temporary.path.iterdir():
                    sync(path)
                temporary.complete()
            except Exception as caught:
                raise OSError(f"{final} cannot be written: {caught}") from None

        on_rank_0(complete)
    finally:
        temporary.close()


def _write_tensors(
    model: nn.Module, entries: list[Entry], files: _Files, dtype: torch.dtype | None
) -> Exception | None:
    """Rank 0 writes what it receives; returns what has gone wrong there."""
    storing, error = Storing(model), None
    for entry in entries:
        for name in names_to_store(model, entry.names):
            whole = gather_to_rank_0(entry)
            if whole is None or error is not None:
                continue
            try:
                if dtype is not None and whole.is_floating_point():
                    whole = whole.to(dtype)
                for stored, tensor in storing.convert(name, whole).items():
                    files.add(stored, tensor)
            except Exception as caught:  # raised when nobody waits for the next tensor
                error = caught
    return error


class _Files:
    """The safetensors files of one checkpoint, written one after another."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._waiting: dict[str, Tensor] = {}
        self._names: list[list[str]] = []
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        size = sum(each.nbytes for each in self._waiting.values())
        if self._waiting and size + tensor.nbytes > self._max_bytes:
            self._write()
        self._waiting[name] = tensor.contiguous()

    def complete(self) -> None:
        """Writes what is left, and gives all files their names."""
        self._write()
        count = len(self._names)
        if count == 1:
            self._path(0).rename(self._directory / _SINGLE)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._names):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._path(number).rename(self._directory / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self._directory / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _write(self) -> None:
        write_tensors(self._path(len(self._names)), self._waiting, metadata=_FORMAT)
        self._total += sum(each.nbytes for each in self._waiting.values())
        self._names.append(list(self._waiting))
        self._waiting = {}

    def _path(self, number: int) -> Path:
        return self._directory / f"{number}.safetensors"  # how many there will be is not known yet


def _write_configs(model: Any, directory: Path, dtype: torch.dtype | None) -> None:
    if not is_hugging_face(model):
        return
    cls: Any = plain_class(model)
    config = copy.deepcopy(model.config)
    config.dtype = dtype or model.dtype
    config.architectures = [cls.__name__]
    config.save_pretrained(directory)
    if cls.can_generate():
        model.generation_config.save_pretrained(directory)
