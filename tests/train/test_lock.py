"""One job at a time in an output directory, and what a job finds where it wants to save. If these fail, look in
fsdp_tp/train/lock.py, and for the rest in fsdp_tp/train/saves.py."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time

import pytest

from fsdp_tp import checkpoint
from fsdp_tp.train import lock, loop
from fsdp_tp.train.config import parse
from fsdp_tp.train.lock import OutputLock
from tests.ranks import run
from tests.train.test_loop import TINY


@pytest.fixture
def other_job(tmp_path):
    """Of which nothing is here but its lock, in the directory ``run``."""
    (tmp_path / "run").mkdir()
    with (tmp_path / "run/.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _train(arguments, wait=lock.WAIT):
    before, lock.WAIT = lock.WAIT, wait
    try:
        loop.train(parse([*TINY, *map(str, arguments)]))
    finally:
        lock.WAIT = before


def _is_refused(arguments):
    """How often this rank has said that it waits."""
    said = []
    lock.logger.addFilter(filtering := lambda record: said.append(record.getMessage()) or True)
    with pytest.raises(ValueError, match="output=.*run is in use by another job, still after 1 s; choose another"):
        _train(arguments, wait=1)
    lock.logger.removeFilter(filtering)
    return sum("waiting up to 1 s for its end" in each for each in said)


def test_an_output_of_another_job_is_refused_on_every_rank(tmp_path, text, other_job):
    arguments = ["--data", text, "--output", tmp_path / "run"]
    assert run(2, _is_refused, arguments) == [1, 0]
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    ended = []
    ending = threading.Timer(2, lambda: (ended.append(time.time()), other_job.close()))
    ending.start()
    run(2, _train, arguments)
    ending.join()
    assert (tmp_path / "run/config.json").stat().st_mtime > ended[0]
    assert checkpoint.latest(tmp_path / "run") == tmp_path / "run/step-6"


def _is_locked(path):
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _locked_while_training(arguments):
    config = parse([*TINY, *map(str, arguments)])
    original, during = loop.train_step, []

    def looking(*positional):
        during.append(_is_locked(config.output / ".lock"))
        return original(*positional)

    loop.train_step = looking
    try:
        loop.train(config)
    finally:
        loop.train_step = original
    return during, _is_locked(config.output / ".lock")


def test_it_is_locked_until_the_training_is_done(tmp_path, text):
    (found,) = run(1, _locked_while_training, ["--data", text, "--output", tmp_path / "run"])
    assert found == ([True] * 6, False)


def _fails_early(arguments):
    with pytest.raises(ValueError, match="contain no text"):
        _train(arguments)
    return _is_locked(parse([*TINY, *map(str, arguments)]).output / ".lock")


def test_a_training_that_cannot_begin_leaves_no_lock(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    assert run(1, _fails_early, ["--data", tmp_path / "empty.txt", "--output", tmp_path / "run"]) == [False]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_does_without(tmp_path, monkeypatch, number):
    def flock(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = OutputLock(tmp_path / "run")
    lock.hold()
    lock.release()


@pytest.mark.usefixtures("one_process")
def test_a_directory_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="output=.*file/run cannot be written to: .*Not a directory"):
        OutputLock(tmp_path / "file/run").hold()


@pytest.mark.usefixtures("one_process")
def test_a_directory_that_was_removed_and_made_again_is_locked_anew(tmp_path):
    first, second = OutputLock(tmp_path / "run"), OutputLock(tmp_path / "run")
    first.hold()
    (tmp_path / "run").rename(tmp_path / "gone")
    second.hold()
    assert _is_locked(tmp_path / "run/.lock")
    first.release()
    second.release()


def _somebody_saved_step_6(arguments):
    """While this job is at step 3, there comes a checkpoint of step 6 that it knows nothing of."""
    config = parse([*TINY, *map(str, arguments)])
    original, steps = loop.train_step, 0

    def copying(*positional):
        nonlocal steps
        steps += 1
        if steps == 3 and int(os.environ["RANK"]) == 0:
            (config.output.parent / "other").rename(config.output / "step-6")
        return original(*positional)

    loop.train_step = copying
    try:
        with pytest.raises(ValueError, match="step-6 exists already"):
            loop.train(config)
    finally:
        loop.train_step = original


def test_a_good_checkpoint_of_somebody_else_is_not_set_aside(tmp_path, text):
    arguments = ["--data", text, "--output"]
    run(2, _train, [*arguments, tmp_path / "first"])
    (tmp_path / "first/step-6").rename(tmp_path / "other")
    manifest = (tmp_path / "other/manifest.json").read_bytes()
    run(2, _somebody_saved_step_6, [*arguments, tmp_path / "run"])
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-6"]
    assert (tmp_path / "run/step-6/manifest.json").read_bytes() == manifest


def test_a_damaged_one_is_set_aside(tmp_path, text):
    output = tmp_path / "run"
    arguments = ["--data", text, "--output", output, "--save-every", 3]
    run(2, _train, arguments)
    file = output / "step-6/model-00001.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    run(2, _train, arguments)
    assert checkpoint.latest(output) == output / "step-6"
    assert sorted(path.name for path in output.glob("step-*")) == ["step-3", "step-6", "step-6.damaged-1.old"]
