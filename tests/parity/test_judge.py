"""Verdict and blame on traces made by hand."""

import math

import numpy as np
import pytest

from fsdp_tp.parity import trace
from fsdp_tp.parity.blame import in_causal_order
from fsdp_tp.parity.checks import check_same_start
from fsdp_tp.parity.judge import BOUNDS, Noise, compare, gap
from fsdp_tp.parity.trace import Step, Trace, exact, key

FORWARD = [
    ("input", "a"), ("output", "a"), ("input", "b"), ("input", "b.in"), ("output", "b.in"), ("input", "b.out"),
    ("output", "b.out"), ("output", "b"),
]  # fmt: skip
BACKWARD = [("output gradient", path) for path in ("b", "b.out", "b.in", "a")]
GRADIENTS = [("gradient", f"{path}.weight") for path in ("a", "b.in", "b.out")]
WEIGHTS = [("weight", f"{path}.weight") for path in ("a", "b.in", "b.out")]


def made(changes=(), steps=3, scale=1e-3):
    """Steps of a model with the modules a, then b of b.in and b.out; ``changes`` are (step, event) that differ."""
    built = Trace("made", sources={"input:b": "output:a", "input:b.in": "output:a"}, blocks=["a", "b"])
    for step in range(steps + 1):
        names = [key(*each) for each in WEIGHTS]
        if step:
            names = [key(*each) for each in (("batch", "0"), *FORWARD, *BACKWARD, *GRADIENTS, *WEIGHTS)]
            names += [key("loss"), key("gradient norm")]
        events = {name: exact(1.0 + scale * ((step, name) in changes))[None] for name in names}
        built.steps.append(Step(step, 1.0, 1.0, events))
    return built


def judge(changes, level=2, noise=(), **options):
    reference = made()
    return compare(reference, made(changes, **options), Noise(reference, noise), BOUNDS[level], eps=1e-7)


def test_nothing_differs():
    found = judge([])
    assert (found.verdict, found.first_bad, found.max_relative_loss_gap) == ("equal", None, 0)


@pytest.mark.parametrize(
    "event, module",
    [
        ("batch:0", "batch"),
        ("output:a", "a"),
        ("input:b.out", "b"),  # what b does between b.in and b.out
        ("output:b.out", "b.out"),
        ("output:b", "b"),  # all its layers agree
        ("loss:", "loss"),
        ("output gradient:a", "b"),  # b reads it unchanged, and b.in inside it too
        ("output gradient:b.in", "b"),  # the code of b reads it
        ("gradient:b.in.weight", "b.in"),
        ("gradient norm:", "gradient norm"),
        ("weight:b.in.weight", "b.in"),
    ],
)
def test_blame(event, module):
    found = judge([(2, event), (3, event)])
    assert (found.verdict, found.first_bad.step, found.first_bad.module) == ("different", 2, module)
    assert found.first_bad.sentence.startswith("step 2: ")


def test_the_first_in_the_order_of_cause_and_effect_is_blamed():
    later = [(2, "weight:a.weight"), (2, "gradient norm:"), (2, "gradient:a.weight"), (2, "gradient:b.in.weight")]
    assert judge(later).first_bad.module == "b.in", "backward comes to b.in before a"
    assert judge([*later, (2, "loss:")]).first_bad.module == "loss"
    assert judge([*later, (2, "loss:"), (1, "weight:b.out.weight")]).first_bad.module == "b.out"
    assert judge([(0, "weight:a.weight"), *later]).first_bad.sentence.startswith(
        "step 0: the initial value of a.weight"
    )
    order = list(in_causal_order(made().steps[1]))
    assert len(order) == len(set(order)) == len(made().steps[1].events)


def test_noise_explains_up_to_four_times_itself():
    """And sixteen times, once an optimizer step in fp32 has amplified it."""
    noise = [made([(step, "output:a") for step in (1, 2, 3)], scale=1e-5)]
    assert judge([(1, "output:a")], noise=noise, scale=3.9e-5).verdict == "within_noise", "no drift in the first step"
    assert judge([(1, "output:a")], noise=noise, scale=4.1e-5).verdict == "different"
    assert judge([(2, "output:a")], noise=noise, scale=1.5e-4).verdict == "equal"
    assert judge([(2, "output:a")], noise=noise, scale=1.7e-4).verdict == "different"
    rough = [made([(2, "output:a")], scale=1e-2)]
    assert judge([(2, "output:a")], level=3, noise=rough, scale=3.9e-2).verdict == "within_noise"
    assert judge([(2, "output:a")], level=3, noise=rough, scale=4.1e-2).verdict == "different"
    assert judge([(2, "output:b")], level=3, noise=rough, scale=3e-3).verdict == "within_noise", "less than rounding"
    assert judge([(2, "output:b")], noise=noise, scale=3.9e-5).verdict == "different", "each event has its own noise"


