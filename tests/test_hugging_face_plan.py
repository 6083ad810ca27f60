"""Models that plan "auto" does not know: fsdp_tp/plans/hugging_face.py, rehearsal.py and suggest.py."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import fsdp_tp
from fsdp_tp.parity import assert_parity
from fsdp_tp.plans import auto_plan, match_plan
from fsdp_tp.plans.hugging_face import hugging_face_plan
from fsdp_tp.plans.suggest import suggest_plan
from tests import families, models
from tests.ranks import run, workers

pytestmark = pytest.mark.filterwarnings("ignore:.*not in the README's table")


def _build(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**models.SIZES, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "starcoder2", "phi", "gpt_neox", "gptj", "cohere"])
def test_it_finds_the_plans_that_were_written_by_hand(family, sequence_parallel, one_process):
    model = families.build(family)
    by_hand = match_plan(model, auto_plan(model, DeviceMesh("cpu", [0])).styles)
    if not sequence_parallel:  # then it leaves out what has no meaning
        by_hand = {path: style for path, style in by_hand.items() if style != "split_sequence"}
    found = hugging_face_plan(model, 2, sequence_parallel=sequence_parallel)
    whole = ("sequence", "sequence_gather", "replicate")  # the same without sequence parallelism
    for path in by_hand.keys() | found.keys():
        if sequence_parallel or by_hand.get(path) not in whole:
            assert found[path] == by_hand[path], path
        else:
            assert found[path] in whole


@pytest.mark.parametrize("family", ["olmo", "apertus"])
def test_a_family_outside_the_table_trains_as_one_process_does(family):
    """olmo's norms have no weights; apertus learns its activation, between column and row layers."""
    report = assert_parity(
        functools.partial(_build, family),
        [models.batch(step) for step in range(families.STEPS)],
        layouts=["tensor=2,shard=2", "tensor=2,sequence_parallel"],
        optimizer=families.steep_adamw,
        workers=workers,
    )
    (level,) = report.levels
    assert level.losses[-1] < level.losses[0] - 0.1
    assert all(not result.comparison.missing for result in report.results)


def _warned():
    with pytest.warns(UserWarning, match="OlmoForCausalLM is not in the README's table .* fsdp_tp.parity") as caught:
        fsdp_tp.parallelize(_build("olmo"), fsdp_tp.init_mesh(tensor_parallel_degree=2))
    assert [each.filename for each in caught if "README" in str(each.message)] == [__file__]


def test_it_warns_where_parallelize_is_called():
    run(2, _warned)


def test_models_on_meta_get_the_same_plan():
    with torch.device("meta"):
        model = _build("apertus")
    assert hugging_face_plan(model, 2) == hugging_face_plan(_build("apertus"), 2)


@pytest.mark.parametrize(
    ("family", "size", "sequence_parallel", "sentence"),
    [
        (
            "olmo2",
            2,
            False,
            r"cannot: layers.\*.self_attn.q_proj: colwise_gather_output, .*rowwise_split_input. Pass a",
        ),
        ("mixtral", 2, False, r"experts.gate_up_proj: packed_colwise, .* moe_tp_experts. Pass a plan of your own"),
        ("gpt_oss", 2, False, "splits no layer of its blocks"),
        ("doge", 2, False, "does not suit its forward, which fails with a part of the weights"),
        ("nanochat", 2, True, "sequence_parallel=True is not possible .* does not go into one last norm"),
        ("olmo", 4, False, r"does not divide num_key_value_heads=2; legal values: 1, 2\. For .* fsdp_tp.plans.Plan"),
    ],
)
def test_what_its_plan_leaves_open_is_refused(family, size, sequence_parallel, sentence):
    model = _build(family)
    with pytest.raises(ValueError, match=sentence):
        hugging_face_plan(model, size, sequence_parallel=sequence_parallel)


def _with_residual(mlp):
    """An mlp that reads its input once more, outside of its column layers."""
    cls = type(mlp)
    mlp.__class__ = type("Residual", (cls,), {"forward": lambda self, x: x + cls.forward(self, x)})


def test_an_input_that_others_read_too_is_not_shared():
    """Its gradient would be summed over the ranks although it is whole."""
    model = _build("olmo")
    _with_residual(model.model.layers[1].mlp)
    plan = hugging_face_plan(model, 2)
    assert plan["model.layers.0.mlp"] == "shared_input"
    assert "model.layers.1.mlp" not in plan
    with pytest.raises(ValueError, match="not only column layers read the first argument of model.layers.1.mlp"):
        hugging_face_plan(model, 2, sequence_parallel=True)


def test_a_forward_that_mixes_tokens_between_its_layers_cannot_be_cut():
    model = _build("olmo")
    block = model.model.layers[0]
    cls = type(block)
    shift = {"forward": lambda self, hidden_states, **kwargs: cls.forward(self, hidden_states.roll(1, 1), **kwargs)}
    block.__class__ = type("Shifting", (cls,), shift)
    hugging_face_plan(model, 2)
    with pytest.raises(ValueError, match="the forward of model.layers.0 calls roll, which may mix the tokens"):
        hugging_face_plan(model, 2, sequence_parallel=True)


def _suggested(sequence_parallel):
    """The plan of the error, copied, against one process in fp64."""
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    torch.manual_seed(3)
    model, reference = models.TwoLayerNet(), models.TwoLayerNet()
    reference.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="plan='auto' does not know TwoLayerNet") as caught:
        fsdp_tp.parallelize(model, mesh)
    names: dict[str, dict[str, str]] = {}
    exec(str(caught.value).partition("\n")[2], names)
    fsdp_tp.parallelize(model, mesh, plan=names["plan"], sequence_parallel=sequence_parallel)
    ids = models.batch()[:, :-1]
    weights = torch.randn(*ids.shape, models.VOCABULARY, dtype=torch.float64)
    for each in (model, reference):
        (each(ids) * weights).sum().backward()
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        gradient = models.gather(parameter.grad)
        # Sums of some 500 fp64 terms.
        torch.testing.assert_close(gradient, expected.grad, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_plan_that_an_error_shows_can_be_copied(sequence_parallel):
    run(2, _suggested, sequence_parallel)


def test_what_names_and_shapes_do_not_tell_is_left_to_the_reader():
    model = models.hugging_face("bloom")
    plan = suggest_plan(model)
    assert plan["transformer.h.*.self_attention.query_key_value"] == "column"
    assert (
        suggest_plan(models.hugging_face("phi3", pad_token_id=0))["model.layers.*.mlp.gate_up_proj"][:8] == "<packed:"
    )
    assert plan["transformer.h.*.mlp.dense_4h_to_h"] == "row"
    assert plan["transformer.h.*.self_attention.dense"] == "<column, row or replicate>"
    with pytest.raises(ValueError, match="is not a style; legal: column"):
        match_plan(model, plan)
    gpt2 = suggest_plan(models.hugging_face("gpt2"))
    assert (gpt2["transformer.wte"], gpt2["transformer.wpe"]) == ("vocab", "replicate")
