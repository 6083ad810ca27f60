"""The words of a plan, and the matching of its patterns to a model's modules."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import TypeVar

from torch import nn

Value = TypeVar("Value")

STYLES: dict[str, str] = {
    "column": "ColumnParallelLinear: the output features are split",
    "column_by_head": "as column, of a packed projection whose rows are those of one head after another (query, key "
    "and value of each), so that a slice of them is whole heads",
    "column_gather": "ColumnParallelLinear whose output is gathered (unless loss_parallel): for the last projection",
    "row": "RowParallelLinear: the input features are split, the output is summed",
    "vocab": "VocabParallelEmbedding: the rows are split, the output is summed",
    "replicate": "whole on every rank, applied to activations that every rank has whole",
    "sequence": "whole on every rank, applied to this rank's slice of the sequence under sequence parallelism "
    "(a norm between blocks); without it the same as replicate",
    "sequence_gather": "as sequence, and under sequence parallelism its output is gathered: the last norm",
    "per_head": "whole on every rank, applied to this rank's part between column and row layers (a query or key "
    "norm): gradients are summed",
    "shared_input": "a module (attention, mlp) whose first argument is the input of all its column layers: its "
    "gradient is reduced once for all of them, and under sequence parallelism it is gathered once. Weights that "
    "are not split may stand only between its column and row layers (per_head)",
    "over_heads": "an RMSNorm between column and row layers whose mean is over all heads, of which a rank has its part",
    "experts": "a module with parameters gate_up_proj (experts, 2 * width, hidden) and down_proj (experts, hidden, "
    "width), called with tokens, chosen experts and their weights: the width is split, the output is summed",
    "whole_sequence": "under sequence parallelism the first argument of this module is gathered and its output split "
    "again: for what must see all tokens (a router), on weights with the style replicate",
    "split_sequence": "under sequence parallelism the first argument of this module is split along the sequence "
    "(the first block, when the embedding leaves it whole)",
}


WHOLE_STYLES = ("replicate", "sequence", "sequence_gather", "per_head")
"""Of modules, or of single parameters, that every rank has whole."""


def match_plan(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Resolves patterns such as ``"layers.*.attn.wq"`` to ``{path: style}``.

    A path is that of a module, or of a single parameter that a module owns beside others.
    ``*`` stands for any part of one component (a layer index). A path may match several
    patterns if they agree.

    Raises:
        ValueError: an unknown style, a pattern that matches nothing (the message names the
            closest paths), a split style for a parameter, or two patterns that give one path
            different styles.
    """
    parameters = {path for path, _ in model.named_parameters()}
    for pattern, style in plan.items():
        if style not in STYLES:
            raise ValueError(f"plan[{pattern!r}]={style!r} is not a style; legal: {', '.join(STYLES)}")
    resolved = match(model, plan)
    for path, style in resolved.items():
        if path in parameters and style not in WHOLE_STYLES:
            raise ValueError(f"{path!r} is a parameter: its style can be {', '.join(WHOLE_STYLES)}, not {style!r}")
    return resolved


def match(model: nn.Module, patterns: Mapping[str, Value]) -> dict[str, Value]:
    """Resolves patterns to the paths of modules and parameters, as :func:`match_plan` does.

    Raises:
        ValueError: a pattern that matches nothing, or two that give one path different values.
    """
    paths = [path for path, _ in model.named_modules() if path] + sorted(path for path, _ in model.named_parameters())
    resolved: dict[str, Value] = {}
    for pattern, value in patterns.items():
        regex = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
        matches = [path for path in paths if regex.fullmatch(path)]
        if not matches:
            near = difflib.get_close_matches(pattern, dict.fromkeys(re.sub(r"\.\d+", ".*", path) for path in paths))
            hint = f"; the closest are: {', '.join(near)}" if near else ""
            raise ValueError(f"the plan pattern {pattern!r} matches no module of {type(model).__name__}{hint}")
        for path in matches:
            if resolved.setdefault(path, value) != value:
                raise ValueError(f"the plan gives {path!r} two styles: {resolved[path]!r} and {value!r}")
    return resolved
