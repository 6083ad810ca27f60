"""Text files to packed sequences, and to each data rank its slice of every global batch."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

_ROW_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_END_OF_TEXT = 256


class Tokenizer(Protocol):
    """Turns a document into token ids, with whatever marks its end."""

    name: str
    """Differs between tokenizers that encode differently."""
    size: int

    def encode(self, text: str) -> list[int]: ...


class ByteTokenizer:
    """Every byte of the UTF-8 text is a token; id 256 ends a document."""

    name = "bytes"
    size = 257

    def encode(self, text: str) -> list[int]:
        return [*text.encode("utf-8", errors="surrogatepass"), _END_OF_TEXT]


class HuggingFaceTokenizer:
    """A tokenizer directory as ``save_pretrained`` writes it."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"tokenizer={directory} cannot be loaded: {error}") from None
        self.name = _digest_of_files(directory)
        self.size = len(self._tokenizer)
        self._end = [] if self._tokenizer.eos_token_id is None else [self._tokenizer.eos_token_id]

    def encode(self, text: str) -> list[int]:
        return [*self._tokenizer.encode(text, add_special_tokens=False), *self._end]


def _digest_of_files(directory: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(file for file in directory.iterdir() if file.is_file()):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def find_files(data: Sequence[Path]) -> list[Path]:
    """The files behind ``data`` (files, or directories searched in full), in a fixed order.

    Raises:
        ValueError: a path that does not exist, or no file at all.
    """
    if not data:
        return _standard_library()
    files: list[Path] = []
    for path in data:
        if path.is_dir():
            files += sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        elif path.is_file():
            files.append(path)
        else:
            raise ValueError(f"data={path} does not exist")
    if not files:
        raise ValueError(f"data={', '.join(map(str, data))} contains no files")
    return files


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(file for file in root.rglob("*.py") if "site-packages" not in file.parts)


def read_documents(file: Path, text_column: str) -> Iterator[str]:
    """The documents of one file: its rows' texts, or for any other suffix the whole file.

    Raises:
        ValueError: unreadable rows, or rows without ``text_column``.
    """
    kind = _ROW_FORMATS.get(file.suffix)
    if kind is None:
        yield file.read_text(encoding="utf-8", errors="replace")
        return
    if file.stat().st_size == 0:
        return
    import datasets

    try:
        for row in datasets.load_dataset(kind, data_files=str(file), split="train", streaming=True):
            text = row.get(text_column)
            if not isinstance(text, str):
                raise ValueError(f"has a row without text in text_column={text_column!r}; it has {', '.join(row)}")
            yield text
    except Exception as error:  # the readers raise whatever their format library does
        raise ValueError(f"data file {file} cannot be read: {error}") from error


def write_tokens(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    cache: Path,
    *,
    text_column: str,
    progress: Callable[[Sequence[Path]], Iterable[Path]] = iter,
) -> Path:
    """Tokenises ``files`` into one flat file in the directory ``cache`` and returns it; a file
    that exists from an earlier run over the same input is used again.

    ``progress`` wraps the walk over the files.
    """
    stamp = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    key = hashlib.sha256(json.dumps([stamp, tokenizer.name, tokenizer.size, text_column]).encode()).hexdigest()[:16]
    dtype = np.uint16 if tokenizer.size <= 2**16 else np.uint32
    path = cache / f"tokens-{key}.{np.dtype(dtype).name}"
    if path.exists():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as output:
            for file in progress(files):
                for text in read_documents(file, text_column):
                    if text:
                        np.asarray(tokenizer.encode(text), dtype=dtype).tofile(output)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


class PackedSequences(Dataset[Tensor]):
    """Consecutive windows of a token file: item i is ``(length + 1,)`` int64, inputs and targets
    shifted by one; neighbours share one token.

    Raises:
        ValueError: the file holds no token, or fewer than one sequence needs.
    """

    def __init__(self, path: Path, length: int) -> None:
        dtype = np.dtype(path.suffix[1:])
        count = path.stat().st_size // dtype.itemsize
        if count == 0:
            raise ValueError("the data files contain no text")
        if count < length + 1:
            raise ValueError(
                f"the data files hold {count} tokens, fewer than the {length + 1} of one sequence; "
                f"sequence_length={length} can be at most {count - 1}"
            )
        self._tokens = np.memmap(path, dtype=dtype, mode="r")
        self._length = length
        self._count = (count - 1) // length

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._length
        return torch.from_numpy(self._tokens[start : start + self._length + 1].astype(np.int64))


class StepSampler(Sampler[list[int]]):
    """For each optimizer step, without end, the sequences that one data rank computes.

    A step takes the next ``global_batch`` positions of one endless order (a new permutation each
    epoch, from ``seed``), whatever the layout: data rank r of n takes the r-th of n equal parts.
    The state is the position in that order, so a run may resume on another layout, or with
    another batch size.
    """

    def __init__(self, sequences: int, global_batch: int, *, data_rank: int, data_size: int, seed: int) -> None:
        self._sequences = sequences
        self._global_batch = global_batch
        self._share = global_batch // data_size
        self._first = data_rank * self._share
        self._seed = seed
        self._position = 0
        self._epoch = -1
        self._order = torch.empty(0)

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            start = self._position + self._first
            self._position += self._global_batch
            yield [self._sequence_at(position) for position in range(start, start + self._share)]

    def _sequence_at(self, position: int) -> int:
        epoch, index = divmod(position, self._sequences)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(self._sequences, generator=generator)
        return int(self._order[index])

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"]
