"""Saves that fail do not end a training that can go on. If these fail, look in
fsdp_tp/train/saves.py, and for the metrics in fsdp_tp/train/metrics.py."""

from __future__ import annotations

import errno
import gc
import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp_tp import checkpoint
from fsdp_tp.checkpoint import writing
from fsdp_tp.train import loop
from fsdp_tp.train.config import parse
from fsdp_tp.train.metrics import Reporter, StepMetrics
from tests.ranks import run
from tests.train.conftest import write_text
from tests.train.test_loop import TINY


def _train(failing, arguments):
    """What was said in a training on whose rank 1 those saves fail, counted from 1; and how it ended."""
    said, saves, say, write = [], set(), loop.Reporter.say, writing.write_tensors

    def writing_or_not(path, tensors):
        saves.add(path.parent)
        if len(saves) in failing and dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, tensors)

    def saying(self, message):
        said.append(message)
        say(self, message)

    writing.write_tensors, loop.Reporter.say = writing_or_not, saying
    try:
        loop.train(parse([*TINY, *map(str, arguments)]))
        error = None
    except OSError as caught:
        error = str(caught)
    finally:
        writing.write_tensors, loop.Reporter.say = write, say
        gc.collect()  # the lock of a job that has failed stays until the job is gone
    return said, error


def _curve(output):
    lines = (json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


def _weights(path):
    return {file.name: file.read_bytes() for file in path.glob("*.safetensors")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    run(2, _train, set(), ["--data", write_text(directory), "--output", directory / "run"])
    return directory / "run"


FULL = "No space left on device"


@pytest.mark.parametrize(
    ("background", "failing", "left"), [(True, {1}, [4, 6]), (True, {1, 2}, [6]), (False, {1}, [4, 6])]
)
def test_a_save_that_fails_is_said_and_the_next_is_tried(tmp_path, undisturbed, text, background, failing, left):
    """Also where the next one is that of the last step."""
    output = tmp_path / "run"
    saves = ["--save-every", 2, "--save-in-background" if background else "--no-save-in-background"]
    for said, error in run(2, _train, failing, ["--data", text, "--output", output, *saves]):
        assert error is None
        complaints = [each for each in said if each.startswith("NOT SAVED")]
        assert len(complaints) == len(failing)
        for step, complaint in zip((2, 4), complaints, strict=False):
            assert f"step-{step} was not written: rank " in complaint
            assert FULL in complaint
    assert sorted(path.name for path in output.glob("step-*")) == [f"step-{step}" for step in left]
    assert _curve(output) == _curve(undisturbed)
    assert _weights(output / "step-6") == _weights(undisturbed / "step-6")


def test_the_last_save_fails_with_its_error_and_the_run_can_be_resumed(tmp_path, text):
    arguments = ["--data", text, "--output", tmp_path / "run", "--save-every", 4]
    for said, error in run(2, _train, {2}, arguments):
        assert "step-6 was not written: rank " in error
        assert FULL in error
        assert not any("NOT SAVED" in each for each in said)
    assert checkpoint.latest(tmp_path / "run") == tmp_path / "run/step-4"
    run(2, _train, set(), arguments)
    assert checkpoint.latest(tmp_path / "run") == tmp_path / "run/step-6"


def _metrics(step):
    return StepMetrics(step, 1.0, 1.0, 1e-3, 1.0, 1, None)


def test_metrics_that_cannot_be_written_are_said_once(tmp_path: Path, capsys):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    reporter = Reporter(tmp_path, total_steps=3, log_every=1, active=True)
    for step in (1, 2, 3):
        reporter.step(_metrics(step))
    reporter.close()
    printed = capsys.readouterr().out
    assert printed.count(f"metrics.jsonl cannot be written: [Errno 28] {FULL}") == 1
    assert printed.count("step 3  loss") == 1


def test_a_tensorboard_that_has_given_up_is_left(tmp_path: Path, capsys):
    reporter = Reporter(tmp_path, total_steps=3, log_every=1, active=True)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    reporter._tensorboard.file_writer.event_writer._async_writer._worker.exception = full
    for step in (1, 2, 3):
        reporter.step(_metrics(step))
    reporter.close()
    assert capsys.readouterr().out.count(FULL) == 1
    assert len(_curve(tmp_path)) == 3


def test_half_a_line_of_metrics_goes_when_the_run_is_resumed(tmp_path: Path):
    for expected in ([1], [1, 2]):
        reporter = Reporter(tmp_path, total_steps=3, log_every=1, active=True)
        reporter.step(_metrics(expected[-1]))
        reporter.close()
        assert [step for step, _ in _curve(tmp_path)] == expected
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 7, "loss": 1')  # as a full disk cuts it
