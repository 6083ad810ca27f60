"""Where two runs part, in words: the order of cause and effect, and who is to blame for an event."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_tp.parity import trace
from fsdp_tp.parity.trace import Step, Trace, key, split_key
from fsdp_tp.paths import parent_of


@dataclass(frozen=True)
class Blame:
    """The first event beyond its bound."""

    step: int
    stage: str
    module: str
    gap: float
    bound: float
    sentence: str


def in_causal_order(step: Step) -> Iterator[str]:
    """A step's events as one leads to another: batch, forward, loss, backward with the gradients of the
    parameters that each module gets then, gradient norm, weights."""
    by_stage: dict[str, list[str]] = {}
    for event in step.events:
        by_stage.setdefault(split_key(event)[0], []).append(event)
    yield from by_stage.get(trace.BATCH, [])
    yield from (event for event in step.events if split_key(event)[0] in (trace.INPUT, trace.OUTPUT))
    yield from by_stage.get(trace.LOSS, [])
    gradients = by_stage.get(trace.GRADIENT, [])
    owners: dict[str, list[str]] = {}
    for event in gradients:
        owners.setdefault(owner_of(split_key(event)[1]), []).append(event)
    for event in by_stage.get(trace.OUTPUT_GRADIENT, []):
        yield event
        yield from owners.pop(split_key(event)[1].split("#")[0], [])
    for rest in owners.values():
        yield from rest
    yield from by_stage.get(trace.NORM, [])
    yield from by_stage.get(trace.WEIGHT, [])


def owner_of(parameter: str) -> str:
    """The path of the module that has it."""
    return parent_of(parameter)


def blame(reference: Trace, step: int, event: str, distance: float, bound: float) -> Blame:
    """Whose fault it is that ``event`` is the first to differ."""
    stage, path = split_key(event)
    module = path.split("#")[0]
    numbers = f"relative gap {distance:.1e}, bound {bound:.1e}"
    if stage == trace.BATCH:
        sentence = "the batches differ, so the runs cannot be compared"
        module = "batch"
    elif stage == trace.INPUT:
        module = _enclosing(reference, module)
        sentence = f"what {_name(module)} computes for {path} differs, and nothing before it ({numbers})"
    elif stage == trace.OUTPUT:
        sentence = f"the output of {_name(module)} differs, and nothing before it ({numbers})"
    elif stage == trace.LOSS:
        module = "loss"
        sentence = f"the loss differs, and nothing that was compared before it ({numbers})"
    elif stage == trace.OUTPUT_GRADIENT:
        module = _consumer(reference, path)
        sentence = (
            f"the gradient that {_name(module)} gives to the output of {_name(path)} differs, and nothing before "
        )
        sentence += f"it in forward and backward ({numbers})"
    elif stage == trace.GRADIENT:
        module = owner_of(path)
        sentence = f"the gradient of {path} differs, and nothing before it in forward and backward ({numbers})"
    elif stage == trace.NORM:
        module = "gradient norm"
        sentence = f"the gradient norm differs, and nothing that was compared before it ({numbers})"
    elif step == 0:
        module = owner_of(path)
        sentence = f"the initial value of {path} differs ({numbers})"
    else:
        module = owner_of(path)
        sentence = f"what the optimizer has added to {path} differs, and no gradient ({numbers})"
    return Blame(step, stage, module, distance, bound, f"step {step}: {sentence}")


def explained(step: int, event: str, distance: float, floor: float, rounding: float) -> str:
    """What noise explains."""
    above = f", above {floor:.0e}" if floor else ""
    what = f"from step {step} on, first the {described(event)}"
    return f"{what}: relative gap {distance:.1e}{above}, rounding makes {rounding:.1e}"


def described(event: str) -> str:
    """An event in words."""
    stage, path = split_key(event)
    return f"{stage} of {path}" if path else stage


def absent(step: int, event: str) -> Blame:
    """For an event that only the reference has."""
    stage, path = split_key(event)
    sentence = f"step {step}: this run has no {described(event)}, the reference has"
    return Blame(step, stage, owner_of(path) if path else stage, math.inf, 0.0, sentence)


def _consumer(reference: Trace, path: str) -> str:
    """Who reads the output of a module: the outermost module that takes it unchanged, or else the one around it."""
    found = readers(reference, path)
    return min(found, key=lambda reader: reader.count(".")) if found else _enclosing(reference, path.split("#")[0])


def _enclosing(reference: Trace, path: str) -> str:
    """The nearest module around ``path`` that has a forward of its own; a ModuleList has none."""
    first = reference.trained[0].events if reference.trained else {}
    ran = {path for stage, path in map(split_key, first) if stage == trace.OUTPUT}
    while path:
        path = parent_of(path)
        if path in ran:
            break
    return path


def readers(reference: Trace, path: str) -> list[str]:
    """The modules that take the output of the module at ``path`` unchanged."""
    output = key(trace.OUTPUT, path)
    return [split_key(event)[1].split("#")[0] for event, source in reference.sources.items() if source == output]


def _name(module: str) -> str:
    return module or "the model itself"


def unknown_parameter(step: int, extra: Sequence[str]) -> Blame:
    """For parameters that only one of the two runs has."""
    names = ", ".join(split_key(event)[1] for event in extra[:3])
    sentence = f"step {step}: only one of the two runs has the parameter {names} (a tied weight that was untied?)"
    return Blame(step, trace.WEIGHT, owner_of(split_key(extra[0])[1]), math.inf, 0.0, sentence)
