"""Two and three hosts that are network namespaces. If these fail, look in fsdp_tp/comm/backend.py and
kernels/torch/; if they cannot be built, in bench/namespaces.py."""

from __future__ import annotations

import json
import multiprocessing as mp
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.namespaces import Namespaces, unavailable
from fsdp_tp import checkpoint
from fsdp_tp.parity import compare_curves
from fsdp_tp.train import loop
from fsdp_tp.train.config import parse
from tests.hosts import collectives, resume
from tests.ranks import run

pytestmark = pytest.mark.skipif(unavailable(3) is not None, reason=str(unavailable(3)))

TIMEOUT = 4  # seconds, of collectives of the run that is interrupted
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
TINY = (
    "--hidden-size 32 --intermediate-size 48 --num-layers 2 --num-heads 4 --num-kv-heads 2 --sequence-length 16 "
    "--global-batch-size 8 --steps 5 --warmup-steps 2 --learning-rate 1e-2 --measure-communication-every 0"
).split()


def _finish(processes: list[subprocess.Popen[str]], within: float = 120) -> list[str]:
    """What the processes print, all of which must succeed."""
    printed = [process.communicate(timeout=within)[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(printed)
    return printed


def _wait_for(what: Callable[[], bool], processes: list[subprocess.Popen[str]], within: float = 60) -> None:
    deadline = time.monotonic() + within
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        for process in processes:
            assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def _train(arguments: list[str]) -> None:
    loop.train(parse(arguments))


def test_the_trainer_on_two_hosts_gives_the_curve_of_one_process(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    arguments = [*TINY, "--data", str(text), "--output"]
    run(1, _train, [*arguments, str(tmp_path / "one")])
    with Namespaces(2) as hosts:
        job = ["-m", "fsdp_tp.train", *arguments, tmp_path / "hosts", "--hybrid-shard-degree", 2]
        _finish([hosts.torchrun(host, *job, **PIPES) for host in range(2)])
    report = compare_curves(tmp_path / "one/metrics.jsonl", [tmp_path / "hosts/metrics.jsonl"])
    assert report.verdict == "equal", report.sentence()
    losses = [json.loads(line)["loss"] for line in (tmp_path / "hosts/metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.3


def test_collectives_over_three_hosts_with_two_one_and_one_ranks() -> None:
    context, connections = mp.get_context("forkserver"), []
    with Namespaces(3) as hosts:
        for rank, host in enumerate([0, 0, 1, 2]):
            ours, theirs = context.Pipe(duplex=False)
            job = (rank, hosts.path(host), hosts.address(0), theirs)
            context.Process(target=collectives.check, args=job, daemon=True).start()
            theirs.close()
            connections.append(ours)
        found = [connection.recv() if connection.poll(120) else "nothing" for connection in connections]
    for rank, checked in enumerate(found):
        # An all-gather, a reduce-scatter, two all-reduces and a broadcast from every rank.
        cases = sum(4 + len(ranks) for ranks in collectives.GROUPS if rank in ranks)
        assert checked == cases * len(collectives.DTYPES) * len(collectives.SIZES), checked


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float, list[dict[str, Any]]]:
    """A run whose link went down in the middle, for a while: its directory, when that was, what the ranks raised."""
    directory = tmp_path_factory.mktemp("interrupted")
    errors = directory / "errors"
    errors.mkdir()
    # The gradients, whose all-reduce between the hosts takes most of a step, need 0.7 s on this link.
    with Namespaces(2, rate="50mbit") as hosts:
        job = ["--max-restarts", 3, "-m", "tests.hosts.resume", directory, TIMEOUT]
        agents = [hosts.torchrun(host, *job, **PIPES) for host in range(2)]
        _wait_for(lambda: (directory / "step-3").exists(), agents)
        time.sleep(0.3)
        hosts.link_down(1)
        down = time.time()
        _wait_for(lambda: len(list(errors.iterdir())) == 4, agents)
        found = [json.loads(path.read_text()) for path in errors.iterdir()]
        hosts.link_up(1)
        _finish(agents)
    return directory, down, sorted(found, key=lambda each: each["rank"])


def test_when_the_link_goes_down_every_rank_raises_within_the_timeout(interrupted: Any) -> None:
    _, down, errors = interrupted
    assert [each["rank"] for each in errors] == [0, 1, 2, 3]
    for each in errors:
        assert each["time"] - down < TIMEOUT + 5, each  # a step until the next collective, and a busy machine


def test_when_the_link_goes_down_errors_name_a_rank(interrupted: Any) -> None:
    _, _, errors = interrupted
    for each in errors:
        assert re.search(r"\brank \d", each["error"]), each


def test_when_the_link_goes_down_errors_name_the_rank_at_its_other_end(interrupted: Any) -> None:
    """Of the replicate groups [0, 2] and [1, 3]. On each host some rank waits for the link, its neighbour perhaps for
    that rank."""
    _, _, errors = interrupted
    over_the_link = [each for each in errors if "on another host" in each["error"]]
    assert over_the_link
    for each in over_the_link:
        assert re.search(rf"\brank {(each['rank'] + 2) % 4}\b", each["error"]), each


def test_a_restarted_run_ends_with_the_weights_of_an_undisturbed_one(
    interrupted: Any, tmp_path: Path, one_process: None
) -> None:
    directory, _, _ = interrupted
    run(4, resume.train, tmp_path, 60)
    states = []
    for each in (directory, tmp_path):
        model, _ = resume.build()
        initial = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters())
        assert checkpoint.load(each / f"step-{resume.STEPS}", model=model, optimizer=optimizer)["step"] == resume.STEPS
        moments = [value for state in optimizer.state.values() for value in state.values()]
        states.append([*model.state_dict().values(), *moments])
        assert not any(torch.equal(a, b) for a, b in zip(initial, model.parameters(), strict=True))
    # Two terms have one sum in whatever order.
    assert len(states[0]) == 4 + 3 * 4
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
