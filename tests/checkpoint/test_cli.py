"""``python -m fsdp_tp.checkpoint``, called in this process.

If numbers of ``inspect`` are wrong look at fsdp_tp/checkpoint/inspection.py; if a conversion fails at convert.py, or,
if values differ, at what it calls: load and save (test_layouts.py), load_hf and save_hf (test_hugging_face.py).
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from fsdp_tp import checkpoint
from fsdp_tp.checkpoint.cli import main
from tests import families, models

# Of models.SIZES: the embedding (also the head); q and o, k and v, gate and up and down, and two norms of each layer;
# the last norm. fp32.
HIDDEN, MLP, KEY_VALUE, LAYERS = 32, 48, 16, 2
PARAMETERS = (
    models.VOCABULARY * HIDDEN
    + LAYERS * (2 * HIDDEN * HIDDEN + 2 * KEY_VALUE * HIDDEN + 3 * MLP * HIDDEN + 2 * HIDDEN)
    + HIDDEN
)
TENSORS = 1 + LAYERS * 9 + 1


def _llama(**overrides):
    model = models.hugging_face("llama", **{"tie_word_embeddings": True, **overrides}).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return model


def _save(path, model, **extra):
    """With an optimizer that has made a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(models.batch()).logits.square().mean().backward()
    optimizer.step()
    checkpoint.save(path, model=model, optimizer=optimizer, extra=extra)


def _logits(model):
    with torch.no_grad():
        return model(models.batch()).logits


def _flip_bit(file, at=-1):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.fixture
def fails(capsys):
    """Calls main, which must fail with one sentence on stderr, and returns that."""

    def call(*arguments, status=2):
        assert main([str(argument) for argument in arguments]) == status
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        return captured.err

    return call


def test_inspect_tells_what_is_stored(tmp_path, capsys):
    _save(tmp_path / "run/step-3", _llama(), step=3)
    _save(tmp_path / "run/step-20", _llama(), step=20)
    assert main(["inspect", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], found["step"], found["layout"]) == (str(tmp_path / "run/step-20"), 20, "1 rank(s)")
    on_disk = [file.stat().st_size for file in (tmp_path / "run/step-20").glob("*.safetensors")]
    assert found["files"] == {"count": len(on_disk), "bytes": sum(on_disk)}

    model, optimizer = found["model"], found["optimizer"]
    every = {"tensors": TENSORS, "dtype": "F32", "values": PARAMETERS, "bytes": 4 * PARAMETERS, "chunks": TENSORS}
    assert model["total"] == every
    assert model["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    by_name = {row["name"]: row for row in model["tensors"]}
    assert len(by_name) == TENSORS
    down = {"dtype": "F32", "shape": [HIDDEN, MLP], "bytes": 4 * HIDDEN * MLP, "chunks": 1}
    name = "model.layers.1.mlp.down_proj.weight"
    assert by_name[name] == {"name": name, **down}
    steps = {"tensors": TENSORS, "dtype": "F32", "values": TENSORS, "bytes": 4 * TENSORS, "chunks": TENSORS}
    assert optimizer["keys"] == {"step": steps, "exp_avg": every, "exp_avg_sq": every}
    assert optimizer["total"]["bytes"] == 4 * (2 * PARAMETERS + TENSORS)

    assert main(["inspect", str(tmp_path / "run/step-3"), "--json", "--all"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 3
    rows = found["optimizer"]["tensors"]
    assert len(rows) == 3 * TENSORS
    assert {"name": f"optimizer.state.{name}.exp_avg", **down} in rows


def test_inspect_prints_a_table(tmp_path, capsys):
    _save(tmp_path / "step-3", _llama(), step=3)
    assert main(["inspect", str(tmp_path / "step-3")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path / 'step-3'}, step 3"
    assert lines[1].startswith("written by 1 rank(s); 2 files, ")

    def cells(start):
        (line,) = (line for line in lines if line.startswith(f"│ {start} "))
        return [cell.strip() for cell in line.strip("│").split("│")][1:]

    assert cells("model.layers.0.mlp.down_proj.weight") == ["F32", "32 x 48", "6.1 kB", "1"]
    assert cells("lm_head.weight") == ["", "= model.embed_tokens.weight", "", ""]
    values = f"{PARAMETERS:,} values in {TENSORS}"
    for name in ("optimizer: exp_avg", "total: model"):
        assert cells(name) == ["F32", values, f"{4 * PARAMETERS / 1000:.1f} kB", str(TENSORS)]
    assert not any("optimizer.state" in line for line in lines)


def test_verify_names_what_is_damaged(tmp_path, capsys):
    for step in (1, 2, 3, 4):
        _save(tmp_path / f"step-{step}", _llama())
    assert main(["verify", str(tmp_path)]) == 0
    fine = "{} is complete and undamaged".format
    names = [tmp_path / f"step-{step}" for step in (1, 2, 3, 4)]
    assert capsys.readouterr().out.splitlines() == [fine(name) for name in names]

    flipped, shorter = names[0] / "optimizer-00000.safetensors", names[2] / "model-00000.safetensors"
    _flip_bit(flipped)
    size = shorter.stat().st_size
    shorter.write_bytes(shorter.read_bytes()[:-1])
    (names[3] / "manifest.json").unlink()
    assert main(["verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{flipped} is damaged: its digest is not what was written",
        fine(names[1]),
        f"{shorter} has {size - 1:,} bytes and had {size:,}",
        f"{names[3]} is not a complete checkpoint: it has no manifest.json",
    ]
    assert main(["verify", str(names[1]), str(names[0])]) == 1
    capsys.readouterr()
    assert main(["verify", str(names[1])]) == 0
    assert capsys.readouterr().out == fine(names[1]) + "\n"


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("llama", {"tie_word_embeddings": True}), ("t5", {}), ("qwen3_moe", {})],
    ids=["tied llama", "encoder and decoder", "experts, which files hold one by one"],
)
def test_to_hugging_face_and_back(family, overrides, tmp_path):
    model = (_llama() if family == "llama" else families.build(family, **overrides)).eval()
    checkpoint.save(tmp_path / "step-1", model=model)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path / "config")
    there = ["convert", str(tmp_path), str(tmp_path / "hf"), "--to", "hf", "--config", str(tmp_path / "config")]
    assert main(there) == 0
    loaded, report = type(model).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values()), report
    inputs = {"input_ids": models.batch()}
    if family == "t5":
        inputs["decoder_input_ids"] = models.batch(1)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**inputs).logits, model(**inputs).logits)

    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "back/step-1"), "--to", "fsdp_tp"]) == 0
    assert _model_of(tmp_path / "back/step-1") == _model_of(tmp_path / "step-1")


