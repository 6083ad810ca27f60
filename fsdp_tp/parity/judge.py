"""From the traces of two runs to a verdict, and to the first place where they part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fsdp_tp.parity import trace
from fsdp_tp.parity.blame import (
    Blame,
    absent,
    blame,
    described,
    explained,
    in_causal_order,
    owner_of,
    readers,
    unknown_parameter,
)
from fsdp_tp.parity.trace import Step, Trace, key, split_key
from fsdp_tp.paths import is_within

Verdict = Literal["equal", "within_noise", "different"]


@dataclass(frozen=True)
class Bounds:
    """Relative gaps up to which two runs count as equal."""

    curve: float
    """Of the loss and the gradient norm, at any step."""
    tensors: float
    """Of every activation and gradient of the first step. Then the optimizer
    amplifies rounding, and a tensor may differ as much as the measured noise does."""

    drift_factor: float
    """Like :data:`NOISE_FACTOR`, for tensors once weights drift."""
    exact: bool = False
    """Nothing counts as rounding."""
    least: float = 0.0
    """A gap up to this is rounding, even of a tensor that no perturbation reaches; it does not count as equal."""

    def of(self, stage: str, step: int) -> float:
        if stage == trace.BATCH or step == 0:
            return SAME
        return self.curve if stage in (trace.LOSS, trace.NORM) else self.tensors

    def noise_factor(self, stage: str, step: int) -> float:
        return self.drift_factor if _drifts(stage, step) else NOISE_FACTOR

    def judges_by_noise(self, stage: str, step: int) -> bool:
        """Whether noise beyond the bound still counts as equal."""
        return self.tensors > 0 and _drifts(stage, step)


def _drifts(stage: str, step: int) -> bool:
    """Whether an optimizer step lies in between, which amplifies rounding."""
    return stage not in (trace.LOSS, trace.NORM) and (step > 1 or (step == 1 and stage == trace.WEIGHT))


# fp64 rounds at 1e-16 and fp32 at 6e-8; a gradient is a chain of some dozens of sums, whose order
# depends on the layout, and the optimizer's steps amplify the rounding of small gradients. A missing or
# doubled sum is wrong by O(1). In bf16 nothing is assumed.
#
# Adam divides a gradient by its own size. In fp32 the few elements that are zero but for rounding then make
# most of a weight's noise, and of all that follows; two perturbations sample so few badly: a factor of 16. In
# bf16 there are many of them.
BOUNDS = {
    1: Bounds(curve=1e-10, tensors=1e-10, drift_factor=16),
    2: Bounds(curve=1e-5, tensors=1e-6, drift_factor=16),
    3: Bounds(curve=0.0, tensors=0.0, drift_factor=4, least=2**-8),
    4: Bounds(curve=0.0, tensors=0.0, drift_factor=4, exact=True),
}

SAME = 1e-12
"""Of the batches and the initial weights, which must be the same: their sketches are summed in another order."""

NOISE_FACTOR = 4.0
"""How far beyond the largest of the measured perturbations an equal run may be; docs/lab_book.md has
the measurement."""

_MOST_NOISE, _MOST_BOUND = 0.5, 0.9  # a tensor of zeros, or an update that did not happen, has a gap of 1
_EPS_FP32 = 2.0**-23
_FIRST_STEPS = 10  # whose noise in the loss and the norm counts for each of them

# Of the bound that Megatron-LM holds gradients of layer l of L to: k * C^(L + 1 - l) * eps.
MEGATRON_K, MEGATRON_C = 4.0, 1.03


_ACTIVATIONS = (trace.INPUT, trace.OUTPUT, trace.OUTPUT_GRADIENT)
# What every run of a job has if the reference has it.
_ALWAYS_THERE = (trace.LOSS, trace.GRADIENT, trace.NORM)


@dataclass
class ModuleRow:
    """Largest gaps of one module over all steps."""

    module: str
    output_gap: float = math.nan
    """nan: not compared."""
    output_noise: float = 0.0
    output_control: float = 0.0
    gradient_gap: float = math.nan
    gradient_noise: float = 0.0
    gradient_control: float = 0.0
    megatron_bound: float = math.nan
    bad_step: int | None = None


@dataclass
class Comparison:
    """A run beside the reference."""

    verdict: Verdict
    loss_gaps: list[float]
    norm_gaps: list[float]
    max_relative_loss_gap: float
    max_relative_gradient_gap: float
    """Of any parameter at any step."""
    noise: float
    """Largest relative gap of the loss that a perturbation by one machine epsilon makes."""
    control: float
    """The same of a run that sums one layer's features in another order."""
    first_bad: Blame | None
    modules: list[ModuleRow] = field(default_factory=list)
    beyond: str = ""
    """Where a gap was first beyond the bound of its level and explained by noise."""
    missing: list[str] = field(default_factory=list)
    """Events of the reference that this run lacks, or whose place in the whole its shape does not tell."""
    unjudged: list[str] = field(default_factory=list)
    """Events in which rounding alone makes a difference as large as the value."""
    first_gradient_gap: float = math.nan
    """Largest of any parameter at the first step, when the weights are still the same."""
    steps: int = 0
    """Steps that were compared, of ``of_steps`` of the reference."""
    of_steps: int = 0
    worst: float = 0.0
    """Largest ratio of a gap to what is allowed."""

    def sentence(self) -> str:
        """Why the verdict is what it is, and what it does not cover; empty if all is equal and compared."""
        parts = [self.first_bad.sentence if self.first_bad else self.beyond]
        if self.steps < self.of_steps:
            parts.append(f"compared over {self.steps} of {self.of_steps} steps")
        if self.missing:
            parts.append(f"{len(self.missing)} values could not be compared, such as the {described(self.missing[0])}")
        if self.unjudged:
            parts.append(f"{len(self.unjudged)} values are rounding alone, such as the {described(self.unjudged[0])}")
        return "; ".join(filter(None, parts))


