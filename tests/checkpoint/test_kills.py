"""Trainings whose ranks are killed, stopped and restarted end as if nothing had been. If these fail, look in
fsdp_tp/checkpoint/writing.py and fsdp_tp/train/loop.py."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.trainings import Training, faults, losses, ranks_of, wait_for

ENDING = 20
"""Seconds that a job may live on without one of its ranks; after 30 torchrun kills those that do not end."""


def _kill_one(training: Training, ranks: int, chance: random.Random, after: int | None, *options: Any) -> None:
    """Kills a rank within some steps of step ``after``, or while the job starts."""
    with training.start(ranks, *options) as job:
        pids = ranks_of(job, ranks)
        if after is None:
            time.sleep(chance.uniform(0, 8))
        else:
            wait_for(lambda: training.steps_done() >= after, job)
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


@pytest.mark.parametrize(
    "kills",
    [pytest.param([(0, 8)], id="once"), pytest.param([(1, 8), (0, 16), (1, 24)], id="three times", marks=faults)],
)
def test_torchrun_starts_killed_ranks_again_and_they_resume(tmp_path: Path, kills: list[tuple[int, int]]) -> None:
    """``kills``: of which rank, after which step."""
    training, chance, seen = Training(tmp_path, 12 + kills[-1][1]), random.Random(0), []
    with training.start(2, restarts=3) as job:
        for restart, (rank, after) in enumerate(kills):
            pids = ranks_of(job, 2, restart=restart)
            wait_for(lambda after=after: training.steps_done() >= after, job)
            time.sleep(chance.uniform(0, 0.2))
            seen.append(max(training.names()))
            os.kill(pids[rank], signal.SIGKILL)
        printed = training.check_end(job)
    resumed = [int(step) for step in re.findall(r"resumed from .* after step (\d+)", printed)]
    assert len(resumed) == len(kills)
    assert all(step >= last for step, last in zip(resumed, seen, strict=True))
    training.check_against_undisturbed(2)


@faults
@pytest.mark.timeout(1200)
def test_twenty_kills(tmp_path: Path) -> None:
    training = Training(tmp_path, 200)
    _kill(training, 2, kills=20, seed=1, starting=4)
    training.finish(2)
    training.check_against_undisturbed(2)


@faults
def test_sigterm_during_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is then completed, and so is that of the last step."""
    training = Training(tmp_path, 40)
    monkeypatch.setenv("SECONDS_OF_A_FILE", "1")
    with training.start(2) as job:
        wait_for(lambda: any(training.output.glob(".step-2.*.incomplete/*.safetensors")), job)
        assert training.names() == []
        job.send_signal(signal.SIGTERM)
        printed, _ = job.communicate(timeout=60)
    stopped = re.search(r"stopped by SIGTERM after step (\d+)", printed)
    assert stopped, printed
    training.check(seen=int(stopped[1]))
    assert 2 in training.names()
    monkeypatch.undo()
    training.finish(2)
    training.check_against_undisturbed(2)


@faults
def test_a_rank_that_stands_still(tmp_path: Path) -> None:
    """The other one says so, after the timeout, and the job can be started again."""
    timeout = 5
    training = Training(tmp_path, 60)
    with training.start(2, "--timeout", timeout, "--save-every", 20) as job:
        pids = ranks_of(job, 2)
        wait_for(lambda: training.steps_done() >= 25 and training.names() == [20], job)
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
    training.check_against_undisturbed(2)


@faults
def test_another_number_of_ranks_after_each_kill(tmp_path: Path) -> None:
    training, chance = Training(tmp_path, 40, "--learning-rate", 1e-3), random.Random(2)
    _kill_one(training, 2, chance, after=8)
    _kill_one(training, 3, chance, after=20)
    training.finish(2)
    found, expected = losses(training.output), losses(training.undisturbed(2))
    assert found.keys() == expected.keys()
    for step, values in found.items():
        for loss, _ in values:
            ((whole, _),) = expected[step]
            assert loss == pytest.approx(whole, rel=1e-6)  # three ranks sum in another order
    training.check_samples()
