"""Trainings whose output directory fails them, or that meet another job there, end as if nothing had been. If these
fail, look in fsdp_tp/train/saves.py, fsdp_tp/train/lock.py and fsdp_tp/checkpoint/writing.py."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.trainings import Training, faults, ranks_of, wait_for

pytestmark = faults


def _mount(*arguments: Any) -> None:
    mounted = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")


@contextmanager
def _mounted(path: Path, *arguments: Any) -> Iterator[None]:
    _mount(*arguments, path)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)  # a rank may be about to look at it


@contextmanager
def _full(output: Path) -> Iterator[None]:
    """No room there; what becomes free meanwhile is taken."""
    done = threading.Event()

    def fill() -> None:
        while not done.is_set():
            try:
                with (output / "ballast").open("ab", buffering=0) as file:
                    while not done.is_set():
                        file.write(bytes(4096))
            except OSError:
                time.sleep(0.002)

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        (output / "ballast").unlink()


@contextmanager
def _read_only(output: Path) -> Iterator[None]:
    """For root too, for whom modes are nothing. What is open already can be written to."""
    with _mounted(output, "--bind", output):
        _mount("-o", "remount,bind,ro", output)
        yield


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path, 60)


@pytest.fixture
def small_disk(training: Training) -> Iterator[None]:
    """Room for about twice as many checkpoints as are kept."""
    training.output.mkdir()
    with _mounted(training.output, "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        yield


@pytest.mark.usefixtures("small_disk")
@pytest.mark.parametrize(("fault", "said"), [(_full, "No space left on device"), (_read_only, "Read-only file system")])
def test_a_disk_that_takes_nothing_for_a_while_and_at_the_end(
    training: Training, fault: Callable[[Path], AbstractContextManager[None]], said: str
) -> None:
    """The training goes on and saves again later; without its last checkpoint it fails, and is resumed."""
    with training.start(2) as job:
        assert job.stdout is not None
        wait_for(lambda: bool(training.names()), job)
        with fault(training.output):
            complaint = next(line for line in job.stdout if line.startswith("NOT SAVED"))
            seen = max(training.names())
        assert said in complaint
        wait_for(lambda: max(training.names()) > seen, job)
        with fault(training.output):
            seen = max(training.names())
            printed, _ = job.communicate(timeout=120)
        assert job.returncode != 0
        assert said in printed
    assert training.steps not in training.names()
    training.check(seen)
    training.finish(2)
    training.check_against_undisturbed(2)


def test_a_read_only_directory_is_refused_at_the_start(training: Training) -> None:
    training.output.mkdir()
    with _read_only(training.output), training.start(1) as job:
        printed, _ = job.communicate(timeout=60)
    assert job.returncode != 0
    assert f"output={training.output} cannot be written to: [Errno 30] Read-only file system" in printed


def _delete(output: Path) -> None:
    gone = output.rename(output.with_name("gone"))
    shutil.rmtree(gone)


def test_a_directory_that_is_deleted_under_the_run(training: Training) -> None:
    """A job that is killed then begins anew; one that goes on makes the directory again when it saves."""
    with training.start(2) as job:
        pids = ranks_of(job, 2)
        wait_for(lambda: bool(training.names()), job)
        _delete(training.output)
        os.kill(pids[0], signal.SIGKILL)
        job.communicate(timeout=60)
    shutil.rmtree(training.output, ignore_errors=True)  # if it has saved once more in that moment
    with training.start(2) as job:
        wait_for(lambda: bool(training.names()), job)
        _delete(training.output)
        printed = training.check_end(job)
    assert "resumed from" not in printed
    assert training.tensors(training.output) == training.tensors(training.undisturbed(2))
    training.check_samples()


def test_of_two_jobs_with_one_directory_the_second_is_refused(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training.start(2) as job:
        pids = ranks_of(job, 2)
        wait_for(lambda: bool(training.names()), job)
        monkeypatch.setenv("SECONDS_TO_WAIT", "0.4")
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # so that it is there, however long the other takes to start
        try:
            with training.start(1) as other:
                printed, _ = other.communicate(timeout=120)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert other.returncode != 0
        assert f"error: output={training.output} is in use by another job" in printed
        training.check_end(job)
    training.check_against_undisturbed(2)