def _model_of(path):
    """Every byte: the same tensors in the same order make the same file."""
    return (path / "model-00000.safetensors").read_bytes()


def test_dtypes_are_those_of_the_source_unless_asked_for(tmp_path):
    model = _llama().to(torch.bfloat16)
    checkpoint.save(tmp_path / "step-1", model=model)
    model.config.save_pretrained(tmp_path)
    config = ["--config", str(tmp_path / "config.json")]

    def converted(source, name, *options):
        assert main(["convert", str(source), str(tmp_path / name), *options]) == 0
        (file,) = (tmp_path / name).glob("model*.safetensors")
        return load_file(file)

    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    for name, dtype, options in (("same", torch.bfloat16, []), ("wide", torch.float32, ["--dtype", "fp32"])):
        for found in (
            converted(tmp_path / "step-1", f"hf-{name}", "--to", "hf", *config, *options),
            converted(tmp_path / "hf-same", f"back-{name}", "--to", "fsdp_tp", *options),
        ):
            assert found.keys() == expected.keys()
            assert all(torch.equal(tensor, expected[key].to(dtype)) for key, tensor in found.items())
            assert {tensor.dtype for tensor in found.values()} == {dtype}
        assert json.loads((tmp_path / f"hf-{name}/config.json").read_text())["dtype"] == str(dtype).split(".")[1]


def test_what_the_trainer_saved_needs_no_config(tmp_path):
    """Its extra has the settings; the sizes here are those of models.SIZES, except for unset ones."""
    model = _llama(rope_theta=10000.0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": MLP, "num_layers": LAYERS, "num_heads": 4, "num_kv_heads": 2}
    settings = {"model": None, **sizes, "vocab_size": 0, "tie_embeddings": True}
    trained = {"model": settings, "data": {"sequence_length": 64}}
    checkpoint.save(tmp_path / "step-1", model=model, extra={"step": 1, "config": trained})
    assert main(["convert", str(tmp_path), str(tmp_path / "hf"), "--to", "hf"]) == 0
    loaded = type(model).from_pretrained(tmp_path / "hf").eval()
    assert loaded.config.vocab_size == models.VOCABULARY
    assert torch.equal(_logits(loaded), _logits(model))


def test_errors_are_one_sentence(tmp_path, fails):
    model = _llama()
    checkpoint.save(tmp_path / "step-1", model=model)
    model.config.save_pretrained(tmp_path / "config")
    config = ("--config", tmp_path / "config")
    nowhere = tmp_path / "nowhere"
    assert "neither a complete checkpoint nor a directory of" in fails("inspect", nowhere)
    assert "nowhere is not a directory" in fails("verify", nowhere)
    to_hf = ("convert", tmp_path, tmp_path / "hf", "--to", "hf")
    assert "--config" in fails(*to_hf)
    assert "not a readable config.json" in fails(*to_hf, "--config", nowhere)
    assert "exists and is not empty" in fails("convert", tmp_path, tmp_path / "config", "--to", "hf", *config)
    assert "neither model.safetensors nor" in fails("convert", tmp_path / "config", nowhere, "--to", "fsdp_tp")
    other = _llama(num_hidden_layers=1)
    other.config.save_pretrained(tmp_path / "other")
    sentence = fails(*to_hf, "--config", tmp_path / "other")
    assert "unexpected: model.layers.1.input_layernorm.weight" in sentence
    checkpoint.save(tmp_path / "untied/step-1", model=_llama(tie_word_embeddings=False))
    sentence = fails("convert", tmp_path / "untied", *to_hf[2:], *config)
    assert "lm_head.weight is tied to model.embed_tokens.weight here" in sentence
    _flip_bit(tmp_path / "step-1/model-00000.safetensors")
    assert "is damaged" in fails(*to_hf, *config)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("arguments", ["", "verify", "convert a b --to numpy", "inspect", "inspect a --unknown"])
def test_wrong_arguments_are_status_2(arguments, capsys):
    try:
        status = main(arguments.split())
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert "Traceback" not in capsys.readouterr().err
