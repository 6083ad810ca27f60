"""A training that is disturbed and started again, and what must be true of its output. Its ranks run the module
:mod:`tests.checkpoint.slow`."""

from __future__ import annotations

import json
import os
import re
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


class Training:
    """A command that is started again and again."""

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

    def start(self, ranks: int, *options: Any, restarts: int = 0) -> Any:
        arguments = [*self._options, "--output", self.output, *options]
        return torchrun(ranks, "--max-restarts", restarts, "-m", "tests.checkpoint.slow", *arguments)

    def undisturbed(self, ranks: int) -> Path:
        output = self.output.with_name("undisturbed")
        run(ranks, _train, [*self._options, "--output", output])
        return output

    def names(self) -> list[int]:
        if not self.output.exists():
            return []
        found = (re.fullmatch(r"step-(\d+)", path.name) for path in self.output.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def steps_done(self) -> int:
        try:
            last = (self.output / "metrics.jsonl").read_text().splitlines()[-1]
            return int(json.loads(last)["step"])
        except (OSError, IndexError, ValueError):
            return 0

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
            self.check_end(job)

    def check_end(self, job: subprocess.Popen[str]) -> str:
        """What the job printed until it had done all steps."""
        printed, _ = job.communicate(timeout=200)
        assert job.returncode == 0, printed
        self.check(seen=self.steps)
        assert len(self.names()) == KEEP
        assert {path.name for path in self.output.glob(".*")} <= {".lock"}, "left behind"
        return printed

    def check_against_undisturbed(self, ranks: int) -> None:
        """Every step, also one that was done again, and the last checkpoint: to the last bit."""
        whole = self.undisturbed(ranks)
        expected = losses(whole)
        assert [len(each) for each in expected.values()] == [1] * self.steps
        assert losses(self.output) == expected
        assert self.tensors(self.output) == self.tensors(whole)
        self.check_samples()

    def tensors(self, output: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in (output / f"step-{self.steps}").glob("*.safetensors")}

    def check_samples(self) -> None:
        """Over what counts of all jobs, those steps that no later job did again: every sequence once."""
        text = self.output.with_name(f"{self.output.name}.samples.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        counts = {line["step"]: line["job"] for line in lines}
        taken = [each for line in lines if counts[line["step"]] == line["job"] for each in line["samples"]]
        assert sorted(taken) == list(range(self.steps * BATCH))


def _train(arguments: list[Any]) -> None:
    loop.train(parse([str(each) for each in arguments]))


def losses(output: Path) -> dict[int, set[tuple[float, float]]]:
    """By step; more than one where a step that was done again gave something else."""
    found: dict[int, set[tuple[float, float]]] = {}
    for line in (output / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        found.setdefault(entry["step"], set()).add((entry["loss"], entry["gradient_norm"]))
    return found


def ranks_of(job: subprocess.Popen[str], count: int, *, restart: int = 0) -> list[int]:
    """Process ids by rank; waits for them to exist. ``restart``: how often torchrun has started them again."""
    found: dict[str, int] = {}
    started = re.compile(rf"\0TORCHELASTIC_RESTART_COUNT={restart}\0")
    while len(found) < count:
        assert job.poll() is None, job.communicate()[0]
        for children in Path(f"/proc/{job.pid}/task").glob("*/children"):
            for pid in children.read_text().split():
                environment = _environment(pid)
                if started.search(environment) and (match := re.search(r"\0RANK=(\d+)\0", environment)):
                    found[match[1]] = int(pid)
        time.sleep(0.01)
    return [found[str(rank)] for rank in range(count)]


def _environment(pid: str) -> str:
    try:
        return "\0" + Path(f"/proc/{pid}/environ").read_text()
    except OSError:
        return ""


def wait_for(what: Callable[[], bool], job: subprocess.Popen[str], within: float = 120) -> None:
    deadline = time.monotonic() + within
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.005)
