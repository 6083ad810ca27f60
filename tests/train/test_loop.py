"""Short trainings through the trainer itself. If these fail, look in fsdp_tp/train/loop.py."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from fsdp_tp import checkpoint
from fsdp_tp.parity import compare_curves
from fsdp_tp.train import loop, main
from fsdp_tp.train.config import parse
from fsdp_tp.train.metrics import covered
from fsdp_tp.train.model import build_model
from tests.commands import torchrun
from tests.ranks import run

TINY = (
    "--hidden-size 32 --intermediate-size 48 --num-layers 2 --num-heads 4 --num-kv-heads 2 --sequence-length 16 "
    "--global-batch-size 8 --steps 6 --warmup-steps 2 --learning-rate 1e-2 --measure-communication-every 3"
).split()
EIGHT = ["--tensor-parallel-degree", "2", "--hybrid-shard-degree", "2"]


def train(*arguments):
    """In the current world; what the metrics file then says."""
    config = parse([*TINY, *map(str, arguments)])
    loop.train(config)
    lines = (config.output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _train(arguments):
    return train(*arguments) if int(os.environ["RANK"]) == 0 else loop.train(parse([*TINY, *map(str, arguments)]))


def _losses(world_size, *arguments):
    metrics = run(world_size, _train, arguments)[0]
    return [line["loss"] for line in metrics]


def test_every_layout_gives_the_curve_of_one_process(tmp_path, text):
    data = ["--data", text]
    expected = _losses(1, *data, "--output", tmp_path / "one")
    assert expected[-1] < expected[0] - 0.5
    curves = []
    for name, world_size, options in (
        ("accumulated", 1, ["--micro-batch-size", 2]),
        ("eight", 8, EIGHT),
        ("all", 8, [*EIGHT, "--sequence-parallel", "--loss-parallel", "--activation-checkpointing", "full"]),
        ("replicas", 4, ["--hybrid-shard-degree", 1, "--micro-batch-size", 1]),
    ):
        _losses(world_size, *data, "--output", tmp_path / name, *options)
        curves.append(tmp_path / name / "metrics.jsonl")
    report = compare_curves(tmp_path / "one" / "metrics.jsonl", curves)
    assert report.verdict == "equal", report.sentence()


def test_bf16_learns_and_stays_near_fp32(tmp_path, text):
    fp32 = _losses(2, "--data", text, "--output", tmp_path / "a")
    bf16 = _losses(2, "--data", text, "--output", tmp_path / "b", "--precision", "bf16")
    assert bf16 != fp32
    assert bf16 == pytest.approx(fp32, rel=0.02)  # bf16 rounds at 0.4 %; five times that


def _train_deterministically(arguments):
    try:
        result = _train([*arguments, "--deterministic"])
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert os.environ["NCCL_ALGO"] == "Ring"
        return result, torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_runs_are_equal_to_the_last_bit(tmp_path, text):
    """The whole checkpoint, optimizer included, and every number of the curve."""
    curves, states = [], []
    for name in ("a", "b"):
        output = tmp_path / name
        everyone = run(4, _train_deterministically, ["--data", text, "--output", output, *EIGHT, "--precision", "bf16"])
        assert all(enabled for _, enabled in everyone)
        curves.append([(line["loss"], line["gradient_norm"]) for line in everyone[0][0]])
        states.append({file.name: file.read_bytes() for file in sorted((output / "step-6").glob("*.safetensors"))})
    assert curves[0] == curves[1]
    assert len(states[0]) == 8  # every rank writes of both
    assert states[0] == states[1]


def test_metrics_and_outputs(tmp_path, text):
    output = tmp_path / "run"
    metrics = run(4, _train, ["--data", text, "--output", output, "--tensor-parallel-degree", 2])[0]
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert all(line["gradient_norm"] > 0 and line["tokens_per_second"] > 0 for line in metrics)
    assert all(line["peak_memory_bytes"] > 2**20 for line in metrics)
    shares = [line["communication_share"] for line in metrics]
    assert [share is None for share in shares] == [True, False, True, True, False, True]
    assert all(0 < share < 1 for share in shares if share is not None)
    assert metrics[1]["learning_rate"] == pytest.approx(1e-2)
    assert metrics[5]["learning_rate"] == pytest.approx(1e-4)
    assert list((output / "tensorboard").glob("events*"))
    assert checkpoint.latest(output) == output / "step-6"
    assert json.loads((output / "config.json").read_text())["parallel"]["tensor_parallel_degree"] == 2


@pytest.mark.parametrize(("first", "second", "dropout"), [(4, 4, 0), (4, 2, 0), (1, 4, 0), (2, 2, 0.3), (1, 1, 0.3)])
def test_a_resumed_run_continues_the_curve(tmp_path, text, first, second, dropout):
    """The same layout to the last bit, dropout included; another one, also with other data ranks, to fp32's
    rounding."""
    config = {"model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "attention_dropout": dropout}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--data", text, "--model", tmp_path, "--tensor-parallel-degree"]
    whole = _losses(second, *options, min(second, 2), "--output", tmp_path / "whole")
    stopped = ["--output", tmp_path / "split", "--save-every", 3]
    _losses(first, *options, min(first, 2), *stopped)
    (tmp_path / "split" / "step-6").rename(tmp_path / "kept")
    (tmp_path / "split" / "metrics.jsonl").unlink()
    resumed = _losses(second, *options, min(second, 2), *stopped)
    assert len(resumed) == 3, "steps 4 to 6"
    assert resumed == (whole[3:] if first == second else pytest.approx(whole[3:], rel=1e-6))


def test_a_resume_with_another_batch_size_reads_on_where_the_data_was_left(tmp_path, text):
    """Sequences 0 to 23, then from 24 on; the loss of step 4 is that of the next sequences."""
    arguments = ["--data", text, "--output", tmp_path / "run"]
    _losses(1, *arguments, "--stop-after", 3)
    _losses(1, *arguments, "--stop-after", 4, "--global-batch-size", 16)
    saved = json.loads((tmp_path / "run" / "step-4" / "manifest.json").read_text())["extra"]
    assert saved["data"]["_index_sampler_state"]["position"] == 3 * 8 + 16


def _stop_at_three(arguments):
    """One rank of the job gets SIGTERM during step 3."""
    steps = 0
    original = loop.train_step

    def counting(*positional):
        nonlocal steps
        steps += 1
        if steps == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*positional)

    loop.train_step = counting
    try:
        loop.train(parse([*TINY, *map(str, arguments)]))
    finally:
        loop.train_step = original
    return steps


def test_sigterm_on_one_rank_stops_all_with_a_checkpoint(tmp_path, text):
    output = tmp_path / "run"
    arguments = ["--data", text, "--output", output]
    assert run(2, _stop_at_three, arguments) == [3, 3]
    assert checkpoint.latest(output) == output / "step-3"
    whole = _losses(2, "--data", text, "--output", tmp_path / "whole")
    assert _losses(2, *arguments) == whole, "three lines before and three after"


def _describe(arguments):
    return loop.prepare(parse([*TINY, *map(str, arguments)])).description


def _expect_value_error(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        loop.train(parse([*TINY, *map(str, arguments)]))


def test_bad_input_is_the_same_sentence_on_every_rank(tmp_path, text):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 16}')
    (tmp_path / "broken.json").write_text('{"model_type": ')
    (tmp_path / "untyped.json").write_text("{}")
    (tmp_path / "unknown.json").write_text('{"model_type": "perceptron"}')
    (tmp_path / "gpt.json").write_text('{"model_type": "openai-gpt", "n_layer": 1, "n_embd": 16, "n_head": 2}')
    (tmp_path / "odd.json").write_text('{"model_type": "llama", "hidden_size": "big"}')
    output = ["--output", tmp_path / "run"]
    good = ["--data", text, *output]
    for arguments, sentence in (
        (["--data", tmp_path / "empty.txt", *output], "the data files contain no text"),
        (["--data", tmp_path / "short.txt", *output], "hold 10 tokens, fewer than the 17 of one sequence"),
        (["--data", tmp_path / "absent.txt", *output], "absent.txt does not exist"),
        ([*good, "--vocab-size", 128], "the tokenizer has 257 tokens, more than the model's vocab_size=128"),
        ([*good, "--model", tmp_path], "the tokenizer has 257 tokens, more than the model's vocab_size=16"),
        ([*good, "--model", tmp_path / "broken.json"], "broken.json is not a readable config.json"),
        ([*good, "--model", tmp_path / "untyped.json"], "untyped.json has no model_type"),
        ([*good, "--model", tmp_path / "unknown.json"], "model=.*unknown.json cannot be built"),
        ([*good, "--model", tmp_path / "odd.json"], "model=.*odd.json cannot be built"),
        ([*good, "--num-heads", 3], "num_heads=3 must divide hidden_size=32"),
        ([*good, "--tensor-parallel-degree", 3], "tensor_parallel_degree=3 does not divide the world of 2 ranks"),
        ([*good, "--global-batch-size", 7], "global_batch_size=7 must be a multiple of the 2 data ranks"),
        (
            [*good, "--model", tmp_path / "gpt.json", "--tensor-parallel-degree", 2],
            "plan='auto' does not know OpenAIGPT",
        ),
    ):
        run(2, _expect_value_error, arguments, sentence)


def test_a_run_with_checkpoints_is_not_started_over(tmp_path, text):
    arguments = ["--data", text, "--output", tmp_path / "run"]
    _losses(1, *arguments)
    run(1, _expect_value_error, [*arguments, "--no-resume"], "holds the checkpoint step-6 and resume is off")
    run(1, _expect_value_error, [*arguments, "--hidden-size", 64], "holds a run with model.hidden_size=32, not 64; ch")
    (again,) = run(1, _describe, arguments)
    assert "already at step 6 of 6: nothing to do" in again
    (longer,) = run(1, _describe, [*arguments, "--steps", 9])
    assert longer.endswith("changed since: optimizer.steps 6 -> 9")


def test_the_default_model_has_five_to_ten_million_parameters():
    config = parse([])
    model = build_model(config.model, tokenizer_size=257, sequence_length=128)
    assert 5e6 < sum(parameter.numel() for parameter in model.parameters()) < 10e6
    assert all(parameter.is_meta for parameter in model.parameters())


def test_learning_rate_warms_up_and_ends():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    config = parse(["--steps", "10", "--warmup-steps", "4"]).optimizer
    rates = [loop.set_learning_rate(optimizer, config, step) for step in range(1, 11)]
    assert rates[:4] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])
    assert rates[6] == pytest.approx((1e-3 + 1e-4) / 2)
    assert rates[-1] == pytest.approx(1e-4)
    assert all(a > b for a, b in itertools.pairwise(rates[3:]))


def test_the_slurm_example_divides():
    script = (Path(__file__).parents[2] / "examples" / "slurm.sh").read_text()
    options = script[script.index("--tensor-parallel-degree") : script.rindex("--output")].replace("\\", " ").split()
    config = parse(options)
    shape = config.parallel.shape(4 * 8)
    assert (shape.tensor * shape.shard, shape.replicate) == (8, 4), "groups stay inside a node"
    config.micro_batches(shape.replicate * shape.shard)


def test_covered_is_the_length_of_a_union():
    assert covered([]) == 0
    assert covered([(5, 6), (0, 2), (1, 3), (2.5, 2.75)]) == 4


def test_the_command_stops_cleanly_on_sigterm(tmp_path, text):
    """The signal goes to torchrun, as a scheduler sends it, which passes it on."""
    output = tmp_path / "run"
    arguments = ["-m", "fsdp_tp.train", *TINY, "--data", text, "--output", output, "--steps", 100_000]
    with torchrun(2, *arguments) as process:
        deadline = time.monotonic() + 200
        while not (output / "metrics.jsonl").exists() or not (output / "metrics.jsonl").read_text():
            assert time.monotonic() < deadline, "no step within 200 seconds"
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=60)
    assert "stopped by SIGTERM after step" in printed
    saved = checkpoint.latest(output)
    assert saved is not None
    assert json.loads((saved / "manifest.json").read_text())["extra"]["step"] == int(saved.name.removeprefix("step-"))


def test_a_wrong_setting_is_a_sentence_in_the_commands_output(tmp_path, text):
    arguments = ["-m", "fsdp_tp.train", *TINY, "--data", text, "--output", tmp_path, "--tensor-parallel-degree", 3]
    with torchrun(2, *arguments) as process:
        printed, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert "tensor_parallel_degree=3 does not divide the world of 2 ranks; legal values: 1, 2" in printed


def test_main_without_torchrun_is_a_world_of_one(tmp_path, text, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert main([*TINY, "--data", str(text), "--output", str(tmp_path / "run")]) == 0
    assert checkpoint.latest(Path(tmp_path / "run")) == tmp_path / "run" / "step-6"
    assert main([*TINY, "--data", str(tmp_path / "absent")]) == 2
