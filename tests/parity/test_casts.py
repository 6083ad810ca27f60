"""Float32 inside an fp64 model: lifted where it can be, named where it cannot."""

import torch
from torch import nn

from fsdp_tp.parity import assert_parity
from fsdp_tp.parity.casts import LiftedCasts
from tests import models
from tests.parity import jobs
from tests.ranks import workers


def test_norms_and_rotary_of_hugging_face_stay_in_fp64():
    torch.manual_seed(0)
    model = models.hugging_face("qwen3").double()
    ids = models.batch()[:, :-1]
    seen = []
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: seen.append((module, output)))
    with LiftedCasts(model) as lifted:
        inside = model(ids).logits
    assert lifted.unlifted == {}
    outputs = [output for _, output in seen if isinstance(output, torch.Tensor)]
    assert {output.dtype for output in outputs if output.is_floating_point()} == {torch.float64}
    rounding = (inside - model(ids).logits).abs().max() / inside.abs().max()
    assert 1e-10 < rounding < 1e-5, "without lifting the model rounds to fp32"


def test_what_cannot_be_lifted_is_named():
    model = nn.Sequential(nn.Linear(4, 4), jobs.Unliftable()).double()
    with LiftedCasts(model) as lifted:
        model(torch.randn(2, 4, dtype=torch.float64)).sum().backward()
    assert list(lifted.unlifted) == ["1"]


def test_bounds_widen_to_what_the_rounding_of_such_a_module_explains():
    job = dict(batches=jobs.data, steps=1, dtype=torch.float64, workers=workers)
    report = assert_parity(jobs.unliftable, layouts=["shard=2", "tensor=2"], **job)
    assert any("layers.0.mlp.act_fn.1 rounds to float32" in note for note in report.levels[0].notes)
    modules = {row.module: row for row in report.results[1].comparison.modules}
    assert modules["model.layers.0.mlp.down_proj"].output_noise > 1e-9, "widened behind it"
    assert modules["model.layers.0.self_attn.o_proj"].output_noise < 1e-14, "not in front of it"
