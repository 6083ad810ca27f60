"""A plan to start from, for a model that nobody knows: told from names and shapes, to be checked by its author."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from fsdp_tp.modules import find_blocks, is_conv1d, is_norm
from fsdp_tp.paths import is_within, parent_of
from fsdp_tp.plans.check import packed

_COLUMNS = re.compile(
    r"(^|_)(q|k|v|wq|wk|wv|qkv|wqkv|query|key|value|gate|up|fc1|fc_in|c_fc|c_attn|w1|w3|h_to_4h)(_|$)"
)
_ROWS = re.compile(r"(^|_)(o|wo|out|down|fc2|fc_out|c_proj|w2|4h_to_h)(_|$)")
_UNCLEAR_LINEAR = "<column, row or replicate>"
_PACKED = "<packed: column_by_head if its rows are one head after another, else unpack it>"
_UNCLEAR_WEIGHT = "<replicate, sequence or per_head>"


def suggestion(model: nn.Module) -> str:
    """The text of an error: a dict plan in the module names of ``model``, one line a pattern."""
    lines = [f'    "{pattern}": "{style}",' for pattern, style in suggest_plan(model).items()]
    text = (
        "Pass a plan of your own. This one is told from names and shapes only: copy it, check every line against the "
        "forward (packed projections, norms over all heads and fixed head counts do not work so), fill in what stands "
        "in <>, and compare with verify=(inputs,)\nplan = {\n"
    )
    return "\n".join([text.rstrip("\n"), *lines, "}"])


def suggest_plan(model: nn.Module) -> dict[str, str]:
    """Patterns and styles; ``<...>`` where names and shapes do not tell."""
    modules = {path: module for path, module in model.named_modules() if path}
    blocks = find_blocks(model)
    in_blocks = {path for path in modules if any(is_within(path, block) for block in blocks)}
    linears = {path: shape for path, module in modules.items() if (shape := _features(module))}
    split = {path: _linear_style(path, *shape) for path, shape in linears.items() if path in in_blocks}
    split |= dict.fromkeys(packed(split, linears), _PACKED)
    parents = {parent_of(path) for path, style in split.items() if style in ("column", _PACKED)} - set(blocks)
    embeddings = [module for module in modules.values() if isinstance(module, nn.Embedding)]
    of_tokens = max(embeddings, key=lambda module: module.num_embeddings, default=None)  # the first of equals
    vocabulary = of_tokens.num_embeddings if of_tokens else None
    after_blocks = _after_blocks(list(modules), in_blocks)

    plan: dict[str, str] = {}
    for path, module in modules.items():
        own = list(module.named_parameters(recurse=False))
        if path in blocks and list(blocks).index(path) == 0:
            plan[path] = "split_sequence"
        if path in parents:
            plan.setdefault(_pattern(path), "shared_input")
        if path in split:
            plan.setdefault(_pattern(path), split[path])
        elif path in linears:
            plan[path] = "column_gather" if linears[path][1] == vocabulary else "replicate"
        elif isinstance(module, nn.Embedding):
            plan.setdefault(_pattern(path), "vocab" if module is of_tokens else "replicate")
        elif own and path not in in_blocks:
            plan[path] = "sequence_gather" if path in after_blocks and is_norm(module) else "replicate"
        elif own and is_norm(module):
            inside = any(is_within(path, parent) for parent in parents)
            plan.setdefault(_pattern(path), "per_head" if inside else "sequence")
        else:
            for name, _ in own:
                plan.setdefault(_pattern(f"{path}.{name}"), _UNCLEAR_WEIGHT)
    bare = {name: "replicate" for name, _ in model.named_parameters(recurse=False)}
    return bare | plan


def _features(module: Any) -> tuple[int, int] | None:
    """``(in, out)`` of a linear layer, or of the Conv1D of Hugging Face's GPT-2."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if is_conv1d(module):
        return tuple(module.weight.shape)
    return None


def _linear_style(path: str, inputs: int, outputs: int) -> str:
    name = path.rpartition(".")[2].lower()
    if _ROWS.search(name):
        return "row"
    if _COLUMNS.search(name) and not (name == "gate" and outputs < inputs):  # a router has that name too
        return "column"
    if outputs < inputs / 4 or outputs == inputs:
        return _UNCLEAR_LINEAR
    return "column" if outputs > inputs else "row"


def _after_blocks(paths: list[str], in_blocks: set[str]) -> set[str]:
    last = max((number for number, path in enumerate(paths) if path in in_blocks), default=len(paths))
    return set(paths[last + 1 :])


def _pattern(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
