"""Writes checkpoints: every rank its files, under a temporary name; complete once rank 0 has renamed the directory.

A rank writes what it has and no other of its replicas writes. Nothing is communicated but names, outcomes and,
for weights that are stored in another order, the weights; in the background nothing at all.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_tp.checkpoint.chunks import Box, are_whole, box_of, is_written_here, local_of
from fsdp_tp.checkpoint.directory import complete_checkpoints, name_aside, split_number, was_checkpoint
from fsdp_tp.checkpoint.files import dtype_name, write_tensors
from fsdp_tp.checkpoint.manifest import Chunk, File, Manifest, Stored
from fsdp_tp.checkpoint.outcomes import Outcome, are_locks_seen, await_outcomes, remove_outcomes
from fsdp_tp.checkpoint.rank_0 import on_rank_0, require_success, to_rank_0
from fsdp_tp.checkpoint.reading import find_problems
from fsdp_tp.checkpoint.state import OPTIMIZER
from fsdp_tp.checkpoint.temporary import Temporary, remove, remove_abandoned
from fsdp_tp.checkpoint.values import json_copy

logger = logging.getLogger("fsdp_tp")

STALLED = 300.0
"""Seconds after which a save in the background gives up a rank that writes nothing more."""


@dataclass
class Content:
    """Of a checkpoint, on one rank."""

    extra: dict[str, Any]
    """Rank 0's counts."""
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

    def __init__(self, path: Path, thread: threading.Thread, errors: list[Exception], buffers: dict[str, Any]):
        self.path, self.buffers = path, buffers
        self._thread, self._errors, self._known = thread, errors, False

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
            require_success(f"checkpoint {self.path} was not written", self._errors[0] if self._errors else None)


def save_now(path: Path, content: Content, keep_last: int | None) -> None:
    """Every rank must call it; returns when the checkpoint is complete."""
    temporary = _begin(path, content)
    try:
        error, report = None, None
        try:
            report = _write(temporary.path, _rank(), content, _on_cpu(_own(content.tensors)))
        except Exception as caught:
            error = caught
        require_success(f"checkpoint {path} was not written", error)
        reports = [each for each in to_rank_0(report) if each is not None]
        on_rank_0(lambda: _complete(temporary, content, reports, keep_last))
    finally:
        temporary.close()


def save_in_background(path: Path, content: Content, keep_last: int | None, buffers: dict[str, Any]) -> Saving:
    """Every rank must call it; returns when the tensors are copied. ``buffers``: of an earlier save, to use again."""
    temporary, rank, size = _begin(path, content), _rank(), dist.get_world_size() if dist.is_initialized() else 1
    own_outcome, copies, error = Outcome(temporary.path, rank), {}, None
    try:
        try:
            own_outcome.open()
            copies = _copied(_own(content.tensors), buffers)
        except Exception as caught:
            error = caught
        # All copies come before all writing, which would slow them down.
        require_success(f"checkpoint {path} was not written", error)
        locks_seen = rank == 0 and are_locks_seen(temporary.path, size)
        if size > 1:
            dist.barrier()
    except BaseException:
        own_outcome.close()
        temporary.close()
        raise
    content.tensors = {name: _shape_only(tensor) for name, tensor in content.tensors.items()}
    errors: list[Exception] = []

    def work() -> None:
        try:
            try:
                report = _write(temporary.path, rank, content, copies)
            except Exception as error:
                own_outcome.write({"error": str(error)[:1000]})  # it has room for so many
                raise
            own_outcome.write({"report": _to_json(report)})
            own_outcome.close()
            if rank == 0:
                outcomes = await_outcomes(temporary.path, size, locks_seen=locks_seen, stalled=STALLED)
                for number, each in enumerate(outcomes):
                    if "error" in each:
                        raise OSError(f"rank {number}: {each['error']}")
                _complete(temporary, content, [_from_json(each["report"]) for each in outcomes], keep_last)
                logger.info("saved %s", path)
        except Exception as error:
            if rank == 0 or temporary.path.exists():  # else another has failed, and rank 0 has said so
                logger.error("checkpoint %s was not written: rank %s: %s", path, rank, error)
            errors.append(error)
        finally:
            own_outcome.close()
            temporary.close()

    # Not a daemon: a process that is done ends when its checkpoint is.
    thread = threading.Thread(target=work, name=f"save {path.name}", daemon=False)
    thread.start()
    return Saving(path, thread, errors, copies)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _begin(path: Path, content: Content) -> Temporary:
    """Every rank must call it."""
    temporary = Temporary(path)

    def check() -> None:
        json.dumps(content.values)  # fails now rather than after the tensors are written
        content.extra = json_copy(content.extra, "extra")
        if path.exists():
            raise _IsThereError
        if split_number(path)[1] < 0:
            logger.warning("%s has no number at its end: latest, load_latest and keep_last do not see it", path)

    try:
        try:
            temporary.open(check)
        except _IsThereError:
            _set_aside(path)
            temporary.open(check)
    except OSError as error:
        raise OSError(f"checkpoint {path} was not written: {error}") from error
    return temporary


