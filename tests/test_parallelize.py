"""If these fail, look in fsdp_tp/parallelize.py. Custom modules in fp64 against one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp_tp
from tests import families, models
from tests.ranks import run


def _gradients(model, x, weights):
    """Loss and gradients of a step whose output is replicated."""
    loss = (model(x) * weights).sum()
    loss.backward()
    return loss.detach(), {name: models.gather(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def _custom_model(tensor, sequence_parallel, micro_batches=1):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=tensor)
    torch.manual_seed(9)
    model, reference = models.TwoLayerNet(), models.TwoLayerNet()
    reference.load_state_dict(model.state_dict())
    plan = dict(models.TWO_LAYER_PLAN)
    if sequence_parallel:
        # The position is added to the whole embedding: split at the first block.
        plan |= {"layers.0": "split_sequence"}
        for block in (model, reference):
            del block.position
            block.position = 0.0
    assert fsdp_tp.parallelize(model, mesh, plan=plan, sequence_parallel=sequence_parallel) is model
    for step in range(micro_batches):
        ids = models.batch(step)[:, :-1]
        weights = torch.randn(*ids.shape, models.VOCABULARY, dtype=torch.float64)
        expected, gradients = _gradients(reference, ids, weights)
        actual, own = _gradients(model, ids, weights)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert own.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    if tensor > 1:
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert not any(p.placements[0].is_partial() for p in model.parameters())
        assert set(model.state_dict()) == set(reference.state_dict())


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_a_custom_module_with_a_dict_plan_equals_one_process(tensor, sequence_parallel):
    """With a bare parameter, biases, gradients of per-group norms. Sums of some 500 fp64 terms: 1e-11."""
    run(tensor, _custom_model, tensor, sequence_parallel)


def test_replicated_gradients_do_not_grow_with_accumulation():
    """Fault: a hook that reduces the accumulated gradient counts earlier micro-batches again."""
    run(2, _custom_model, 2, True, 3)


class _TiedNet(models.TwoLayerNet):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


def _details():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    plan = models.TWO_LAYER_PLAN

    model = _TiedNet()
    fsdp_tp.parallelize(model, mesh, plan=plan)
    assert model.head.weight is model.embed.weight
    with pytest.raises(ValueError, match="DTensor parameters already"):
        fsdp_tp.parallelize(model, mesh, plan=plan)

    for style in ("row", "replicate"):
        with pytest.raises(ValueError, match="head.weight is tied to embed.weight, but the plan"):
            fsdp_tp.parallelize(_TiedNet(), mesh, plan={**plan, "head": style, "position": "replicate"})

    model = models.TwoLayerNet()
    frozen = [model.layers[0].mlp.gate.weight, model.layers[0].norm.weight, model.embed.weight, model.position]
    for parameter in frozen:
        parameter.requires_grad_(False)
    before = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    fsdp_tp.parallelize(model, mesh, plan=plan)
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == before
    model(models.batch()[:, :-1]).sum().backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is None} == before

    model = models.TwoLayerNet()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="optimizer .AdamW. was built before parallelize, .* it would train nothing"):
        fsdp_tp.parallelize(model, mesh, plan=plan)
    del optimizer

    for wrong, sentence in (
        ({**plan, "layers.*.attn.wq": "column"}, "'layers.*.attn.wq' matches no module of TwoLayerNet"),
        (
            {**plan, "layers.*.norm": "column"},
            "layers.0.norm: ColumnParallelLinear takes the place of nn.Linear",
        ),
    ):
        with pytest.raises(ValueError, match=sentence.replace("*", r"\*")):
            fsdp_tp.parallelize(models.TwoLayerNet(), mesh, plan=wrong)
    model = models.TwoLayerNet(hidden=36)
    model.embed = nn.Embedding(models.VOCABULARY, 16, max_norm=1.0)
    with pytest.raises(ValueError, match=r"embed: max_norm=1.0 is not possible"):
        fsdp_tp.parallelize(model, mesh, plan=plan)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters()), "an error changes nothing"
    with pytest.warns(UserWarning, match="loss_parallel=True has no effect"):
        fsdp_tp.parallelize(nn.ModuleDict({"a": nn.Linear(4, 4)}), mesh, plan={"a": "replicate"}, loss_parallel=True)
    with pytest.raises(ValueError, match="plan='megatron' must be 'auto', a dict or one of llama, mistral"):
        fsdp_tp.parallelize(models.TwoLayerNet(), mesh, plan="megatron")
    with pytest.raises(ValueError, match="plan='auto' does not know TwoLayerNet; it knows the Hugging Face families"):
        fsdp_tp.parallelize(models.TwoLayerNet(), mesh)

    fsdp_tp.fully_shard(sharded := nn.Linear(4, 4), mesh=mesh)
    with pytest.raises(ValueError, match="already wrapped by fully_shard, which must come after"):
        fsdp_tp.parallelize(sharded, mesh, plan={})


def test_ties_frozen_parameters_and_errors():
    run(2, _details)


class _SharedLayer(nn.Module):
    """One linear under two names, in two parents."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Module(), nn.Module()
        self.first.up = self.second.up = nn.Linear(4, 6, dtype=torch.float64)
        self.first.down = self.second.down = nn.Linear(6, 4, dtype=torch.float64)

    def forward(self, x):
        for parent in (self.first, self.second):
            x = x + parent.down(torch.tanh(parent.up(x)))
        return x


