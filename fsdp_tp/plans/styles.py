"""The words of a plan, and the matching of its patterns to a model's modules."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from torch import nn

STYLES: dict[str, str] = {
    "column": "ColumnParallelLinear: the output features are split",
    "column_gather": "ColumnParallelLinear whose output is gathered (unless loss_parallel): for the last projection",
    "row": "RowParallelLinear: the input features are split, the output is summed",
    "vocab": "VocabParallelEmbedding: the rows are split, the output is summed",
    "replicate": "whole on every rank, applied to activations that every rank has whole",
    "sequence": "whole on every rank, applied to this rank's slice of the sequence under sequence parallelism "
    "(a norm between blocks); without it the same as replicate",
    "per_head": "whole on every rank, applied to this rank's heads (a query or key norm): gradients are summed",
    "shared_input": "a module (attention, mlp) whose first argument is the common input of its column layers: "
    "its gradient is reduced once for all of them, and under sequence parallelism it is gathered once",
    "split_sequence": "under sequence parallelism the first argument of this module is split along the sequence "
    "(the first block, when the embedding leaves it whole)",
}


def match_plan(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Resolves patterns such as ``"layers.*.attn.wq"`` to ``{module path: style}``.

    ``*`` stands for any one component of a path (a layer index). A path may match several
    patterns if they agree.

    Raises:
        ValueError: an unknown style, a pattern that matches nothing (the message names the
            closest paths), or two patterns that give one module different styles.
    """
    paths = [path for path, _ in model.named_modules() if path]
    resolved: dict[str, str] = {}
    for pattern, style in plan.items():
        if style not in STYLES:
            raise ValueError(f"plan[{pattern!r}]={style!r} is not a style; legal: {', '.join(STYLES)}")
        regex = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
        matches = [path for path in paths if regex.fullmatch(path)]
        if not matches:
            near = difflib.get_close_matches(pattern, dict.fromkeys(re.sub(r"\.\d+", ".*", path) for path in paths))
            hint = f"; the closest are: {', '.join(near)}" if near else ""
            raise ValueError(f"the plan pattern {pattern!r} matches no module of {type(model).__name__}{hint}")
        for path in matches:
            if resolved.setdefault(path, style) != style:
                raise ValueError(f"the plan gives {path!r} two styles: {resolved[path]!r} and {style!r}")
    return resolved
