"""Trainings whose ranks are killed, stopped and restarted end as if nothing had been. If these fail, look in
fsdp_tp/checkpoint/writing.py and fsdp_tp/train/loop.py."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_tp import checkpoint
from fsdp_tp.checkpoint.manifest import Manifest
from fsdp_tp.train import loop
from fsdp_tp.train.config import parse
from tests.commands import torchrun
from tests.ranks import run

faults = pytest.mark.skipif(not os.environ.get("FSDP_TP_FAULTS"), reason="make test-faults")

BATCH, LENGTH, KEEP = 6, 16, 3
ENDING = 20
"""Seconds that a job may live on without one of its ranks; after 30 torchrun kills those that do not end."""


class Training:
    """A command that is started again and again, and what must be true of its output after each time."""

    def __init__(self, directory: Path, steps: int, *options: Any) -> None:
        self.output, self.steps = directory / "run", steps
        text = directory / "text.txt"
        sentence = "The quick brown fox jumps over the lazy dog. "
        length = steps * BATCH * LENGTH  # one epoch
        text.write_text((sentence * (length // len(sentence) + 1))[:length])
        sizes = "--hidden-size 32 --intermediate-size 48 --num-layers 1 --num-heads 4 --num-kv-heads 2"
        run_of = f"--global-batch-size {BATCH} --sequence-length {LENGTH} --steps {steps} --warmup-steps 2"
        saves = f"--save-every 2 --keep-last {KEEP} --measure-communication-every 0"
        self._options = [*sizes.split(), *run_of.split(), *saves.split(), "--data", text, *options]
        self._complete: dict[int, bytes] = {}

    def start(self, ranks: int, *options: Any) -> Any:
        arguments = [*self._options, "--output", self.output, *options]
        return torchrun(ranks, "--max-restarts", 0, "-m", "tests.checkpoint.slow", *arguments)

    def undisturbed(self, ranks: int) -> Path:
        output = self.output.with_name("undisturbed")
        run(ranks, _train, [*self._options, "--output", output])
        return output

    def names(self) -> list[int]:
        if not self.output.exists():
            return []
        found = (re.fullmatch(r"step-(\d+)", path.name) for path in self.output.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def check(self, seen: int = 0) -> None:
        """Nothing that was complete is lost or has changed; ``seen``: a checkpoint that was seen meanwhile."""
        newest = checkpoint.latest(self.output)
        step = int(newest.name.removeprefix("step-")) if newest else 0
        assert step >= max([seen, *self._complete]), f"latest is step {step}"
        complete = {}
        for name in self.names():
            path = self.output / f"step-{name}"
            manifest = Manifest.read(path)
            assert not manifest.problems(path, manifest.files)
            assert manifest.extra["step"] == name
            complete[name] = (path / "manifest.json").read_bytes()
        for name, manifest_then in self._complete.items():
            if name in complete:
                assert complete[name] == manifest_then
            else:
                assert len([other for other in complete if other > name]) >= KEEP, f"step-{name} is lost"
        self._complete = complete

    def finish(self, ranks: int) -> None:
        with self.start(ranks) as job:
            printed, _ = job.communicate(timeout=200)
        assert job.returncode == 0, printed
        self.check(seen=self.steps)
        assert len(self.names()) == KEEP
        assert not list(self.output.glob(".*")), "left behind"

    def check_samples(self) -> None:
        """Over what counts of all jobs, those steps that no later job did again: every sequence once."""
        lines = [json.loads(line) for line in (self.output / "samples.jsonl").read_text().splitlines()]
        counts = {line["step"]: line["job"] for line in lines}
        taken = [each for line in lines if counts[line["step"]] == line["job"] for each in line["samples"]]
        assert sorted(taken) == list(range(self.steps * BATCH))


def _train(arguments: list[Any]) -> None:
    loop.train(parse([str(each) for each in arguments]))


def _losses(output: Path) -> dict[int, set[tuple[float, float]]]:
    """By step; more than one where a step that was done again gave something else."""
    found: dict[int, set[tuple[float, float]]] = {}
    for line in (output / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        found.setdefault(entry["step"], set()).add((entry["loss"], entry["gradient_norm"]))
    return found


def _tensors(output: Path, step: int) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (output / f"step-{step}").glob("*.safetensors")}


def _ranks_of(job: subprocess.Popen[str], count: int) -> list[int]:
    """Process ids by rank; waits for them to exist."""
    found: dict[str, int] = {}
    while len(found) < count:
        assert job.poll() is None, job.communicate()[0]
        for children in Path(f"/proc/{job.pid}/task").glob("*/children"):
            for pid in children.read_text().split():
                if match := re.search(r"\0RANK=(\d+)\0", _environment(pid)):
                    found[match[1]] = int(pid)
    return [found[str(rank)] for rank in range(count)]


def _environment(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text()
    except OSError:
        return ""


def _wait_for(what: Callable[[], bool], job: subprocess.Popen[str], within: float = 120) -> None:
    deadline = time.monotonic() + within
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.005)


def _steps_done(output: Path) -> int:
    try:
        last = (output / "metrics.jsonl").read_text().splitlines()[-1]
        return int(json.loads(last)["step"])
    except (OSError, IndexError, ValueError):
        return 0


def _kill_one(training: Training, ranks: int, chance: random.Random, after: int | None, *options: Any) -> None:
    """Kills a rank within some steps of step ``after``, or while the job starts."""
    with training.start(ranks, *options) as job:
        pids = _ranks_of(job, ranks)
        if after is None:
            time.sleep(chance.uniform(0, 8))
        else:
            _wait_for(lambda: _steps_done(training.output) >= after, job)
            time.sleep(chance.uniform(0, 0.3))
        seen = max([0, *training.names()])
        os.kill(chance.choice(pids), signal.SIGKILL)
        began = time.monotonic()
        printed, _ = job.communicate(timeout=120)
        assert job.returncode != 0, printed
        assert time.monotonic() - began < ENDING, printed
    training.check(seen)


def _kill(training: Training, ranks: int, kills: int, seed: int, *, starting: int) -> None:
    chance = random.Random(seed)
    # 0.3 seconds are less than 10 steps.
    moments = sorted(chance.sample(range(1, training.steps - 12), kills - starting))
    for moment in moments:
        _kill_one(training, ranks, chance, moment)
        if starting:
            starting -= 1
            _kill_one(training, ranks, chance, None)


def _check_against_undisturbed(training: Training, ranks: int) -> None:
    whole = training.undisturbed(ranks)
    expected = _losses(whole)
    assert [len(each) for each in expected.values()] == [1] * training.steps
    assert _losses(training.output) == expected
    assert _tensors(training.output, training.steps) == _tensors(whole, training.steps)
    training.check_samples()


def test_a_run_whose_ranks_are_killed_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    training = Training(tmp_path, 40)
    _kill(training, 2, kills=2, seed=0, starting=0)
    training.finish(2)
    _check_against_undisturbed(training, 2)


@faults
@pytest.mark.timeout(1200)
def test_twenty_kills(tmp_path: Path) -> None:
    training = Training(tmp_path, 200)
    _kill(training, 2, kills=20, seed=1, starting=4)
    training.finish(2)
    _check_against_undisturbed(training, 2)


@faults
def test_sigterm_during_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is then completed, and so is that of the last step."""
    training = Training(tmp_path, 40)
    monkeypatch.setenv("SECONDS_OF_A_FILE", "1")
    with training.start(2) as job:
        _wait_for(lambda: any(training.output.glob(".step-2.*.incomplete/*.safetensors")), job)
        assert training.names() == []
        job.send_signal(signal.SIGTERM)
        printed, _ = job.communicate(timeout=60)
    stopped = re.search(r"stopped by SIGTERM after step (\d+)", printed)
    assert stopped, printed
    training.check(seen=int(stopped[1]))
    assert 2 in training.names()
    monkeypatch.undo()
    training.finish(2)
    _check_against_undisturbed(training, 2)


