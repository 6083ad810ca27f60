"""Writes checkpoints: every rank its files, under a temporary name; complete once rank 0 has renamed the directory.

A rank writes what it has and no other of its replicas writes. Nothing is communicated but names, outcomes and,
for weights that are stored in another order, the weights. In the background nothing is communicated at all: ranks leave
a report beside their files, and rank 0 looks for those; and for a lock, which a rank that dies lets go.
"""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_tp.checkpoint.alive import Alive
from fsdp_tp.checkpoint.chunks import Box, box_of, is_written_here, local_of
from fsdp_tp.checkpoint.files import bytes_in, dtype_name, sync, write_tensors, write_text
from fsdp_tp.checkpoint.manifest import Chunk, File, Manifest, Stored
from fsdp_tp.checkpoint.rank_0 import from_all_ranks, on_rank_0, require_success
from fsdp_tp.checkpoint.reading import complete_checkpoints
from fsdp_tp.checkpoint.state import OPTIMIZER

logger = logging.getLogger("fsdp_tp")

STALLED = 300.0
"""Seconds after which a save in the background gives up a rank that writes nothing more."""
_LOCK = ".lock"


@dataclass
class Content:
    """Of a checkpoint, on one rank."""

    extra: dict[str, Any]
    layout: str
    tensors: dict[str, Tensor]
    """The same names on all ranks."""
    aliases: dict[str, str]
    values: dict[str, Any]
    random: str
    """This rank's."""


@dataclass
class Report:
    """What one rank wrote."""

    files: dict[str, File]
    chunks: dict[str, list[Chunk]]
    random: str


class Saving:
    """A save that was begun; every rank has its own and calls its methods together with the others."""

    def __init__(self, path: Path, thread: threading.Thread, outcome: list[Exception], buffers: dict[str, Any]):
        self.path, self.buffers = path, buffers
        self._thread, self._outcome, self._known = thread, outcome, False

    def is_done(self) -> bool:
        """Whether this rank has nothing left to do. (Others may.)"""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until the checkpoint is complete; every rank must call it.

        Raises:
            OSError, ValueError: on every rank, once: it could not be written. Earlier checkpoints are as they were.
        """
        self._thread.join()
        if not self._known:
            self._known = True
            require_success(f"checkpoint {self.path} was not written", self._outcome[0] if self._outcome else None)


def save_now(path: Path, content: Content, keep_last: int | None) -> None:
    """Every rank must call it; returns when the checkpoint is complete."""
    with _Temporary(path, content) as temporary:
        error, report = None, None
        try:
            report = _write(temporary.path, content, _on_cpu(_own(content.tensors)))
        except Exception as caught:
            error = caught
        require_success(f"checkpoint {path} was not written", error)
        reports = [each for each in from_all_ranks(report) if each is not None]
        on_rank_0(lambda: _complete(temporary.path, path, content, reports, keep_last))


def save_in_background(path: Path, content: Content, keep_last: int | None, buffers: dict[str, Any]) -> Saving:
    """Every rank must call it; returns when the tensors are copied. ``buffers``: of an earlier save, to use again."""
    temporary = _Temporary(path, content)
    temporary.__enter__()
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    alive, copies, error = Alive(temporary.path, rank), {}, None
    try:
        try:
            alive.hold()
            copies = _copied(_own(content.tensors), buffers)
        except Exception as caught:
            error = caught
        # All copies come before all writing, which would slow them down.
        require_success(f"checkpoint {path} was not written", error)
    except BaseException:
        alive.close()
        temporary.__exit__()
        raise
    content.tensors = {name: _shape_only(tensor) for name, tensor in content.tensors.items()}
    outcome: list[Exception] = []

    def work() -> None:
        try:
            try:
                report = _write(temporary.path, content, copies)
            except Exception as error:
                write_text(temporary.path / f"{rank}.failed", str(error))
                raise
            write_text(temporary.path / f"{rank}.report", _to_json(report))
            if rank == 0:
                _complete(temporary.path, path, content, _await_reports(temporary.path, size), keep_last)
                logger.info("saved %s", path)
        except Exception as error:
            outcome.append(error)
        finally:
            alive.close()
            if rank == 0:
                temporary.__exit__()

    # Not a daemon: a process that is done ends when its checkpoint is.
    thread = threading.Thread(target=work, name=f"save {path.name}", daemon=False)
    thread.start()
    return Saving(path, thread, outcome, copies)


class _Temporary:
    """A new directory beside ``path``, the same on all ranks; what is left of it at the end goes. Rank 0 holds a lock
    in it, so that whoever finds one that a killed job has left can tell."""

    def __init__(self, path: Path, content: Content) -> None:
        self._final, self._content = path, content
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> _Temporary:
        self.path = Path(on_rank_0(self._make))
        return self

    def _make(self) -> str:
        json.dumps([self._content.extra, self._content.values])  # fails now rather than after the tensors are written
        if self._final.exists():
            raise ValueError(f"checkpoint path {self._final} exists already; save to a new one or remove it")
        self._final.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(self._final.parent)
        path = self._final.with_name(f".{self._final.name}.{uuid.uuid4().hex[:8]}.incomplete")
        path.mkdir()
        self._lock = (path / _LOCK).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return str(path)

    def __exit__(self, *exception: Any) -> None:
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()


def _remove_abandoned(directory: Path) -> None:
    for path in directory.glob(".*[0-9].removed"):
        shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob(".*.incomplete"):
        try:
            with (path / _LOCK).open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # somebody is at work there, or has just finished


def _own(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Box]]:
    """What this rank writes: its part of some tensors, none of them empty."""
    own = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        if is_written_here(tensor, index) and (box := box_of(tensor)).numel:
            own[name] = (local_of(tensor), box)
    return own


def _on_cpu(own: Mapping[str, tuple[Tensor, Box]]) -> dict[str, tuple[Tensor, Box]]:
    return {name: (local.cpu().contiguous(), box) for name, (local, box) in own.items()}


def _copied(own: Mapping[str, tuple[Tensor, Box]], buffers: Mapping[str, Any]) -> dict[str, Any]:
    """In memory of the host that nobody else writes; pinned, where that speeds the copy up."""
    copies = {}
    for name, (local, box) in own.items():
        buffer = buffers[name][0] if name in buffers else None
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.device.type == "cuda")
        copies[name] = (buffer.copy_(local, non_blocking=True), box)
    if any(local.device.type != "cpu" for local, _ in own.values()):
        torch.accelerator.synchronize()
    return copies


def _shape_only(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _write(directory: Path, content: Content, own: Mapping[str, tuple[Tensor, Box]]) -> Report:
    rank = dist.get_rank() if dist.is_initialized() else 0
    report = Report({}, {}, content.random)
    for kind, is_ours in (("model", False), ("optimizer", True)):
        tensors = {name: tensor for name, (tensor, _) in own.items() if name.startswith(OPTIMIZER) == is_ours}
        if not tensors:
            continue
        file = f"{kind}-{rank:05}.safetensors"
        written = write_tensors(directory / file, tensors)
        report.files[file] = File(written.size, written.header_size, written.header_digest)
        for name, start in written.starts.items():
            report.chunks[name] = [Chunk(file, start, own[name][1], written.digests[name])]
    return report


def _complete(temporary: Path, final: Path, content: Content, reports: list[Report], keep_last: int | None) -> None:
    """Rank 0's part: the manifest, and the name by which the checkpoint is found."""
    tensors = {
        name: Stored(
            dtype_name(name, tensor.dtype),
            tuple(tensor.shape),
            tuple(chunk for report in reports for chunk in report.chunks.get(name, [])),
        )
        for name, tensor in content.tensors.items()
    }
    for name, stored in tensors.items():
        if sum(chunk.box.numel for chunk in stored.chunks) != Box((), stored.shape).numel:
            raise ValueError(f"the ranks do not have all of {name}, or some of it twice")
    files = {name: file for report in reports for name, file in report.files.items()}
    values = {**content.values, "random": [report.random for report in reports]}
    for path in (*temporary.glob("*.report"), *temporary.glob("*.alive"), temporary / _LOCK):
        path.unlink(missing_ok=True)
    Manifest(content.extra, content.layout, files, tensors, content.aliases, values).write(temporary)
    sync(temporary)
    try:
        temporary.rename(final)
    except OSError as error:
        if not final.exists():
            raise
        raise ValueError(f"{final} exists already: somebody else has saved there meanwhile") from error
    sync(final.parent)
    if keep_last is not None:
        _remove_old(final.parent, final, keep_last)


