"""If these fail, look in fsdp_tp/train/config.py: the command line and its file form."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fsdp_tp.train.config import TrainConfig, parse, read, write

OPTIONS = {
    "model": "model hidden_size intermediate_size num_layers num_heads num_kv_heads vocab_size tie_embeddings",
    "data": "data text_column tokenizer sequence_length",
    "optimizer": "steps global_batch_size micro_batch_size learning_rate final_learning_rate warmup_steps "
    "weight_decay betas max_grad_norm",
    "parallel": "tensor_parallel_degree hybrid_shard_degree context_parallel_degree pipeline_parallel_degree",
    "": "sequence_parallel loss_parallel activation_checkpointing compile comm precision output "
    "save_every save_in_background keep_last stop_after resume log_every measure_communication_every seed "
    "deterministic timeout",
}


def test_the_command_line_is_frozen():
    """An option that is renamed or lost breaks users' scripts: change this list only on purpose."""
    for group, names in OPTIONS.items():
        holder = getattr(TrainConfig(), group) if group else TrainConfig()
        fields = [field.name for field in dataclasses.fields(holder)]
        assert [name for name in fields if group or name not in OPTIONS] == names.split()


def test_every_option_is_a_flag_with_a_help_text(capsys):
    with pytest.raises(SystemExit) as exit:
        parse(["--help"])
    assert exit.value.code == 0
    help = capsys.readouterr().out
    for names in OPTIONS.values():
        for name in names.split():
            assert f"--{name.replace('_', '-')}" in help
    assert "--config FILE" in help


def test_flags_set_fields():
    config = parse(
        (
            "--hidden-size 64 --tensor-parallel-degree 2 --data a.txt b --precision bf16 --no-resume --betas 0.8 0.9"
        ).split()
    )
    assert config.model.hidden_size == 64
    assert config.parallel.tensor_parallel_degree == 2
    assert config.data.data == (Path("a.txt"), Path("b"))
    assert (config.precision, config.resume, config.optimizer.betas) == ("bf16", False, (0.8, 0.9))


def test_a_written_config_reads_back_and_flags_override_it(tmp_path):
    config = parse(["--data", "x.txt", "--model", "dir", "--steps", "7", "--comm", "torch"])
    write(config, tmp_path / "config.json")
    assert read(tmp_path / "config.json") == config
    again = parse([f"--config={tmp_path / 'config.json'}", "--steps", "9"])
    assert again == parse(["--config", str(tmp_path / "config.json"), "--steps", "9"])
    assert again.optimizer.steps == 9
    assert again.data == config.data


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", r"config file .*c.json cannot be read: Expecting property name"),
        ("[]", "expected an object with fields of TrainConfig, not list"),
        ('{"optimiser": {}}', "unknown field optimiser; legal: activation_checkpointing, comm, "),
        ('{"optimizer": {"steps": "many"}}', "steps='many' must be of type int"),
        ('{"optimizer": {"steps": true}}', "steps=True must be of type int"),
        ('{"optimizer": {"steps": 0}}', "steps=0 must be at least 1"),
        ('{"optimizer": {"betas": [0.9]}}', r"betas=\[0.9\] must be of type"),
        ('{"precision": "fp8"}', "precision='fp8' must be one of 'fp32', 'bf16'"),
        ('{"parallel": {"tensor_parallel_degree": 0}}', "tensor_parallel_degree=0 must be an integer of at least 1"),
        ('{"parallel": {"context_parallel_degree": 2}}', "context_parallel_degree=2: the trainer can only do 1"),
        ("\xff\xfe", "cannot be read"),
    ],
)
def test_a_corrupt_config_is_one_sentence(tmp_path, text, sentence):
    (tmp_path / "c.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=sentence):
        parse(["--config", str(tmp_path / "c.json")])


def test_a_config_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: .*No such file"):
        parse(["--config", str(tmp_path / "none.json")])
    with pytest.raises(ValueError, match="--config needs the path"):
        parse(["--config"])


def test_batches_that_do_not_divide():
    config = TrainConfig()
    assert config.micro_batches(4) == (2, 1)
    with pytest.raises(ValueError, match="global_batch_size=8 must be a multiple of the 3 data ranks"):
        config.micro_batches(3)
    config = parse(["--micro-batch-size", "3"])
    with pytest.raises(ValueError, match="micro_batch_size=3 does not divide the 4 sequences of a data rank"):
        config.micro_batches(2)
    assert parse(["--micro-batch-size", "1"]).micro_batches(2) == (1, 4)


def test_json_of_the_defaults_has_every_field(tmp_path):
    write(TrainConfig(), tmp_path / "config.json")
    assert read(tmp_path / "config.json") == TrainConfig()
    assert json.loads((tmp_path / "config.json").read_text())["parallel"]["tensor_parallel_degree"] == 1