@faults
def test_a_rank_that_stands_still(tmp_path: Path) -> None:
    """The other one says so, after the timeout, and the job can be started again."""
    timeout = 5
    training = Training(tmp_path, 60)
    with training.start(2, "--timeout", timeout, "--save-every", 20) as job:
        pids = _ranks_of(job, 2)
        _wait_for(lambda: _steps_done(training.output) >= 25 and training.names() == [20], job)
        os.kill(pids[1], signal.SIGSTOP)
        began = time.monotonic()
        try:
            assert job.stdout is not None
            said = next(line for line in job.stdout if re.search(r"Error: .*rank 1", line))
            assert timeout - 1 < time.monotonic() - began < timeout + 10, said  # a busy machine
        finally:
            os.kill(pids[1], signal.SIGKILL)
        job.communicate(timeout=ENDING)
    assert job.returncode != 0
    training.check(seen=20)
    training.finish(2)
    _check_against_undisturbed(training, 2)


@faults
def test_another_number_of_ranks_after_each_kill(tmp_path: Path) -> None:
    training, chance = Training(tmp_path, 40, "--learning-rate", 1e-3), random.Random(2)
    _kill_one(training, 2, chance, after=8)
    _kill_one(training, 3, chance, after=20)
    training.finish(2)
    found, expected = _losses(training.output), _losses(training.undisturbed(2))
    assert found.keys() == expected.keys()
    for step, values in found.items():
        for loss, _ in values:
            ((whole, _),) = expected[step]
            assert loss == pytest.approx(whole, rel=1e-6)  # three ranks sum in another order
    training.check_samples()
