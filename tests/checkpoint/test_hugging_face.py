"""Hugging Face checkpoints in and out against transformers itself.

If a family fails, look at how its names and shapes are matched in fsdp_tp/checkpoint/names.py; if values differ, at
own_part_of and put_stored_part in fsdp_tp/layers/canonical.py.
"""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import fsdp_tp
from fsdp_tp.checkpoint import hugging_face
from fsdp_tp.checkpoint.hugging_face import load_hf, save_hf
from fsdp_tp.checkpoint.names import Storing, find_tensors
from fsdp_tp.plans import families as known_families
from tests import families, models
from tests.memory import AllocationTracker
from tests.ranks import run

FOUR = dict(tensor_parallel_degree=2, hybrid_shard_degree=2)
THREE = dict(tensor_parallel_degree=3)
SMALL = 20_000
"""Bytes of one file, where there are to be several."""


def _original(family, **overrides):
    """No two weights alike: of new models all biases are zeros, and all norms ones."""
    model = families.build(family, **overrides).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return model


def _wrapped(family, degrees, **overrides):
    mesh = fsdp_tp.init_mesh(**degrees)
    with torch.device("meta"):
        model = families.build(family, **overrides)
    return fsdp_tp.wrap(model, mesh)


def _state(model):
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def _assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def _logits(model, family):
    ids = models.batch()[:2]
    arguments = {"decoder_input_ids": ids.flip(0)} if family == "t5" else {}
    with torch.no_grad():
        return model(input_ids=ids, **arguments).logits


def _stored(directory):
    return {key: tensor for file in directory.glob("*.safetensors") for key, tensor in load_file(file).items()}


def _round_trip(family, degrees, root, shard_bytes, overrides):
    model = _wrapped(family, degrees, **overrides)
    load_hf(model, root / "theirs")
    _assert_equal(_state(model), torch.load(root / "state.pt"))
    save_hf(model, root / "ours", max_shard_bytes=shard_bytes)


def _check_round_trip(family, degrees, root, *, shard_bytes=10**9, **overrides):
    """What ``save_pretrained`` wrote into shards, and back."""
    size = 3 if degrees == THREE else 4
    original = _original(family, **overrides)
    original.save_pretrained(root / "theirs", max_shard_size=shard_bytes)
    torch.save(original.state_dict(), root / "state.pt")
    run(size, _round_trip, family, degrees, root, shard_bytes, overrides)

    _assert_equal(_stored(root / "ours"), _stored(root / "theirs"))
    count = len(list((root / "ours").glob("*.safetensors")))
    assert (count > 1) == (root / "ours" / "model.safetensors.index.json").exists() == (shard_bytes == SMALL)
    assert not list(root.glob(".*")), "the temporary directory is left"
    loaded, report = type(original).from_pretrained(root / "ours", output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(_logits(loaded.eval(), family), _logits(original, family))
    if original.can_generate():
        assert loaded.generation_config.to_dict() == original.generation_config.to_dict()


@pytest.mark.parametrize("family", known_families())
def test_every_family_goes_in_and_out_bit_for_bit(family, tmp_path):
    """From one file to one, every second family from several to several."""
    is_sharded = known_families().index(family) % 2 == 1
    _check_round_trip(family, FOUR, tmp_path, shard_bytes=SMALL if is_sharded else 10**9)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("phi3", dict(intermediate_size=49, vocab_size=67)),
        ("gpt2", dict(vocab_size=67)),
        ("qwen3_moe", dict(num_experts=11, moe_intermediate_size=28)),
    ],
)
def test_packed_weights_and_experts_on_an_odd_degree(family, overrides, tmp_path):
    """Four query and two key/value heads on three ranks; more than ten experts, whose names do not sort as numbers."""
    _check_round_trip(family, THREE, tmp_path, **overrides)


@pytest.mark.parametrize(
    "degrees", [dict(hybrid_shard_degree=2), dict(tensor_parallel_degree=2, context_parallel_degree=2)]
)
def test_parts_that_several_ranks_have(degrees, tmp_path):
    """Replicas under hybrid sharding, and ranks of an axis that shards nothing."""
    _check_round_trip("phi3", degrees, tmp_path)


