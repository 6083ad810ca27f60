"""Planted bugs: each must be found, and blamed on the right module at the right step.

Bounds and blame are in fsdp_tp/parity/judge.py. That correct layouts raise no alarm is tested in
tests/test_whole_models.py.
"""

import functools

import pytest
import torch

from fsdp_tp.parity import ParityError, assert_parity
from tests.parity import bugs
from tests.ranks import workers

LLAMA = dict(build_model=bugs.llama, batches=bugs.batches)
BIASED = dict(build_model=functools.partial(bugs.with_nonzero_biases, bugs.llama_with_biases), batches=bugs.batches)
TIED = dict(build_model=bugs.tied_llama, batches=bugs.batches)
UNEVEN = dict(build_model=bugs.llama, batches=bugs.uneven_batches())
MULTI_QUERY = dict(build_model=bugs.MultiQueryNet, batches=bugs.batches)
MOMENTS = dict(LLAMA, optimizer=bugs.plain_adamw)
SMOOTHED = dict(LLAMA, loss=bugs.smoothed)

# job, layout, what is changed, first bad step, first guilty module, what the sentence must say
DETECTORS = {
    "unsummed norm gradient": (
        LLAMA,
        "tensor=2,sequence_parallel",
        dict(wrap=functools.partial(bugs.unsummed, bugs.job.wrap, "model.layers.1.input_layernorm.weight")),
        (1, "model.layers.1.input_layernorm", "the gradient of model.layers.1.input_layernorm.weight"),
    ),
    "gradient summed twice": (
        LLAMA,
        "tensor=2",
        dict(wrap=bugs.summed_twice),
        (1, "model.layers.1.mlp", "the gradient that model.layers.1.mlp gives"),
    ),
    "loss as mean of means": (
        UNEVEN,
        "shard=4",
        dict(loss=bugs.mean_of_means, token_count=None),
        (1, "loss", "the loss differs"),
    ),
    "tied weights diverging": (
        TIED,
        "tensor=2,shard=2",
        dict(wrap=bugs.untied),
        (0, "lm_head", "only one of the two runs has the parameter lm_head.weight"),
    ),
    "dropout seeds equal on both tensor halves": (
        MULTI_QUERY,
        "tensor=2",
        dict(wrap=bugs.dropout_alike),
        (1, "layers.0.attention.dropout", "the output of layers.0.attention.dropout"),
    ),
    "clip using a local norm": (
        LLAMA,
        "shard=2",
        dict(clip=bugs.clip_by_local_norm),
        (1, "gradient norm", "the gradient norm differs"),
    ),
    "bf16 accumulation": (
        LLAMA,
        "shard=2,micro_batches=4",
        dict(wrap=bugs.bf16_accumulation),
        (1, "lm_head", "the gradient of lm_head.weight"),
    ),
    "one layer's wrong rotary offset": (
        LLAMA,
        "tensor=2",
        dict(wrap=bugs.rotary_off_by_one),
        (1, "model.layers.1.self_attn", "what model.layers.1.self_attn computes for model.layers.1.self_attn.o_proj"),
    ),
    "a replica that skipped one update": (
        MOMENTS,
        "replicate=2",
        dict(optimizer=bugs.skips_an_update),
        (3, "model.embed_tokens", "what the optimizer has added to"),
    ),
    "a checkpoint that lost AdamW's second moment": (
        MOMENTS,
        "shard=2",
        dict(optimizer=bugs.loses_second_moment),
        (3, "model.embed_tokens", "what the optimizer has added to"),
    ),
    "a stale all-gathered weight": (
        LLAMA,
        "shard=2",
        dict(wrap=bugs.stale_weight),
        (2, "model.layers.1.mlp.down_proj", "the output of model.layers.1.mlp.down_proj"),
    ),
    "label smoothing over the local vocabulary": (
        SMOOTHED,
        "tensor=2,loss_parallel",
        dict(loss=functools.partial(bugs.smoothed, local=True)),
        (1, "loss", "the loss differs"),
    ),
    "a bias added on every rank before the sum": (
        BIASED,
        "tensor=2",
        dict(wrap=bugs.bias_on_every_rank),
        (1, "model.layers.0.self_attn.o_proj", "the output of model.layers.0.self_attn.o_proj"),
    ),
    "wrong key/value replica gradients": (
        MULTI_QUERY,
        "tensor=2",
        dict(wrap=functools.partial(bugs.unsummed, bugs.wrap_multi_query, "layers.0.attention.key.weight")),
        (1, "layers.0.attention.key", "the gradient of layers.0.attention.key.weight"),
    ),
}


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    """The reference of each job, recorded once."""
    directory = tmp_path_factory.mktemp("curves")
    found = {}

    def curve(job):
        path = found.get(id(job))
        if path is None:
            path = found[id(job)] = directory / f"{len(found)}.jsonl"
            assert_parity(**job, layouts=[], record=path, workers=workers)
        return path

    return curve


@pytest.mark.parametrize("bug", DETECTORS)
def test_planted_bug_is_found(bug, curves):
    job, layout, changes, (step, module, sentence) = DETECTORS[bug]
    with pytest.raises(ParityError) as error:
        assert_parity(**{**job, **changes}, layouts=[layout], reference=curves(job), workers=workers)
    (result,) = error.value.report.results
    assert (result.first_bad_step, result.first_bad_module) == (step, module), result.sentence
    assert sentence in result.sentence


@pytest.mark.parametrize(
    "job, layout, right",
    [
        (MULTI_QUERY, "tensor=2", dict(wrap=bugs.wrap_multi_query)),
        (SMOOTHED, "tensor=2,loss_parallel", {}),
        (BIASED, "tensor=2", {}),
        (TIED, "tensor=2,shard=2", {}),
        (UNEVEN, "shard=4", {}),
        (MOMENTS, "replicate=2", {}),
    ],
)
def test_the_same_job_without_the_bug_passes(job, layout, right, curves):
    report = assert_parity(**{**job, **right}, layouts=[layout], reference=curves(job), workers=workers)
    assert report.exit_code == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_gradient_that_is_rounding_alone_raises_no_alarm(dtype):
    job = dict(MULTI_QUERY, build_model=bugs.with_key_bias, wrap=bugs.wrap_multi_query, dtype=dtype)
    (result,) = assert_parity(**job, layouts=["tensor=2"], workers=workers).results
    assert "gradient:layers.0.attention.key.bias" in result.comparison.unjudged
    assert "values are rounding alone" in result.sentence
