"""The command: what it prints and writes, its exit status, and what it says to settings that do not fit."""

import contextlib
import dataclasses
import json
import math
import subprocess
import sys

import pytest
import torch

from fsdp_tp.parity import assert_parity, cli
from fsdp_tp.parity.cli import main
from fsdp_tp.parity.sources import counting, windows
from tests import models
from tests.parity import jobs
from tests.ranks import workers

SMALL = ("--model", "tests.parity.jobs:llama", "--data", "tests.parity.jobs:data", "--steps", "2")


@pytest.fixture
def parity(tmp_path, capsys, monkeypatch):
    """The command, in this process and on the workers that all tests share."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(cli, "Workers", lambda **options: contextlib.nullcontext(workers))

    def command(*arguments):
        html = () if "--html" in arguments else ("--html", tmp_path / "report.html")
        try:
            status = main([str(each) for each in ("--json", tmp_path / "report.json", *html, *arguments)])
        except SystemExit as end:  # of the parser
            status = end.code
        file = tmp_path / "report.json"
        found = json.loads(file.read_text()) if file.exists() else None
        if found and not found["complete"]:
            assert found["verdict"] is None
            found = None
        printed = capsys.readouterr()
        return status, found, printed.out + printed.err

    return command


def test_verdicts_as_table_json_and_page(parity, tmp_path):
    status, found, printed = parity(*SMALL, "--levels", "0", "2", "4", "--layouts", "tensor=2", "shard=2")
    assert status == 0
    assert found["verdict"] in ("equal", "within_noise")
    assert [(each["layout"], each["level"]) for each in found["layouts"]] == [
        ("regions and collectives", 0), ("tensor=2", 0), ("shard=2", 0),
        ("tensor=2", 2), ("shard=2", 2), ("tensor=2", 4), ("shard=2", 4),
    ]  # fmt: skip
    first = found["layouts"][3]
    assert {"layout", "level", "verdict", "max_relative_loss_gap", "max_relative_gradient_gap", "noise",
            "first_bad_step", "first_bad_module"} <= first.keys()  # fmt: skip
    assert first["max_relative_loss_gap"] < 1e-5
    assert first["max_relative_gradient_gap"] < 1e-4
    assert first["first_bad_step"] is None
    assert [each["max_relative_loss_gap"] for each in found["layouts"][5:]] == [0, 0]
    assert "tensor=2" in printed
    assert "tensor=2" in (tmp_path / "report.html").read_text()


def test_as_a_command(tmp_path):
    """With processes of its own; the model by its Hugging Face config, the data a text file."""
    config, text = tmp_path / "config.json", tmp_path / "text.txt"
    config.write_text(json.dumps({"model_type": "llama", **models.SIZES, "vocab_size": 256}))
    text.write_text("to be or not to be, that is the question. " * 20)
    command = "-m fsdp_tp.parity --steps 2 --sequence-length 16 --layouts tensor=2".split()
    options = ["--model", config, "--data", text, "--html", tmp_path / "page.html"]
    done = subprocess.run([sys.executable, *command, *map(str, options)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 comparison: " in done.stdout
    assert (tmp_path / "page.html").exists()


def test_a_curve_recorded_elsewhere(parity, tmp_path):
    curve = tmp_path / "curve.jsonl"
    assert parity(*SMALL, "--record", curve, "--layouts")[0] == 0
    lines = [json.loads(line) for line in curve.read_text().splitlines()]
    assert {line.get("run") for line in lines[1:]} == {"reference", "perturbed 0", "perturbed 1", "control"}
    status, found, _ = parity(*SMALL, "--against", curve, "--layouts", "tensor=2")
    assert (status, found["verdict"]) in [(0, "equal"), (0, "within_noise")]
    status, found, printed = parity(
        *SMALL, "--against", curve, "--layouts", "shard=2", "--optimizer", "tests.parity.jobs:plain_sgd"
    )
    assert (status, found["verdict"]) == (1, "different")
    assert (found["layouts"][0]["first_bad_step"], found["layouts"][0]["first_bad_module"]) == (
        1,
        "model.embed_tokens",
    )
    assert "what the optimizer has added to model.embed_tokens.weight differs" in printed
    status, _, printed = parity(*SMALL, "--against", curve, "--layouts", "tensor=2", "--seed", "1")
    assert status == 2
    assert "seed=0, here it is 1" in printed


def test_a_curve_of_losses_alone(parity, tmp_path):
    """Such as the trainer's metrics.jsonl."""
    curve = tmp_path / "metrics.jsonl"
    report = assert_parity(jobs.llama, jobs.data, steps=2, layouts=["shard=2"], workers=workers)
    losses = report.results[0].losses
    curve.write_text("".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses, 1)))
    status, found, _ = parity(*SMALL, "--against", curve, "--layouts", "shard=2")
    assert (status, found["verdict"]) == (0, "equal")
    curve.write_text(curve.read_text().replace(str(losses[1]), str(losses[1] * 1.001)))
    status, found, _ = parity(*SMALL, "--against", curve, "--layouts", "shard=2")
    assert (status, found["layouts"][0]["first_bad_step"], found["layouts"][0]["first_bad_module"]) == (1, 2, "loss")