def _load_variants(family, paths, state_path, overrides):
    model = _wrapped(family, {"tensor_parallel_degree": 2}, **overrides)
    expected, fresh = torch.load(state_path), fsdp_tp.initialize
    for path in paths:
        fresh(model, seed=3)
        load_hf(model, path)
        _assert_equal(_state(model), expected)


def _check_variants(family, original, paths, root, **overrides):
    torch.save(original.state_dict(), root / "state.pt")
    run(2, _load_variants, family, paths, root / "state.pt", overrides)


def _variant(root, name, tensors):
    (root / name).mkdir()
    save_file(tensors, root / name / "model.safetensors", metadata={"format": "pt"})
    return root / name


def test_without_the_prefix_and_with_the_buffers_of_old_checkpoints(tmp_path):
    """As the first GPT-2 files are."""
    original = _original("gpt2")
    assert original.lm_head.weight is original.transformer.wte.weight
    tensors = {key: tensor.clone() for key, tensor in original.transformer.state_dict().items()}
    old = {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in (0, 1)}
    paths = [_variant(tmp_path, "base", tensors), _variant(tmp_path, "old", tensors | old)]
    _check_variants("gpt2", original, paths, tmp_path)


def test_with_names_that_transformers_renames(tmp_path):
    original = _original("bert")
    tensors = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor.clone()
        for key, tensor in original.state_dict().items()
        if not key.startswith("cls.predictions.decoder")  # tied
    }
    assert any(key.endswith("gamma") for key in tensors)
    old = {"bert.embeddings.position_ids": torch.arange(64)[None]}
    _check_variants("bert", original, [_variant(tmp_path, "old", tensors | old)], tmp_path)