def _remove_old(directory: Path, newest: Path, keep: int) -> None:
    """All but the last ``keep`` complete checkpoints that are named alike."""
    stem = newest.name.rstrip("0123456789")
    alike = [path for path in complete_checkpoints(directory) if path.name.rstrip("0123456789") == stem]
    for path in alike[keep:]:
        going = path.with_name(f".{path.name}.removed")
        path.rename(going)
        shutil.rmtree(going, ignore_errors=True)


def _await_reports(directory: Path, size: int) -> list[Report]:
    """Of all ranks, in their order, as soon as all are there.

    Raises:
        OSError: one has failed or is gone, or no file has grown for :data:`STALLED` seconds.
    """
    before, since = -1, time.monotonic()
    while True:
        if failed := sorted(directory.glob("*.failed")):
            raise OSError(f"rank {failed[0].stem}: {failed[0].read_text()}")
        missing = [rank for rank in range(size) if not (directory / f"{rank}.report").exists()]
        if not missing:
            return [_from_json((directory / f"{rank}.report").read_text()) for rank in range(size)]
        if gone := [rank for rank in missing if Alive.is_gone(directory, rank)]:
            raise OSError(f"rank {gone[0]} has ended before its part was written")
        written = bytes_in(directory)
        if written != before:
            before, since = written, time.monotonic()
        elif time.monotonic() - since > STALLED:
            raise OSError(f"rank {missing[0]} has written nothing for {STALLED:.0f} s")
        time.sleep(0.02)


def _to_json(report: Report) -> str:
    return json.dumps(asdict(report))


def _from_json(text: str) -> Report:
    found = json.loads(text)
    chunks = {name: [Chunk.from_json(each) for each in chunks] for name, chunks in found["chunks"].items()}
    return Report({name: File(**file) for name, file in found["files"].items()}, chunks, found["random"])