def _shared_modules():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    torch.manual_seed(1)
    model, reference = _SharedLayer(), _SharedLayer()
    reference.load_state_dict(model.state_dict())
    fsdp_tp.parallelize(model, mesh, plan={"first.up": "column", "first.down": "row"})
    assert model.second.up is model.first.up
    x = torch.randn(3, 4, dtype=torch.float64)
    expected, gradients = _gradients(reference, x, torch.ones(3, 4))
    actual, own = _gradients(model, x, torch.ones(3, 4))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-12, atol=1e-13)


def test_a_module_under_two_names_is_replaced_under_both():
    run(2, _shared_modules)


class _SharedInput(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class _Inner(nn.Module):
    def __init__(self, scaled):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 4, dtype=torch.float64)
        if scaled:
            self.scale = nn.Parameter(torch.rand(1, dtype=torch.float64))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)) * getattr(self, "scale", 1.0))


def _nested(scaled, shared_input):
    """Column layers two levels below the module that names their input; a bare weight between them."""
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    plan = {"1.inner.up": "column", "1.inner.down": "row"}
    plan |= {"1": "shared_input"} if shared_input else {}

    def build():
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), _SharedInput(_Inner(scaled)))

    if scaled:
        with pytest.raises(ValueError, match=r"1.inner.scale"):
            fsdp_tp.parallelize(build(), mesh, plan=plan)
        plan |= {"1.inner.scale": "per_head"}
    model, reference = build(), build()
    fsdp_tp.parallelize(model, mesh, plan=plan)
    x = torch.randn(3, 4, dtype=torch.float64)
    _, gradients = _gradients(reference, x, torch.ones(3, 4))
    _, own = _gradients(model, x, torch.ones(3, 4))
    for name, gradient in gradients.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-12, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("shared_input", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_nested_column_layers_and_single_parameters(scaled, shared_input):
    run(2, _nested, scaled, shared_input)


def _plan_details():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    plan = models.TWO_LAYER_PLAN
    for style in ("replicate", "sequence"):
        with pytest.raises(ValueError, match="group_norm.weight stays whole inside a shared_input module, where only"):
            fsdp_tp.parallelize(models.TwoLayerNet(), mesh, plan={**plan, "layers.*.mlp.group_norm": style})
    with pytest.raises(ValueError, match="'position' is a parameter: its style can be replicate, sequence,"):
        fsdp_tp.parallelize(models.TwoLayerNet(), mesh, plan={**plan, "position": "column"})
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(**models.SIZES, pad_token_id=0)
    classifier = LlamaForSequenceClassification(config)
    with pytest.warns(UserWarning, match="loss_parallel=True has no effect"):
        fsdp_tp.parallelize(classifier, mesh, loss_parallel=True)
    assert classifier(models.batch(), labels=torch.zeros(8, dtype=torch.long)).loss > 0


def test_plans_that_would_be_wrong_in_silence():
    run(2, _plan_details)


def test_a_dict_plan_is_checked_on_one_process_too():
    run(1, _typo)


def _typo():
    with pytest.raises(ValueError, match="matches no module"):
        fsdp_tp.parallelize(models.TwoLayerNet(), fsdp_tp.init_mesh(), plan={"layer.*.norm": "sequence"})


def _whole_outputs(headless):
    """Under sequence parallelism too the caller sees whole sequences, also when it asks for the last logits."""
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    outputs = []
    for parallel in (False, True):
        model = models.hugging_face("llama")
        fsdp_tp.initialize(model)
        model = model.model if headless else model
        if parallel:
            fsdp_tp.parallelize(model, mesh, sequence_parallel=True)
        ids = models.batch()[:, :-1]
        y = model(ids).last_hidden_state if headless else model(ids, logits_to_keep=3).logits
        y.square().mean().backward()
        outputs.append([y, *(models.gather(parameter.grad) for parameter in model.parameters())])
    assert outputs[0][0].shape[1] == (8 if headless else 3)
    for expected, actual in zip(*outputs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("headless", [False, True])
def test_outputs_are_whole_under_sequence_parallelism(headless):
    run(2, _whole_outputs, headless)


def _different_inputs(same):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    model = fsdp_tp.wrap(models.hugging_face("llama"), mesh)
    ids = models.batch(0 if same else torch.distributed.get_rank())
    if same:
        model(input_ids=ids)
        return
    with pytest.raises(ValueError, match="2 ranks of one tensor axis got different inputs, .* mesh.data_rank of mesh"):
        model(input_ids=ids)


@pytest.mark.parametrize("same", [True, False])
def test_ranks_of_one_tensor_group_must_get_the_same_batch(same):
    """A loader that is still sharded by the global rank would train on nonsense in silence."""
    run(4 if same else 2, _different_inputs, same)


def _unclear(sequence_parallel):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    left_out = "layers.*.norm" if sequence_parallel else "layers.*.mlp.group_norm"
    plan = {
        pattern: style
        for pattern, style in models.TWO_LAYER_PLAN.items()
        if pattern != left_out and style != "shared_input"
    }
    named = left_out.replace("*", r"\*")
    with pytest.raises(ValueError, match=f"the plan leaves open: .*{named}.weight.* 'replicate'"):
        fsdp_tp.parallelize(models.TwoLayerNet(), mesh, plan=plan, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_weight_that_may_see_a_slice_must_be_named(sequence_parallel):
    """Left out, its gradient would silently lack the other ranks' parts."""
    run(2, _unclear, sequence_parallel)


def _auto_errors():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=4)
    with pytest.raises(ValueError, match=r"plan='auto' does not know OpenAIGPTLMHeadModel \(model_type 'openai-gpt'\)"):
        fsdp_tp.parallelize(models.hugging_face("openai-gpt"), mesh)


def test_plan_auto_says_what_it_cannot_do():
    run(4, _auto_errors)


def _hugging_face_labels(loss_parallel, weigh):
    """The loss that the model itself computes from labels, with and without split logits."""
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=torch.distributed.get_world_size())
    model = models.hugging_face("llama")
    fsdp_tp.initialize(model)
    fsdp_tp.parallelize(model, mesh, loss_parallel=loss_parallel)
    ids = models.batch()
    labels = ids.clone()
    labels[0, :4] = -100
    options = {"num_items_in_batch": 100} if weigh else {}
    output = model(ids, labels=labels, **options)
    assert output.logits.shape[-1] == models.VOCABULARY // (mesh.tensor_size if loss_parallel else 1)
    return output.loss.item()


@pytest.mark.parametrize("weigh", [False, True])
def test_a_hugging_face_loss_is_right_on_split_logits(weigh):
    """Fault: a loss over this rank's slice of the vocabulary."""
    (expected,) = run(1, _hugging_face_labels, False, weigh)
    for loss_parallel in (False, True):
        assert run(2, _hugging_face_labels, loss_parallel, weigh) == pytest.approx([expected] * 2, rel=1e-6)


def _labels_of_another_loss(family):
    """t5 and bert compute their loss themselves: on a slice of the vocabulary it would be another number."""
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    ids = models.batch()
    losses = []
    for options in (None, {}, {"loss_parallel": True}):
        model = fsdp_tp.initialize(families.build(family))
        if options is not None:
            fsdp_tp.parallelize(model, mesh, **options)
        if options != {"loss_parallel": True}:
            losses.append(model(input_ids=ids, labels=ids).loss)
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match="labels: with loss_parallel=True .* slice of the vocabulary"):
        model(input_ids=ids, labels=ids)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_labels_are_refused_where_split_logits_would_give_another_loss(family):
    run(2, _labels_of_another_loss, family)
