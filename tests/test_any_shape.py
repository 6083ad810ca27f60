"""Shapes that no degree divides. If these fail, look in fsdp_tp/layers/heads.py, split.py and canonical.py.

The reference is one process; in fp64 rounding leaves 1e-10 (fsdp_tp/parity/judge.py), a wrong head O(1).
"""

from __future__ import annotations

import functools

import pytest
import torch

import fsdp_tp
from fsdp_tp import checkpoint
from fsdp_tp.layers import canonical
from fsdp_tp.layers.canonical import arranged_parameters
from fsdp_tp.layers.split import ZERO
from fsdp_tp.parity import assert_parity
from tests import models
from tests.families import SIZES, steep_adamw
from tests.ranks import run, workers

ALL = "sequence_parallel,loss_parallel,activation_checkpointing"
HEAD_WIDTH, MLP, VOCABULARY = 8, 49, 67  # 49 on 8 ranks in chunks would leave the last one nothing
SHAPES = [
    ("llama", 9, 3, ["tensor=2", "tensor=4", f"tensor=2,shard=2,{ALL}"]),
    ("qwen3", 8, 1, ["tensor=4"]),
    ("qwen2", 8, 2, [f"tensor=4,shard=2,{ALL}"]),
    ("llama", 5, 5, ["tensor=2"]),
    ("llama", 12, 4, ["tensor=8"]),
    ("phi3", 6, 2, ["tensor=4"]),
    ("gpt2", 5, 5, ["tensor=2"]),
    ("gpt_neox", 5, 5, ["tensor=2"]),
    ("falcon", 5, 1, ["tensor=3"]),
    ("bloom", 3, 3, ["tensor=4"]),
    ("olmo2", 6, 2, ["tensor=3"]),
]


def build(family, heads, kv_heads):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(SIZES.get(family, models.SIZES))
    values = {
        "num_attention_heads": heads,
        "n_head": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": HEAD_WIDTH * heads,
        "n_embd": HEAD_WIDTH * heads,
        "intermediate_size": MLP,
        "ffn_hidden_size": MLP,
        "vocab_size": VOCABULARY,
    }
    sizes |= {name: value for name, value in values.items() if name in sizes}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))


@pytest.mark.parametrize(("family", "heads", "kv_heads", "layouts"), SHAPES, ids=lambda value: str(value)[:12])
def test_any_head_count_trains_on_any_degree(family, heads, kv_heads, layouts):
    """Three AdamW steps with weight decay, heads, mlp width and vocabulary that do not divide."""
    report = assert_parity(
        functools.partial(build, family, heads, kv_heads),
        [models.batch(step) for step in range(3)],
        layouts=layouts,
        dtype=torch.float64,
        optimizer=steep_adamw,
        workers=workers,
    )
    assert report.verdict == "equal"


