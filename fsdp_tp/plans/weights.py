"""What becomes of every single weight under a plan; an error where the plan does not say."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp_tp.layers.split import Split
from fsdp_tp.paths import join_path, lineage, parent_of
from fsdp_tp.plans.styles import WHOLE_STYLES

SPLIT_STYLES = ("column", "column_gather", "row", "vocab")


def check_ties(model: nn.Module, styles: Mapping[str, str], parts: Mapping[str, tuple[Split, int]]) -> None:
    first: dict[nn.Parameter, tuple[str, Placement]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            part = parts.get(join_path(path, name))
            placement = _placement(styles.get(path), name) if part is None else Shard(part[1])
            other, other_placement = first.setdefault(parameter, (f"{path}.{name}", placement))
            if placement != other_placement:
                raise ValueError(
                    f"{path}.{name} is tied to {other}, but the plan places them differently: "
                    f"{placement} and {other_placement}"
                )


def _placement(style: str | None, name: str) -> Placement:
    """Where the parameter ``name`` of a module of ``style`` goes on the tensor axis."""
    if style == "row":
        return Shard(1) if name == "weight" else Replicate()
    return Shard(0) if style in SPLIT_STYLES else Replicate()


def check_every_gradient_is_known(
    model: nn.Module, styles: Mapping[str, str], parts: Mapping[str, tuple[Split, int]], sequence_parallel: bool
) -> None:
    """A whole weight may see whole activations or a slice of them; a guess would be a wrong gradient."""
    split_parents = {parent_of(path) for path, style in styles.items() if style in ("column", "row")}
    unclear = []
    for path, module in model.named_modules():
        if styles.get(path) in (*SPLIT_STYLES, "over_heads"):
            continue
        for name, own in module.named_parameters(recurse=False):
            if isinstance(own, DTensor):
                continue  # of a parallel layer
            parameter = join_path(path, name)
            if parameter in parts:
                continue
            style = whole_style(parameter, styles)
            if style not in ("per_head", "over_heads") and is_inside_shared_input(parameter, styles):
                raise ValueError(
                    f"{parameter} stays whole inside a shared_input module, where only weights between the column and "
                    "row layers can: give it the style 'per_head' if it is there, or drop the shared_input"
                )
            beside_split_layers = any(ancestor in split_parents for ancestor in lineage(path))
            if style is None and (sequence_parallel or beside_split_layers):
                unclear.append(parameter)
    if unclear:
        patterns = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", path) for path in unclear)
        raise ValueError(
            f"the plan leaves open: {', '.join(patterns)}. Say 'column' or 'row' for a linear that is to be split. For "
            "weights that stay whole say, of the parameter or its module, what they are applied to: 'replicate' "
            "(activations that every rank has whole), 'sequence' (between blocks, split by sequence parallelism) or "
            "'per_head' (between a column and a row layer)"
        )


def whole_style(path: str, styles: Mapping[str, str]) -> str | None:
    """The style of a parameter that stays whole: its own, its module's or the nearest ancestor's."""
    return next((styles[at] for at in lineage(path) if styles.get(at) in WHOLE_STYLES), None)


def is_inside_shared_input(path: str, styles: Mapping[str, str]) -> bool:
    return any(styles.get(ancestor) == "shared_input" for ancestor in lineage(path)[1:])