def test_two_curves_that_are_there_already(parity, tmp_path):
    ours, theirs = tmp_path / "ours.jsonl", tmp_path / "theirs.jsonl"
    line = json.dumps({"step": 1, "loss": 2.0, "gradient_norm": 1.0}) + "\n"
    theirs.write_text(line)
    for loss, verdict in ((2.0 * (1 + 9e-6), "equal"), (2.0 * (1 + 2e-5), "different")):
        ours.write_text(line.replace("2.0", str(loss)))
        status, found, _ = parity("--against", theirs, "--curves", ours)
        assert (status, found["verdict"]) == (int(verdict == "different"), verdict)
        assert found["layouts"][0]["layout"] == str(ours)
    theirs.write_text(line + line.replace('"step": 1', '"step": 2'))
    ours.write_text(line)
    status, found, printed = parity("--against", theirs, "--curves", ours)
    assert (status, found["layouts"][0]["sentence"]) == (0, "compared over 1 of 2 steps")
    assert "no noise measured" in printed
    assert parity("--against", theirs, "--curves", ours, "--levels", 3)[0] == 2
    theirs.write_text(line.replace("2.0", "NaN"))
    status, _, printed = parity("--against", theirs, "--curves", ours)
    assert (status, "the reference diverged" in printed) == (2, True)


@pytest.mark.parametrize("reference", ["shard=2", "tensor=2", "tensor=2,sequence_parallel"])
def test_a_layout_as_the_reference(reference):
    """Nothing is compared on one process; the activations are compared all the same."""
    report = assert_parity(
        jobs.llama, jobs.data, steps=2, reference=reference, layouts=["tensor=2,loss_parallel"], workers=workers
    )
    (result,) = report.results
    gaps = {row.module: row.output_gap for row in result.comparison.modules}
    assert gaps["model.layers.0.mlp.down_proj"] < 1e-6
    assert result.comparison.missing == []
    assert any("sums its features in another order" in note for note in report.levels[0].notes)


def test_a_compiled_layout():
    """Compiled blocks are compared from outside: a hook inside would break their graph."""
    report = assert_parity(jobs.llama, jobs.data, steps=2, layouts=["tensor=2,compile"], workers=workers)
    assert report.exit_code == 0
    assert "values could not be compared" in report.results[0].sentence
    gaps = {row.module: row.output_gap for row in report.results[0].comparison.modules}
    assert math.isnan(gaps["model.layers.0.mlp.down_proj"])
    assert gaps["model.norm"] < 1e-6


def test_a_worker_that_dies(parity):
    """The layouts that finished are reported."""
    status, found, printed = parity(
        *SMALL[2:], "--model", "tests.parity.jobs:dies_on_two_ranks", "--layouts", "tensor=2", "tensor=2,shard=2"
    )
    assert (status, found["verdict"], found["complete"]) == (3, None, True)
    assert found["layouts"][0]["verdict"] is None
    assert "rank 1 of 2 died (exit code 9)" in found["layouts"][0]["error"]
    assert found["layouts"][1]["verdict"] in ("equal", "within_noise")
    assert "rank 1 of 2 died" in printed