def _train(family, heads, kv_heads, degrees, steps, seed=1):
    mesh = fsdp_tp.init_mesh(**degrees)
    with torch.device("meta"):
        model = build(family, heads, kv_heads)
    fsdp_tp.wrap(model, mesh, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    for step in range(steps):
        model(models.batch(step)).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _save(family, heads, kv_heads, path):
    """On one process: everything is plain."""
    model, optimizer = _train(family, heads, kv_heads, {}, 2)
    checkpoint.save(path, model=model, optimizer=optimizer)
    return _contents(model, optimizer), model(models.batch()).logits.detach()


def _contents(model, optimizer):
    state = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        state |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return {name: models.gather(value) for name, value in state.items()}


def _pass_on(family, heads, kv_heads, degrees, source, target):
    """Reads what one process wrote, and writes it again."""
    model, optimizer = _train(family, heads, kv_heads, degrees, 1, seed=2)
    checkpoint.load(source, model=model, optimizer=optimizer)
    checkpoint.save(target, model=model, optimizer=optimizer)
    weights = {name: models.gather(value) for name, value in model.state_dict().items()}
    return weights, model(models.batch()).logits.detach()


def _load(family, heads, kv_heads, path):
    model, optimizer = _train(family, heads, kv_heads, {}, 0, seed=3)
    checkpoint.load(path, model=model, optimizer=optimizer)
    return _contents(model, optimizer)


@pytest.mark.parametrize(
    ("shape", "tensor"),
    # padding, packed weights of which ranks share a part, and padding along dim 1
    [(("llama", 9, 3), (4, 2)), (("phi3", 6, 2), (4,)), (("gpt2", 5, 5), (2,))],
    ids=["llama", "phi3", "gpt2"],
)
def test_checkpoints_and_state_dicts_show_nothing_of_it(tmp_path, shape, tensor):
    """One process -> tensor 4, or tensor 2 x shard 2 -> one process: model and optimizer, bit for bit."""
    ((saved, logits),) = run(1, _save, *shape, tmp_path / "one-1")
    for degree in tensor:
        passed = tmp_path / f"many-{degree}"
        degrees = {"tensor_parallel_degree": degree}
        for weights, rank_logits in run(4, _pass_on, *shape, degrees, tmp_path / "one-1", passed):
            assert all(torch.equal(weight, saved[name]) for name, weight in weights.items())
            torch.testing.assert_close(rank_logits, logits, rtol=1e-4, atol=1e-5)  # fp32, sums in another order
        (loaded,) = run(1, _load, *shape, passed)
        assert loaded.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.equal(loaded[name], tensor), name


def _padding(family, heads, kv_heads):
    """Padding after steps with momentum and weight decay, and whole tensors that a state dict may bring."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model, optimizer = _train(family, heads, kv_heads, {"tensor_parallel_degree": 2}, 3)
    arranged = arranged_parameters(model)
    padded = 0
    for name, (split, dim) in arranged.items():
        parameter = model.get_parameter(name)
        rows = (split.stored == ZERO).nonzero().flatten()
        padded += rows.numel()
        for tensor in (parameter, optimizer.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg_sq"]):
            assert not models.gather(tensor).index_select(dim, rows).any(), name
    plain = build(family, heads, kv_heads)
    whole = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=whole)
    plain.load_state_dict(state)  # the shapes and names of the plain model
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1)
    model.load_state_dict(plain.state_dict())
    after = get_model_state_dict(model, options=whole)
    assert all(torch.equal(after[name], value) for name, value in plain.state_dict().items())
    return padded


def test_padding_stays_zero_and_whole_state_dicts_go_in_and_out():
    assert all(padded > 0 for padded in run(4, _padding, "llama", 9, 3))
    run(4, _padding, "phi3", 6, 2)


def _gathers(path):
    """The weights that a load gathers: with momentum and variance three a parameter, to store what it read."""
    model, optimizer = _train("llama", 9, 3, {"tensor_parallel_degree": 2}, 1)
    checkpoint.save(path / "step-1", model=model, optimizer=optimizer)
    gathered = []
    with pytest.MonkeyPatch.context() as patch:
        whole = canonical._whole
        patch.setattr(canonical, "_whole", lambda tensor: gathered.append(tensor) or whole(tensor))
        checkpoint.load(path / "step-1", model=model, optimizer=optimizer)
    return len(gathered), 3 * len(arranged_parameters(model))


def test_a_load_gathers_nothing_only_to_learn_its_shape(tmp_path):
    for gathered, expected in run(2, _gathers, tmp_path):
        assert gathered == expected > 0


def _factored(path):
    """Optimizer state of other shapes than the parameter's, as Adafactor (arXiv 1804.04235) keeps."""
    model, optimizer = _train("llama", 9, 3, {"tensor_parallel_degree": 2}, 1)
    name, (_, dim) = next(iter(arranged_parameters(model).items()))
    state = optimizer.state[model.get_parameter(name)]
    rows = model.get_parameter(name).shape[dim]
    state["factor"] = torch.ones(1, rows + 1)
    checkpoint.save(path / "columns-1", model=model, optimizer=optimizer)
    state["factor"] = torch.zeros(1, rows + 1)
    checkpoint.load(path / "columns-1", model=model, optimizer=optimizer)
    assert torch.equal(optimizer.state[model.get_parameter(name)]["factor"], torch.ones(1, rows + 1))
    optimizer.state[model.get_parameter(name)]["factor"] = torch.ones(rows, 1)
    with pytest.raises(ValueError, match=rf"state.{name}.factor has the shape \({rows}, 1\)"):
        checkpoint.save(path / "rows-1", model=model, optimizer=optimizer)


def test_factored_optimizer_state_is_kept_as_it_is_or_refused(tmp_path):
    run(2, _factored, tmp_path)