class Noise:
    """What rounding does to each event of a reference.

    Args:
        perturbed: runs of the reference whose weights were perturbed by an epsilon.
        control: a run of it that sums one layer's features in another order; for comparison only.
    """

    def __init__(self, reference: Trace, perturbed: Sequence[Trace], control: Trace | None = None) -> None:
        self.is_measured = bool(perturbed)
        self._noise = _largest_gaps(reference, perturbed)
        self.has_control = control is not None
        self._control = _largest_gaps(reference, [control] if control else [])

    def of(self, step: int, event: str) -> float:
        return self._noise.get((step, event), 0.0)

    def control_of(self, step: int, event: str) -> float:
        return self._control.get((step, event), 0.0)


def _largest_gaps(reference: Trace, runs: Sequence[Trace]) -> dict[tuple[int, str], float]:
    """By step and event: at least as large as at any step before, and as in the first steps, since single numbers
    often agree by chance."""
    found: dict[tuple[int, str], float] = {}
    so_far: dict[str, float] = {}
    others = {step.step: [run.at(step.step) for run in runs] for step in reference.trained}
    for step in reference.trained:
        for event in step.events:
            gaps = [
                gap(other.events[event], step.events[event])
                for other in others[step.step]
                if other is not None and event in other.events
            ]
            so_far[event] = max([so_far.get(event, 0.0), *gaps])
            found[step.step, event] = 0.0 if event.startswith(trace.BATCH) else so_far[event]
    for event in (key(trace.LOSS), key(trace.NORM)):
        first = [found[step.step, event] for step in reference.trained[:_FIRST_STEPS] if event in step.events]
        for step in reference.trained[:_FIRST_STEPS]:
            if event in step.events:
                found[step.step, event] = max(first)
    return found