def test_a_layout_that_the_model_does_not_fit(parity):
    model = ("--model", "tests.parity.jobs:opt")
    status, found, printed = parity(*SMALL, *model, "--layouts", "shard=2", "tensor=2,sequence_parallel")
    assert (status, found["verdict"]) == (2, None)
    assert found["layouts"][0]["verdict"] in ("equal", "within_noise")
    assert found["layouts"][1]["verdict"] is None
    assert "sequence_parallel=True is not possible for OPTForCausalLM" in found["layouts"][1]["error"]
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--layouts", "shard=3"], "layout shard=3: 8 rows of a global batch do not divide into 3 data ranks"),
        (["--layouts", "tensor=2,tensor=2"], "tensor is given twice"),
        (["--layouts", "pipeline=2"], "the pipeline axis has no layers yet"),
        (["--layouts", "tensr=2"], "unknown 'tensr'; legal: tensor, shard, replicate"),
        (["--layouts", "tensor=2000"], "needs 2000 processes"),
        (["--model", "tests.parity.jobs:nothing"], "model='tests.parity.jobs:nothing' cannot be imported"),
        (["--model", "no/such/config.json"], "is not module:function and not a config.json"),
        (["--data", "no/such/file"], "data=no/such/file cannot be read"),
        (["--steps", "0"], "steps=0 must be at least 1"),
        (["--against", "no/such/curve"], "recorded curve no/such/curve"),
        (["--against", "a", "--record", "b"], "exclude each other"),
        (["--record", "b", "--levels", "1", "2"], "a recorded curve has one level"),
        (["--layouts"], "nothing to compare"),
        (["--curves", "a"], "curves needs against"),
        (["--against", "a", "--levels", "1", "2"], "a recorded curve has one level"),
    ],
)
def test_settings_that_do_not_fit(parity, arguments, sentence):
    status, found, printed = parity(*arguments)
    assert (status, found) == (2, None)
    assert sentence in printed
    assert "Traceback" not in printed


def test_an_interrupted_run_has_a_status_of_its_own(parity, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "compare_layouts", interrupted)
    status, found, printed = parity(*SMALL)
    assert (status, found) == (130, None)
    assert "interrupted" in printed


def test_a_narrow_terminal_shows_layouts_whole(parity, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, _, printed = parity(*SMALL, "--layouts", "shard=2,micro_batches=2")
    assert "shard=2,micro_batches=2" in printed


def test_errors_that_are_no_verdict(parity, monkeypatch):
    """An exit status of 1 says that a layout differs; what stands in brackets is no markup."""
    status, found, printed = parity(*SMALL[2:], "--model", "tests.parity.jobs:broken", "--layouts", "shard=2")
    assert (status, found) == (3, None)
    assert "not enough values to unpack" in printed
    assert "jobs.py" in printed, "where"
    status, found, printed = parity(*SMALL, "--data", "tests.parity.jobs:no_data", "--layouts", "shard=2")
    assert (status, found) == (3, None)
    status, found, printed = parity(*SMALL, "--wrap", "tests.parity.jobs:fails_in_brackets", "--layouts", "shard=2")
    assert (status, found["verdict"]) == (3, None)
    assert "[/pytorch/unbound_buffer.cc:129] Timed out" in printed


def test_a_model_that_is_not_deterministic(parity):
    status, found, printed = parity(*SMALL[2:], "--model", "tests.parity.jobs:with_dropout", "--layouts", "shard=2")
    assert (status, found) == (2, None)
    assert "the model is not deterministic" in printed
    assert "model.layers.1.mlp.1" in printed


def test_a_job_that_is_another_one_each_time(parity):
    """Its noise would hide everything."""
    status, found, printed = parity(*SMALL[2:], "--model", "tests.parity.jobs:without_seed", "--layouts", "shard=2")
    assert (status, found) == (2, None)
    assert "the job has other initial weights on every run" in printed
    status, found, printed = parity(*SMALL, "--data", "tests.parity.jobs:other_data", "--layouts", "shard=2")
    assert (status, found) == (2, None)
    assert "the job has other batches on every run (in step 1)" in printed


def test_text_and_token_files(tmp_path):
    shape = (2, 5)
    tokens = torch.arange(22)
    assert windows(tokens, shape, 1).tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert windows(tokens, shape, 3).tolist() == windows(tokens, shape, 1).tolist(), "starts again at the end"
    first = counting((4, 9), 50, 0, 1)
    assert first.shape == (4, 9)
    assert torch.equal(first, counting((4, 9), 50, 0, 1))
    assert not torch.equal(first, counting((4, 9), 50, 0, 2))
    assert not torch.equal(first, counting((4, 9), 50, 1, 1))


OPTIONS = (
    "layouts reference levels model data loss token_count loss_is_mean wrap optimizer steps "
    "global_batch_size sequence_length max_grad_norm seed quick record against curves json html timeout"
)


def test_the_command_line_is_frozen():
    """An option that is renamed or lost breaks users' scripts: change this list only on purpose."""
    assert [field.name for field in dataclasses.fields(cli.ParityConfig)] == OPTIONS.split()
