"""Saves in the background, and saves that fail. If these fail, look in fsdp_tp/checkpoint/writing.py."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import logging.handlers
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_tp
from fsdp_tp import checkpoint
from fsdp_tp.checkpoint import writing
from tests import models
from tests.ranks import run


def _sharded():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 9))
    for unit in (*model, model):
        fsdp_tp.fully_shard(unit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _step(model, optimizer)
    return model, optimizer


def _step(model, optimizer):
    model(torch.ones(2, 7)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _weights(model):
    return {name: models.gather(value) for name, value in model.state_dict().items()}


def _writing(instead):
    """Replaces how files are written; returns what undoes that."""
    original = writing.write_tensors
    writing.write_tensors = lambda path, tensors: instead(original, path, tensors)
    return lambda: setattr(writing, "write_tensors", original)


def _slowly(original, path, tensors):
    time.sleep(0.3)
    return original(path, tensors)


def _go_on_training(directory):
    model, optimizer = _sharded()
    undo = _writing(_slowly)
    try:
        expected = [_weights(model)]
        first = checkpoint.async_save(directory / "step-1", model=model, optimizer=optimizer, extra={"step": 1})
        began = not first.is_done() and not (directory / "step-1").exists()
        _step(model, optimizer)
        expected.append(_weights(model))
        buffers = first.buffers
        second = checkpoint.async_save(directory / "step-2", model=model, optimizer=optimizer, extra={"step": 2})
        assert first.is_done(), "two at a time"
        assert (directory / "step-1").exists()
        used_again = all(buffers[name][0] is second.buffers[name][0] for name in buffers)
        _step(model, optimizer)
        second.wait()
        assert (directory / "step-2").exists()
    finally:
        undo()
    for step, weights in enumerate(expected, 1):
        assert checkpoint.load(directory / f"step-{step}", model=model, optimizer=optimizer) == {"step": step}
        assert all(torch.equal(weights[name], value) for name, value in _weights(model).items())
    return began, used_again


def test_training_goes_on_and_the_checkpoint_has_the_values_of_the_call(tmp_path):
    assert run(3, _go_on_training, tmp_path) == [(True, True)] * 3
    assert checkpoint.latest(tmp_path) == tmp_path / "step-2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


def _full_on_rank_1(original, path, tensors):
    if dist.get_rank() == 1:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return original(path, tensors)


def _fails(directory, save):
    model, optimizer = _sharded()
    checkpoint.save(directory / "step-1", model=model, optimizer=optimizer)
    undo = _writing(_full_on_rank_1)
    said = r"checkpoint .*step-2 was not written: rank [01]: .*No space left on device"
    try:
        if save is checkpoint.async_save:
            save(directory / "step-2", model=model, optimizer=optimizer, keep_last=1)
            with pytest.raises(OSError, match=said):
                save(directory / "step-3", model=model, optimizer=optimizer)
        else:
            with pytest.raises(OSError, match=said):
                save(directory / "step-2", model=model, optimizer=optimizer, keep_last=1)
    finally:
        undo()
    dist.barrier()
    assert sorted(path.name for path in directory.iterdir()) == ["step-1"]
    dist.barrier()
    save(directory / "step-2", model=model, optimizer=optimizer, keep_last=1)
    checkpoint.wait()
    assert checkpoint.latest(directory) == directory / "step-2"


@pytest.mark.parametrize("save", [checkpoint.save, checkpoint.async_save])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_what_was_saved(tmp_path, save):
    run(2, _fails, tmp_path, save)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2"]


def _ends_on_rank_1(original, path, tensors):
    if dist.get_rank() == 1:
        raise SystemExit  # the thread is gone, and what it held; nothing is said
    return original(path, tensors)


def _one_ends(directory):
    model, optimizer = _sharded()
    undo = _writing(_ends_on_rank_1)
    try:
        saving = checkpoint.async_save(directory / "step-1", model=model, optimizer=optimizer)
        with pytest.raises(OSError, match="step-1 was not written: rank 0: rank 1 has ended before"):
            saving.wait()
    finally:
        undo()


def test_a_rank_that_ends_during_a_save_is_not_waited_for(tmp_path):
    """Else it would be for minutes, and the process of rank 0 could not end."""
    began = time.monotonic()
    run(2, _one_ends, tmp_path)
    assert time.monotonic() - began < writing.STALLED / 2
    assert list(tmp_path.iterdir()) == []


def _cannot_copy(directory):
    model, optimizer = _sharded()
    original = writing._copied
    if dist.get_rank() == 1:
        writing._copied = lambda *arguments: (_ for _ in ()).throw(MemoryError("no room for a copy"))
    try:
        with pytest.raises(OSError, match="step-1 was not written: rank 1: no room for a copy"):
            checkpoint.async_save(directory / "step-1", model=model, optimizer=optimizer)
    finally:
        writing._copied = original
    checkpoint.save(directory / "step-1", model=model, optimizer=optimizer)


def test_a_rank_that_cannot_copy_its_part_fails_on_all(tmp_path):
    run(2, _cannot_copy, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def _nobody_asks(directory):
    model, optimizer = _sharded()
    undo, messages = _writing(_full_on_rank_1), logging.handlers.BufferingHandler(100)
    logging.getLogger("fsdp_tp").addHandler(messages)
    try:
        checkpoint.async_save(directory / "step-1", model=model, optimizer=optimizer)._thread.join()
    finally:
        undo()
        checkpoint._last = None
    return [record.getMessage() for record in messages.buffer if record.levelno == logging.ERROR]


def test_a_failure_is_told_where_nobody_asks(tmp_path):
    """Else a process whose last save has failed would end as if nothing was wrong."""
    for messages in run(2, _nobody_asks, tmp_path):
        assert any("No space left" in message for message in messages), messages


def _group_ends(directory):
    model, optimizer = _sharded()
    undo = _writing(_slowly)
    saving = checkpoint.async_save(directory / "step-1", model=model, optimizer=optimizer)
    dist.destroy_process_group()
    saving._thread.join()
    undo()
    checkpoint._last = None


def test_the_process_group_may_end_before_the_save(tmp_path):
    run(2, _group_ends, tmp_path)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"


def _locks(directory, fails):
    model, optimizer = _sharded()
    original = fcntl.flock
    fcntl.flock = lambda file, how: None if fails(file) else original(file, how)
    try:
        for step in (1, 2):
            checkpoint.async_save(directory / f"step-{step}", model=model, optimizer=optimizer)
        checkpoint.wait()
    finally:
        fcntl.flock = original


def _unknown(file):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def _of_one_host(file):
    """As if every rank had a host of its own, and its file system locked for that only."""
    return str(file.name).endswith(".outcome")


@pytest.mark.parametrize("fails", [_unknown, _of_one_host])
def test_file_systems_without_locks_between_hosts(tmp_path, fails):
    run(2, _locks, tmp_path, fails)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-2"


def _directory_goes(directory):
    model, optimizer = _sharded()
    checkpoint.async_save(directory / "step-1", model=model, optimizer=optimizer)
    checkpoint.wait()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory)
    dist.barrier()
    undo = _writing(_slowly)
    try:
        checkpoint.async_save(directory / "step-2", model=model, optimizer=optimizer)
        if dist.get_rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
        with pytest.raises(OSError, match="step-2 was not written: rank"):
            checkpoint.wait()
    finally:
        undo()
    checkpoint.save(directory / "step-3", model=model, optimizer=optimizer)


def test_a_directory_that_is_deleted_under_the_run(tmp_path):
    run(2, _directory_goes, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-3"]


_PREPARE = """
import sys, time, torch
from pathlib import Path
from fsdp_tp import checkpoint
from fsdp_tp.checkpoint import writing
directory = Path(sys.argv[1])
model = torch.nn.Linear(100, 100)
write = writing.write_tensors
def slowly(path, tensors):
    Path(sys.argv[2]).touch()
    time.sleep(float(sys.argv[3]))
    return write(path, tensors)
