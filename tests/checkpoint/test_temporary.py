"""What is removed, and what must never be. If these fail, look in fsdp_tp/checkpoint/temporary.py and writing.py."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
from torch import nn

from fsdp_tp import checkpoint
from fsdp_tp.checkpoint import temporary, writing

pytestmark = pytest.mark.usefixtures("one_process")


def _names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_what_is_not_ours_stays(tmp_path):
    others = [".hf.incomplete", ".download.0123abcd.incomplete", ".backup-2024.removed", "notes-7"]
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    checkpoint.save(tmp_path / "step-1", model=nn.Linear(2, 2))
    checkpoint.save(tmp_path / "step-2", model=nn.Linear(2, 2), keep_last=1)
    assert _names(tmp_path) == sorted([*others, "step-2"])
    assert all((tmp_path / name / "file").exists() for name in others)


def test_another_job_does_not_take_a_directory_that_is_being_completed_for_an_abandoned_one(tmp_path, monkeypatch):
    def slowly(path):
        temporary.remove_abandoned(tmp_path)
        os.sync()

    monkeypatch.setattr(temporary, "sync", slowly)
    checkpoint.save(tmp_path / "step-1", model=nn.Linear(2, 2))
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"
    assert _names(tmp_path / "step-1") == ["manifest.json", "model-00000.safetensors"]


def test_a_removal_that_was_interrupted_is_ended_by_the_next_save(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "step-1", model=nn.Linear(2, 2))
    with monkeypatch.context() as patch:
        patch.setattr(temporary, "_remove", lambda path: os.unlink(path / "manifest.json"))  # and then the end
        temporary.remove(tmp_path / "step-1")
    (left,) = _names(tmp_path)
    assert left.startswith(".step-1.")
    (tmp_path / ".step-0.0123abcd.incomplete").mkdir()  # the end came before the lock was made, or after it had gone
    checkpoint.save(tmp_path / "step-2", model=nn.Linear(2, 2))
    assert _names(tmp_path) == ["step-2"]


def test_a_directory_that_another_job_removes_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    names = []

    def hidden(path):
        names.append(original(path))
        return names[-1]

    def made(path, *arguments, **options):
        mkdir(path, *arguments, **options)
        if names and path == names[0]:
            temporary.remove_abandoned(tmp_path)

    original, mkdir = temporary._hidden, Path.mkdir
    monkeypatch.setattr(temporary, "_hidden", hidden)
    monkeypatch.setattr(Path, "mkdir", made)
    checkpoint.save(tmp_path / "step-1", model=nn.Linear(2, 2))
    assert len(names) == 2
    assert _names(tmp_path) == ["step-1"]


def test_only_those_before_the_new_one_are_removed(tmp_path):
    """A damaged one with a higher number, or an older and longer run's, must not take the place of a good one."""
    model = nn.Linear(2, 2)
    for step in (7, 8, 10):
        checkpoint.save(tmp_path / f"step-{step}", model=model)
    with (tmp_path / "step-10/model-00000.safetensors").open("ab") as file:
        file.write(b"damage")
    checkpoint.save(tmp_path / "step-9", model=model, keep_last=1)
    assert _names(tmp_path) == ["step-10", "step-9"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-9"


def test_a_checkpoint_is_complete_though_an_old_one_cannot_be_removed(tmp_path, monkeypatch, caplog):
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "step-1", model=model)

    def gone(path):
        shutil.rmtree(path)
        raise FileNotFoundError(f"{path} is gone")

    monkeypatch.setattr(writing, "remove", gone)
    with caplog.at_level(logging.WARNING, "fsdp_tp"):
        checkpoint.save(tmp_path / "step-2", model=model, keep_last=1)
    assert "step-1 was not removed" in caplog.text
    assert _names(tmp_path) == ["step-2"]