def test_experts_that_are_stored_merged(tmp_path):
    original = _original("mixtral")
    original.save_pretrained(tmp_path / "merged", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in _stored(tmp_path / "merged")
    _check_variants("mixtral", original, [tmp_path / "merged"], tmp_path)


def _other_dtypes(root):
    model = _wrapped("llama", FOUR)
    load_hf(model, root / "bf16")
    _assert_equal(_state(model), {name: each.float() for name, each in torch.load(root / "state.pt").items()})
    save_hf(model, root / "ours", dtype=torch.bfloat16)


def test_bf16_into_an_fp32_model_and_back(tmp_path):
    original = _original("llama").bfloat16()
    original.save_pretrained(tmp_path / "bf16")
    torch.save(original.state_dict(), tmp_path / "state.pt")
    run(4, _other_dtypes, tmp_path)
    _assert_equal(_stored(tmp_path / "ours"), _stored(tmp_path / "bf16"))
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "bfloat16"


def _fails(family, path, error):
    """What it says, and that nothing was loaded."""
    model = _wrapped(family, {"tensor_parallel_degree": 2})
    before = _state(model)
    with pytest.raises(error) as caught:
        load_hf(model, path)
    _assert_equal(_state(model), before)
    return str(caught.value)


def _sentence(family, path, error=ValueError):
    """The same on both ranks."""
    first, second = run(2, _fails, family, path, error)
    assert first == second
    return first


def test_all_that_does_not_fit_is_listed(tmp_path):
    tensors = dict(_original("gemma").state_dict())
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    tensors["model.norm.bias"] = tensors.pop("model.norm.weight")
    key = "model.layers.1.self_attn.k_proj.weight"
    tensors[key] = tensors[key][:-8].clone()
    path = _variant(tmp_path, "checkpoint", tensors)
    assert _sentence("gemma", path) == (
        f"the checkpoint in {path} is not one of this model; missing: model.norm.weight; unexpected: model.norm.bias; "
        "of another shape: model.layers.1.self_attn.k_proj.weight is (8, 32) and must be (16, 32); "
        "tied in the model and different here: model.embed_tokens.weight and lm_head.weight"
    )


def test_experts_that_do_not_fit(tmp_path):
    _original("mixtral").save_pretrained(tmp_path / "whole")
    tensors = _stored(tmp_path / "whole")
    prefix = "model.layers.0.block_sparse_moe.experts.3"
    assert f"{prefix}.w1.weight" in tensors
    for number in (1, 3):
        key = f"{prefix[:-1]}{number}.w1.weight"
        path = _variant(tmp_path, f"without {number}", {each: tensors[each] for each in tensors if each != key})
        assert (
            "model.layers.0.mlp.experts.gate_up_proj is joined from the same experts of each kind: of "
            f".experts.*.w1.weight there are {[each for each in range(4) if each != number]}"
        ) == _sentence("mixtral", path)
    expert = _variant(tmp_path, "expert", {key: each for key, each in tensors.items() if not key.startswith(prefix)})
    assert "gate_up_proj is (3, 96, 32) and must be (4, 96, 32)" in _sentence("mixtral", expert)
    other = {f"{prefix}.w2.weight": tensors[f"{prefix}.w2.weight"][:, :40].clone()}
    assert "the experts of model.layers.0.mlp.experts.down_proj must have one shape" in _sentence(
        "mixtral", _variant(tmp_path, "other", tensors | other)
    )


def test_one_tensor_under_two_names_of_which_the_model_has_one(tmp_path):
    tensors = {key: each.clone() for key, each in _original("gpt2").transformer.state_dict().items()}
    path = _variant(tmp_path, "twice", tensors | {"transformer.wte.weight": tensors["wte.weight"].clone()})
    assert (
        _sentence("gpt2", path) == "transformer.wte.weight and wte.weight are both transformer.wte.weight of the model"
    )


def test_files_that_are_damaged_absent_or_elsewhere(tmp_path):
    original = _original("llama")
    original.save_pretrained(tmp_path / "good", max_shard_size=SMALL)
    index = json.loads((tmp_path / "good" / "model.safetensors.index.json").read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    key = next(key for key, file in index["weight_map"].items() if file == first)

    def changed(name, target, cut=False):
        directory = tmp_path / name
        directory.mkdir()
        for file in (tmp_path / "good").glob("*.safetensors"):
            (directory / file.name).write_bytes(file.read_bytes()[: -4 if cut and file.name == first else None])
        weight_map = {**index["weight_map"], **({key: target} if target else {})}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return directory

    elsewhere = tmp_path / "good" / first
    for name, target in {"up": f"../good/{first}", "root": str(elsewhere), "down": f"a/../../good/{first}"}.items():
        assert f"lists {target!r}: its files must be in its own directory" in _sentence("llama", changed(name, target))
    assert "lists other.safetensors, not in" in _sentence("llama", changed("absent", "other.safetensors"))
    others = sorted(set(index["weight_map"].values()))
    assert f"{key} should be in" in _sentence("llama", changed("moved", others[1]))
    assert "has no weight_map of names to files" in _sentence("llama", changed("number", 3))
    assert f"{first}" in (sentence := _sentence("llama", changed("cut", None, cut=True)))
    assert "cut off" in sentence
    (tmp_path / "empty").mkdir()
    assert "neither model.safetensors nor model.safetensors.index.json is in" in _sentence("llama", tmp_path / "empty")
    twice = changed("twice", None)
    save_file({**load_file(twice / others[1]), key: torch.ones(1)}, twice / others[1])
    assert f"{key} in {twice / others[1]} and in another file" in _sentence("llama", twice)


def _cannot_save(root):
    model = _wrapped("llama", {"tensor_parallel_degree": 2})
    with pytest.raises(ValueError, match="full exists and is not empty; save to a new one or remove it"):
        save_hf(model, root / "full")
    with pytest.raises(ValueError, match="max_shard_bytes=0 must be at least 1"):
        save_hf(model, root / "new", max_shard_bytes=0)
    with pytest.raises(ValueError, match="dtype=torch.int8 must be None or a floating-point type"):
        save_hf(model, root / "new", dtype=torch.int8)

    def twice(*args, **kwargs):
        if len(count) == 2:
            raise OSError("no space left")
        count.append(1)
        return write(*args, **kwargs)

    write, count = hugging_face.write_tensors, []
    if dist.get_rank() == 0:
        hugging_face.write_tensors = twice
    try:
        with pytest.raises(OSError, match="new cannot be written: no space left"):
            save_hf(model, root / "new", max_shard_bytes=SMALL)
    finally:
        hugging_face.write_tensors = write
    save_hf(model, root / "new")


def test_saving_that_is_refused_or_fails_does_so_on_every_rank_and_leaves_nothing(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "new").mkdir()  # empty is fine
    run(2, _cannot_save, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "new"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_conversions_that_are_not_offered_are_named(monkeypatch):
    from transformers import conversion_mapping
    from transformers.core_model_loading import Chunk, WeightConverter

    model = _original("llama")
    parts = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    converters = [WeightConverter("self_attn.qkv.weight", parts, [Chunk(dim=0)])]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *args, **kwargs: converters)
    names = set(model.state_dict())
    with pytest.raises(ValueError, match=r"q_proj.weight from model.layers.0.self_attn.qkv.weight by Chunk\(dim=0\)"):
        find_tensors(model, names, {"model.layers.0.self_attn.qkv.weight": torch.ones(64, 32)})
    name = "model.layers.0.self_attn.q_proj.weight"
    assert list(Storing(model).convert(name, torch.ones(2))) == [name], "one third of a tensor would be stored as all"


class _Plain(nn.Module):
    """Tied, and with buffers of several dtypes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(6)


def _plain(root):
    expected = _Plain()
    torch.manual_seed(1)
    for tensor in expected.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape) * 9)
    model = fsdp_tp.fully_shard(_Plain())
    if dist.get_rank() == 0:
        _variant(root, "theirs", {k: v for k, v in expected.state_dict().items() if k != "second.weight"})
    dist.barrier()
    load_hf(model, root / "theirs")
    _assert_equal(_state(model), expected.state_dict())
    save_hf(model, root / "ours")


def test_a_model_that_transformers_does_not_know(tmp_path):
    run(2, _plain, tmp_path)
    _assert_equal(_stored(tmp_path / "ours"), _stored(tmp_path / "theirs"))
    assert [path.name for path in (tmp_path / "ours").iterdir()] == ["model.safetensors"]


def test_without_a_process_group(tmp_path):
    original, model = _original("llama"), families.build("llama")
    save_hf(original, tmp_path / "ours", max_shard_bytes=SMALL)
    load_hf(model, tmp_path / "ours")
    _assert_equal(model.state_dict(), original.state_dict())


WIDE = dict(hidden_size=256, intermediate_size=512, vocab_size=1024)


def _memory(family, root):
    model = _wrapped(family, FOUR, **WIDE)
    parameters = dict(model.named_parameters())
    part = max(parameter.to_local().nbytes for parameter in parameters.values())
    whole = max(parameter.numel() * 4 for parameter in parameters.values())
    expert = max((each.nbytes // len(each) for each in _state(model).values() if each.ndim == 3), default=0)
    with AllocationTracker() as loading:
        load_hf(model, root / "theirs")
    with AllocationTracker() as saving:
        save_hf(model, root / "ours", max_shard_bytes=whole)
    return loading.peak, saving.peak, part, whole, expert


@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral"])
def test_a_rank_takes_memory_for_one_slice_to_load_and_for_one_tensor_to_save(family, tmp_path):
    """Of what operations return; that mapped bytes take none is in test_mapped. Indices of rows, and messages in which
    ranks say that all is well: 4 KiB."""
    _original(family, **WIDE).save_pretrained(tmp_path / "theirs")
    for rank, (loading, saving, part, whole, expert) in enumerate(run(4, _memory, family, tmp_path)):
        print(f"{family} rank {rank}: {loading=} {saving=} {part=} {whole=} {expert=}")
        assert loading <= {"llama": 0, "phi3": part, "mixtral": part + expert}[family] + 4096
        if rank == 0:
            one_by_one = whole if expert else 0
            assert saving <= whole + whole + one_by_one + part + 4096  # a file, a tensor, and what arrives
        else:
            assert saving <= part + 4096