writing.write_tensors = slowly
"""


def _python(code, *arguments):
    return subprocess.Popen([sys.executable, "-c", _PREPARE + code, *map(str, arguments)], stderr=subprocess.PIPE)


def _wait_for(path: Path, process):
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def test_a_process_that_ends_waits_for_its_checkpoint(tmp_path):
    process = _python("checkpoint.async_save(directory / 'step-1', model=model)", tmp_path / "run", tmp_path / "at", 1)
    assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 0
    assert checkpoint.latest(tmp_path / "run") == tmp_path / "run/step-1"


@pytest.mark.usefixtures("one_process")
def test_what_a_killed_process_left_is_no_checkpoint_and_goes_with_the_next_save(tmp_path):
    directory = tmp_path / "run"
    process = _python("checkpoint.save(directory / 'step-1', model=model)", directory, tmp_path / "at", 60)
    try:
        _wait_for(tmp_path / "at", process)
        (left,) = directory.iterdir()
        model = nn.Linear(100, 100)
        checkpoint.save(directory / "step-2", model=model)
        assert left.exists(), "it belongs to a process that is alive"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert checkpoint.latest(directory) == directory / "step-2"
    checkpoint.save(directory / "step-3", model=model)
    assert sorted(path.name for path in directory.iterdir()) == ["step-2", "step-3"]


def test_of_two_jobs_that_save_under_one_name_one_is_told(tmp_path):
    code = "checkpoint.save(directory / 'step-1', model=model)"
    jobs = [_python(code, tmp_path / "run", tmp_path / f"at-{each}", 1) for each in range(2)]
    errors = [job.communicate(timeout=60)[1].decode() for job in jobs]
    assert sorted(job.returncode for job in jobs) == [0, 1]
    assert any("step-1 exists already" in error for error in errors), errors
    assert checkpoint.latest(tmp_path / "run") == tmp_path / "run/step-1"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-1"]


@pytest.fixture
def small_disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", path], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


@pytest.mark.usefixtures("one_process")
def test_a_full_disk(small_disk):
    model, larger = nn.Linear(100, 100), nn.Linear(1000, 1000)
    checkpoint.save(small_disk / "step-1", model=model)
    with pytest.raises(OSError, match="step-2 was not written.*No space left on device"):
        checkpoint.save(small_disk / "step-2", model=larger)
    checkpoint.async_save(small_disk / "step-3", model=larger)
    with pytest.raises(OSError, match="step-3 was not written.*No space left on device"):
        checkpoint.wait()
    with (small_disk / "rest").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:  # until nothing fits in any more
            file.write(bytes(1024))
    with pytest.raises(OSError, match="No space left on device"):
        checkpoint.save(small_disk / "step-3", model=model)
    (small_disk / "rest").unlink()
    assert [path.name for path in small_disk.iterdir()] == ["step-1"]
    checkpoint.save(small_disk / "step-4", model=model, keep_last=1)
    assert checkpoint.latest(small_disk) == small_disk / "step-4"


@pytest.mark.usefixtures("one_process")
def test_a_path_that_cannot_be_made(tmp_path):
    """As a directory that is read-only, which it is not for root."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        checkpoint.save(tmp_path / "file/step-1", model=nn.Linear(2, 2))
    assert (tmp_path / "file").read_text() == ""
