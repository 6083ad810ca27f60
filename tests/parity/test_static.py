"""The static check on models that are right, and on planted bugs. If these fail, look in fsdp_tp/parity/."""

import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fsdp_tp import regions
from fsdp_tp.layers import RowParallelLinear, linear_loss, sliced_cross_entropy, vocab_parallel_cross_entropy
from fsdp_tp.layers.parameter import to_local
from fsdp_tp.parity.static import check, check_regions
from tests.models import TWO_LAYER_PLAN, TwoLayerNet, batch, hugging_face

pytest.importorskip("spmd_types")

WORLDS = {
    2: dict(world_size=2, tensor_parallel_degree=2),
    2048: dict(world_size=2048, tensor_parallel_degree=8, hybrid_shard_degree=16),
}
EIGHT_HEADS = dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=8)


def _check_hugging_face(family="llama", *, world=2, **options):
    ids = batch(rows=2)[:, :-1]
    return check(
        lambda: hugging_face(family, **EIGHT_HEADS),
        {"input_ids": ids, "labels": ids},
        _hugging_face_loss,
        **WORLDS[world],
        **options,
    )


def _hugging_face_loss(model, batch, mesh):
    return model(**batch).loss


def _check_two_layers(*, plan=TWO_LAYER_PLAN, build=TwoLayerNet, loss_parallel=False, step=None, **options):
    def own_step(model, batch, mesh):
        ids, target = batch
        if loss_parallel:
            return vocab_parallel_cross_entropy(model(ids), target, mesh=mesh)
        return F.cross_entropy(model(ids).flatten(0, 1), target.flatten())

    tokens = batch(rows=2)
    return check(
        build,
        (tokens[:, :-1], tokens[:, 1:]),
        step or own_step,
        plan={"position": "replicate", "layers.0": "split_sequence"} | plan,
        loss_parallel=loss_parallel,
        **WORLDS[2],
        **options,
    )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("loss_parallel", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_known_families_have_no_findings(family, sequence_parallel, loss_parallel, world):
    assert (
        _check_hugging_face(family, world=world, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel) == []
    )
    assert not dist.is_initialized()


@pytest.mark.parametrize("loss_parallel", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_model_of_ones_own_has_no_findings(sequence_parallel, loss_parallel):
    assert _check_two_layers(sequence_parallel=sequence_parallel, loss_parallel=loss_parallel) == []


def test_a_model_of_any_size_is_checked_on_the_meta_device_within_seconds():
    def build():
        with torch.device("meta"):
            return hugging_face(
                "llama",
                vocab_size=128256,
                hidden_size=8192,
                intermediate_size=28672,
                num_attention_heads=64,
                num_key_value_heads=8,
                num_hidden_layers=4,
            )

    ids = torch.zeros(1, 4096, dtype=torch.int64, device="meta")
    mask = torch.zeros(1, 1, 4096, 4096, device="meta")  # transformers would read values to make one
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    start = time.perf_counter()
    assert check(build, inputs, _hugging_face_loss, sequence_parallel=True, **WORLDS[2048]) == []
    assert time.perf_counter() - start < 10


def _row(monkeypatch, forward):
    monkeypatch.setattr(RowParallelLinear, "forward", forward)


def _local(layer):
    return to_local(layer.weight), to_local(layer.bias)


def _only(findings, module, *words):
    """The first finding inside ``module`` has all these words."""
    first = [finding for finding in findings if finding.module.startswith(module)]
    assert first, findings
    for word in words:
        assert word in str(first[0])


def test_a_row_layer_that_forgets_its_sum(monkeypatch):
    _row(monkeypatch, lambda self, x: F.linear(x, to_local(self.weight)))
    for findings, module in [
        (_check_hugging_face(), "model.layers.0"),
        (_check_two_layers(), "layers.0"),
    ]:
        _only(findings, module, "add(", "partial", "invariant", "a partial sum is used before it is summed")


def test_a_row_layer_that_forgets_its_sum_under_sequence_parallelism(monkeypatch):
    _row(monkeypatch, lambda self, x: F.linear(x, to_local(self.weight)))
    findings = _check_hugging_face(sequence_parallel=True)
    _only(findings, "model.layers.0", "add(varying [2, 4, 64], partial [2, 8, 64])", "must match the size")


def test_an_activation_between_a_row_layer_and_its_sum(monkeypatch):
    _row(
        monkeypatch,
        lambda self, x: regions.reduce_from_tensor_axis(torch.tanh(F.linear(x, _local(self)[0])), self.tensor_group),
    )
    _only(_check_two_layers(), "layers.0.mlp.down", "tanh(partial [2, 8, 16])")


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_bias_added_on_every_rank_before_the_sum(monkeypatch, fused, frozen):
    def forward(self, x):
        weight, bias = _local(self)
        bias = bias.detach() if frozen else bias
        output = F.linear(x, weight, bias) if fused else F.linear(x, weight) + bias
        return regions.reduce_from_tensor_axis(output, self.tensor_group)

    _row(monkeypatch, forward)
    words = ["linear", "the bias is added on every rank"] if fused else ["add(partial", "invariant [16])"]
    _only(_check_two_layers(), "layers.0.mlp.down", *words)


def test_a_row_layer_that_sums_twice(monkeypatch):
    def forward(self, x):
        once = regions.reduce_from_tensor_axis(F.linear(x, to_local(self.weight)), self.tensor_group)
        return regions.reduce_from_tensor_axis(once, self.tensor_group)

    _row(monkeypatch, forward)
    _only(_check_two_layers(), "layers.0.mlp.down", "reduce_from_tensor_axis", "partial, but this one is invariant")


def test_column_layers_whose_input_skips_the_copy(monkeypatch):
    monkeypatch.setattr(regions, "copy_to_tensor_axis", lambda x, group: x)
    findings = _check_hugging_face()
    _only(findings, "model.layers.0.self_attn.q_proj", "linear(invariant", "varying", "misses copy_to_tensor_axis")
    assert {finding.module for finding in findings} >= {"model.layers.1.mlp.up_proj", "lm_head"}


def test_an_input_that_is_copied_twice(monkeypatch):
    copy = regions.copy_to_tensor_axis
    monkeypatch.setattr(regions, "copy_to_tensor_axis", lambda x, group: copy(copy(x, group), group))
    _only(_check_hugging_face(), "model.layers.0.self_attn", "takes a value that is invariant", "this one is replicate")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_norm_under_sequence_parallelism_whose_gradient_is_not_summed(monkeypatch, family):
    monkeypatch.setattr(regions, "sum_gradients", lambda tensors, group: tensors)
    findings = _check_hugging_face(family, sequence_parallel=True)
    _only(findings, "model.layers.0.input_layernorm", "invariant [64]", "varying", "sum_gradients")
    assert ("model.layers.0.self_attn.q_norm" in {finding.module for finding in findings}) == (family == "qwen3")


def test_a_plan_that_calls_a_norm_on_slices_replicate():
    plan = TWO_LAYER_PLAN | {"layers.*.norm": "replicate"}
    findings = _check_two_layers(plan=plan, sequence_parallel=True)
    assert {finding.module for finding in findings} == {"layers.0.norm", "layers.1.norm"}
    assert _check_two_layers(plan=plan) == []


def test_a_plan_that_sums_a_gradient_that_is_complete():
    plan = TWO_LAYER_PLAN | {"layers.*.norm": "per_head"}
    findings = _check_two_layers(plan=plan)
    assert {finding.module for finding in findings} >= {"layers.0.norm", "layers.1.norm"}
    assert "replicate [16]" in findings[0].operation


def test_a_gather_that_does_not_sum_gradients(monkeypatch):
    monkeypatch.setattr(regions, "gather_sequence", regions.gather_from_tensor_axis)
    _only(_check_hugging_face(sequence_parallel=True), "model.layers.0.self_attn", "linear(invariant", "varying")


def test_a_loss_on_a_slice_of_the_vocabulary():
    findings = _check_two_layers(loss_parallel=True, step=lambda model, batch, mesh: model(batch[0]).exp().mean())
    assert [str(finding) for finding in findings] == [
        "(model): loss: must be invariant to be differentiated, but is varying"
    ]


@pytest.mark.parametrize("world", WORLDS)
def test_regions_do_what_they_declare(world):
    degree = WORLDS[world]["tensor_parallel_degree"]
    assert check_regions(world_size=WORLDS[world]["world_size"], tensor_parallel_degree=degree) == []


@pytest.mark.parametrize(
    ("region", "backward", "words"),
    [
        ("_Copy", lambda ctx, grad: grad, "gives a value that is partial, but must be invariant"),
        ("_Reduce", lambda ctx, grad: regions.all_reduce(grad, ctx.group), "all_reduce: takes a value that is partial"),
        ("_Split", lambda ctx, grad: grad, "gives a value that is varying, but must be invariant"),
        ("_Gather", lambda ctx, grad: regions.reduce_scatter(grad, ctx.dim, ctx.group), "reduce_scatter_tensor: takes"),
        ("_GatherSequence", lambda ctx, grad: regions._own_slice(grad, ctx.dim, ctx.group), "narrow(partial"),
        ("_ReduceScatterSequence", lambda ctx, grad: grad, "gives a value that is varying, but must be invariant"),
    ],
)
def test_a_wrong_backward_of_a_region(monkeypatch, region, backward, words):
    function = getattr(regions, region)
    own_forward = function.forward

    def forward(ctx, x, *rest):
        ctx.group = rest[-1]
        return own_forward(ctx, x, *rest)

    monkeypatch.setattr(function, "forward", staticmethod(forward))
    monkeypatch.setattr(function, "backward", staticmethod(lambda ctx, grad: (backward(ctx, grad), None, None)))
    findings = check_regions()
    assert findings
    assert words in str(findings[0])


def test_a_loss_that_forgets_to_sum_over_the_vocabulary(monkeypatch):
    reduce = sliced_cross_entropy.all_reduce
    monkeypatch.setattr(
        sliced_cross_entropy,
        "all_reduce",
        lambda x, group, operation="sum": x if operation == "sum" else reduce(x, group, "max"),
    )
    findings = check_regions()
    losses = {"vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy"}
    assert {finding.module for finding in findings} == losses
    assert "gives a value that is varying, but must be invariant" in str(findings[0])


def test_a_fused_loss_that_forgets_to_sum_the_gradient_of_its_input(monkeypatch):
    monkeypatch.setattr(linear_loss, "all_reduce", lambda x, group: x)
    (finding,) = set(check_regions())
    assert finding.module == "vocab_parallel_linear_cross_entropy"
    assert "backward: gives a value that is varying, but must be invariant" in str(finding)


def test_what_the_types_do_not_see():
    """A norm over features that are split: each rank normalizes its own part. The docstring says so."""

    def build():
        model = TwoLayerNet()
        for block in model.layers:
            block.mlp.group_norm.forward = lambda x: x / x.square().mean((-2, -1), keepdim=True).sqrt()
        return model

    assert _check_two_layers(build=build) == []


def test_a_world_that_cannot_be_checked(one_process):
    with pytest.raises(ValueError, match="nothing to check"):
        check(TwoLayerNet, (), _hugging_face_loss, world_size=2, tensor_parallel_degree=1)
    with pytest.raises(ValueError, match="call it where no process group exists"):
        _check_hugging_face()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "spmd_types", None)
    with pytest.raises(ValueError, match="pip install spmd_types"):
        check_regions()