def test_noise_does_not_excuse_other_weights_or_batches_at_the_start():
    noise = [made([(0, "weight:a.weight"), (1, "batch:0")], scale=1e-2)]
    assert judge([(0, "weight:a.weight")], noise=noise, scale=1e-6).verdict == "different"
    assert judge([(1, "batch:0")], noise=noise, scale=1e-6).verdict == "different"


def test_noise_as_large_as_the_value_is_not_judged_and_said():
    noise = [made([(2, "output:a")], scale=0.7)]
    found = judge([(2, "output:a")], noise=noise, scale=0.8)
    assert found.verdict == "equal"
    assert found.sentence() == "1 values are rounding alone, such as the output of a"
    assert judge([(2, "output:a")], noise=[made([(2, "output:a")], scale=0.4)], scale=1.0).verdict == "different"
    assert judge([(2, "output:a")], noise=[made([(2, "output:a")], scale=math.nan)], scale=1.0).verdict == "equal"


def test_the_same_start_is_told_as_well_as_a_sketch_can():
    """In fp64 the sums of a sketch round more than the eps by which weights are perturbed."""
    eps = 2.0**-52
    check_same_start(made(), made([(0, "weight:a.weight")], scale=4 * eps), eps)
    with pytest.raises(ValueError, match="other initial weights on every run .a.weight differs"):
        check_same_start(made(), made([(0, "weight:a.weight")], scale=1e-9), eps)


def test_bounds_of_the_levels():
    for level, inside, outside in ((1, 5e-11, 2e-10), (2, 5e-7, 2e-6)):
        assert judge([(1, "gradient:a.weight")], level, scale=inside).verdict == "equal"
        assert judge([(1, "gradient:a.weight")], level, scale=outside).verdict == "different"
    assert judge([(3, "loss:")], 2, scale=9e-6).verdict == "equal"
    assert judge([(3, "loss:")], 2, scale=2e-5).verdict == "different"
    assert judge([(1, "weight:a.weight")], 4, scale=1e-15).verdict == "different"


def test_a_parameter_that_only_one_run_has():
    other = made()
    for step in other.steps:
        step.events["weight:tied.weight"] = exact(1.0)[None]
    found = compare(made(), other, Noise(made(), []), BOUNDS[2], 1e-7)
    assert (found.verdict, found.first_bad.module) == ("different", "tied")


def test_a_gradient_that_never_came():
    other = made()
    for step in other.steps:
        step.events.pop("gradient:b.in.weight", None)
        step.events.pop("output:b.in", None)
    found = compare(made(), other, Noise(made(), []), BOUNDS[2], 1e-7)
    assert (found.verdict, found.first_bad.step, found.first_bad.module) == ("different", 1, "b.in")
    assert found.missing == ["output:b.in", "gradient:b.in.weight"]


def test_gaps():
    one = exact(1.0)[None]
    assert gap(one, one) == 0
    assert gap(exact(1.5)[None], one) == pytest.approx(0.5)
    assert gap(np.stack([exact(1.0), exact(3.0)]), one) == 2, "the farthest replica counts"
    assert gap(exact(math.nan)[None], one) == math.inf
    assert gap(exact(1e-30)[None], exact(0.0)[None]) == math.inf
    assert gap(exact(0.0)[None], exact(0.0)[None]) == 0


def test_megatron_bound_grows_towards_the_first_layer():
    """k * C^(L + 1 - l) * eps with k = 4, C = 1.03, L = 2."""
    rows = {row.module: row.megatron_bound for row in judge([]).modules}
    assert rows["a"] == pytest.approx(4 * 1.03**2 * 1e-7)
    assert rows["b.in"] == pytest.approx(4 * 1.03 * 1e-7)


def test_curves_survive_the_file(tmp_path):
    reference = made()
    trace.write(tmp_path / "curve.jsonl", {"reference": reference, "control": made([(1, "loss:")])}, {"seed": 3})
    runs, job = trace.read(tmp_path / "curve.jsonl")
    assert job == {"seed": 3}
    assert list(runs) == ["reference", "control"]
    assert compare(runs["reference"], reference, Noise(reference, []), BOUNDS[4], 1e-7).verdict == "equal"
    assert runs["reference"].sources == reference.sources
    whole = (tmp_path / "curve.jsonl").read_text()
    (tmp_path / "resumed.jsonl").write_text('{"step": 1, "loss": 3}\n{"step": 2, "loss": 9}\n{"step": 2, "loss": 4}\n')
    assert [step.loss for step in trace.read(tmp_path / "resumed.jsonl")[0]["reference"].steps] == [3, 4]
    for broken, sentence in (
        (whole[:-30], "line 9 is not JSON"),
        (whole.replace("parity curve 1", "parity curve 9"), "this version reads"),
        ("", "has no step"),
    ):
        (tmp_path / "broken.jsonl").write_text(broken)
        with pytest.raises(ValueError, match=sentence):
            trace.read(tmp_path / "broken.jsonl")