def gap(actual: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """The relative distance of the farthest replica in ``actual`` from ``expected``."""
    norm = math.sqrt(expected[0, -1])
    with np.errstate(invalid="ignore", over="ignore"):
        distance = float(np.sqrt(((actual[:, :-1] - expected[0, :-1]) ** 2).sum(1)).max())
    if math.isnan(distance) or math.isnan(norm):
        return math.inf
    if distance == 0.0:
        return 0.0
    return distance / norm if norm > 0 else math.inf


def _distance(reference: Trace, event: str, actual: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    stage, path = split_key(event)
    distance = gap(actual, expected)
    if stage == trace.OUTPUT_GRADIENT and len(actual) > 1 and not readers(reference, path):
        # Used by code that this module stands in, whose other layers may be split: then each rank has a part
        # of the gradient, and whether it is summed shows in the gradients of this module's weights.
        distance = min(distance, gap(actual.sum(0, keepdims=True), expected))
    return distance


def compare(reference: Trace, actual: Trace, noise: Noise, bounds: Bounds, eps: float) -> Comparison:
    """Judges ``actual``, step by step and in each step in the order of cause and effect."""
    verdict: Verdict = "equal"
    first: Blame | None = None
    beyond, worst = "", 0.0
    missing: dict[str, None] = {}
    unjudged: dict[str, None] = {}
    rows = {path: ModuleRow(path) for path in _module_order(reference)}
    largest_gradient = first_gradient = math.nan
    for expected in reference.steps:
        found = actual.at(expected.step)
        if found is None:
            continue
        for event in in_causal_order(expected):
            stage, path = split_key(event)
            if event not in found.events:
                missing.setdefault(event)
                if stage in _ALWAYS_THERE and _is_whole(found) and first is None:
                    verdict, first = "different", absent(expected.step, event)
                continue
            distance = _distance(reference, event, found.events[event], expected.events[event])
            floor, rounding = bounds.of(stage, expected.step), noise.of(expected.step, event)
            if rounding > _MOST_NOISE:  # of a tensor that is zero but for rounding; what follows from it is judged
                unjudged.setdefault(event)
                continue
            bound = _bound(bounds, reference, expected, event, rounding, eps)
            if distance > floor and not bounds.judges_by_noise(stage, expected.step):
                verdict = "within_noise" if verdict == "equal" else verdict
                beyond = beyond or explained(expected.step, event, distance, floor, rounding)
            if bound > 0:
                worst = max(worst, distance / bound)
            bad = distance > bound
            if bad and first is None:
                verdict, first = "different", blame(reference, expected.step, event, distance, bound)
            if stage == trace.GRADIENT:
                largest_gradient = _larger(largest_gradient, distance)
                first_gradient = _larger(first_gradient, distance) if expected.step == 1 else first_gradient
            control = noise.control_of(expected.step, event)
            _note(rows, stage, path, (distance, rounding, control), expected.step if bad else None)
        if first is None and (extra := _extra_parameters(expected, found)):
            verdict, first = "different", unknown_parameter(expected.step, extra)
    _add_megatron(rows, reference, eps)
    losses = _gaps_of(reference, actual, key(trace.LOSS))
    return Comparison(
        verdict=verdict,
        loss_gaps=losses,
        norm_gaps=_gaps_of(reference, actual, key(trace.NORM)),
        max_relative_loss_gap=max(losses, default=math.nan),
        max_relative_gradient_gap=largest_gradient,
        noise=_largest_of_loss(noise.of, reference) if noise.is_measured else math.nan,
        control=_largest_of_loss(noise.control_of, reference) if noise.has_control else math.nan,
        first_bad=first,
        modules=list(rows.values()),
        beyond=beyond,
        worst=worst,
        missing=list(missing),
        unjudged=list(unjudged),
        first_gradient_gap=first_gradient,
        steps=sum(actual.at(step.step) is not None for step in reference.trained),
        of_steps=len(reference.trained),
    )


def _bound(bounds: Bounds, reference: Trace, step: Step, event: str, rounding: float, eps: float) -> float:
    """The gap up to which rounding explains an event."""
    stage, _ = split_key(event)
    bound = max(bounds.of(stage, step.step), bounds.noise_factor(stage, step.step) * rounding)
    if stage in _ACTIVATIONS:
        bound = max(bound, bounds.least)
    if stage == trace.WEIGHT and step.step > 0 and not bounds.exact:
        bound = max(bound, _rounding_of_storage(reference, step, event, eps))
    return min(bound, _MOST_BOUND)


def _largest_of_loss(of: Callable[[int, str], float], reference: Trace) -> float:
    return max((of(step.step, key(trace.LOSS)) for step in reference.trained), default=math.nan)


def _rounding_of_storage(reference: Trace, step: Step, event: str, eps: float) -> float:
    """What an ulp of the stored weights, fp32 or wider, is of what the optimizer has added to them."""
    start = reference.at(0)
    if start is None or event not in start.events:
        return 0.0
    weight, update = (math.sqrt(each.events[event][0, -1]) for each in (start, step))
    return min(eps, _EPS_FP32) * weight / update if update > 0 else 0.0


def _weights(step: Step) -> set[str]:
    return {event for event in step.events if split_key(event)[0] == trace.WEIGHT}


def _is_whole(step: Step) -> bool:
    """Whether it is the record of a run, and not a line of a file with losses alone."""
    return bool(_weights(step))


def _extra_parameters(expected: Step, found: Step) -> list[str]:
    return sorted(_weights(expected) ^ _weights(found)) if _is_whole(expected) and _is_whole(found) else []


def _note(
    rows: Mapping[str, ModuleRow], stage: str, path: str, gaps: tuple[float, float, float], bad_step: int | None
) -> None:
    module = owner_of(path) if stage in (trace.GRADIENT, trace.WEIGHT) else path.split("#")[0]
    row = rows.get(module)
    if row is None or stage in (trace.BATCH, trace.LOSS, trace.NORM, trace.INPUT):
        return
    if stage == trace.OUTPUT:
        before = (row.output_gap, row.output_noise, row.output_control)
        row.output_gap, row.output_noise, row.output_control = map(_larger, before, gaps)
    elif stage == trace.GRADIENT:
        before = (row.gradient_gap, row.gradient_noise, row.gradient_control)
        row.gradient_gap, row.gradient_noise, row.gradient_control = map(_larger, before, gaps)
    if bad_step is not None and row.bad_step is None:
        row.bad_step = bad_step


def _larger(before: float, now: float) -> float:
    return now if math.isnan(before) else max(before, now)


def _module_order(reference: Trace) -> list[str]:
    """Modules in the order in which they finish in the first step."""
    order: dict[str, None] = {}
    for step in reference.trained[:1]:
        for event in step.events:
            stage, path = split_key(event)
            if stage == trace.OUTPUT:
                order.setdefault(path.split("#")[0])
        for event in step.events:
            stage, path = split_key(event)
            if stage == trace.GRADIENT:
                order.setdefault(owner_of(path))
    return list(order)


def _add_megatron(rows: Mapping[str, ModuleRow], reference: Trace, eps: float) -> None:
    depth = len(reference.blocks)
    passed = 0
    for path, row in rows.items():
        inside = [number for number, block in enumerate(reference.blocks, 1) if is_within(path, block)]
        passed = max([passed, *inside])
        # Layers count from 1; what comes before the first is 0, what comes after the last L + 1.
        layer = inside[0] if inside else (depth + 1 if passed == depth and depth else 0)
        row.megatron_bound = MEGATRON_K * MEGATRON_C ** (depth + 1 - layer) * eps


def _gaps_of(reference: Trace, actual: Trace, event: str) -> list[float]:
    pairs = ((expected, actual.at(expected.step)) for expected in reference.trained)
    return [gap(b.events[event], a.events[event]) for a, b in pairs if b and event in a.events and event in b.events]