class _IsThereError(Exception):
    """Something has the name of the new checkpoint."""


def _set_aside(path: Path) -> None:
    """A damaged checkpoint that a resume has passed over, and whose step comes again. Every rank must call it.

    Raises:
        ValueError: on every rank: it is something else.
    """
    problems = find_problems(path, verify=True) if on_rank_0(lambda: was_checkpoint(path)) else []
    if not problems:
        raise ValueError(f"checkpoint path {path} exists already; save to a new one or remove it")
    aside = on_rank_0(lambda: path.rename(name_aside(path)))
    if _rank() == 0:
        logger.warning("%s is damaged and now called %s: %s", path, aside.name, "; ".join(problems))


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


def _write(directory: Path, rank: int, content: Content, own: Mapping[str, tuple[Tensor, Box]]) -> Report:
    if rank == 0:
        remove_abandoned(directory.parent)
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


def _complete(temporary: Temporary, content: Content, reports: list[Report], keep_last: int | None) -> None:
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
        if not are_whole(stored.shape, [chunk.box for chunk in stored.chunks]):
            raise ValueError(
                f"the ranks do not have all of {name}, or some of it twice; a DTensor's mesh must be one of all ranks, "
                "or cut from one"
            )
    files = {name: file for report in reports for name, file in report.files.items()}
    values = {**content.values, "random": [report.random for report in reports]}
    remove_outcomes(temporary.path)
    Manifest(content.extra, content.layout, files, tensors, content.aliases, values).write(temporary.path)
    temporary.complete()
    if keep_last is not None:
        _remove_old(temporary.final, keep_last)


def _remove_old(newest: Path, keep: int) -> None:
    """Of the complete checkpoints that are named alike and come before ``newest`` all but the last ``keep - 1``. (Those
    with higher numbers are another run's, or damaged.)"""
    stem, number = split_number(newest)
    alike = [path for path in complete_checkpoints(newest.parent) if split_number(path)[0] == stem]
    for path in [path for path in alike if split_number(path)[1] < number][keep - 1 :]:
        try:
            remove(path)
        except OSError as error:  # the new one is complete all the same
            logger.warning("%s was not removed: %s", path, error)


def _to_json(report: Report) -> dict[str, Any]:
    chunks = {name: [chunk.to_json() for chunk in chunks] for name, chunks in report.chunks.items()}
    return {
        "files": {name: asdict(file) for name, file in report.files.items()},
        "chunks": chunks,
        "random": report.random,
    }


def _from_json(found: dict[str, Any]) -> Report:
    chunks = {name: [Chunk.from_json(each) for each in chunks] for name, chunks in found["chunks"].items()}
    return Report({name: File(**file) for name, file in found["files"].items()}, chunks, found["random"])
