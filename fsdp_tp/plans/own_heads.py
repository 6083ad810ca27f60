"""Heads of people's own attention modules: which rank computes which, where their number does not divide."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fsdp_tp.layers.heads import HeadLayout
from fsdp_tp.layers.split import Split
from fsdp_tp.paths import parent_of


def splits_by_head(model: nn.Module, styles: Mapping[str, str], ranks: int) -> dict[str, Split]:
    """Splits of whole heads, for the column layers and the row layer of modules that say how wide a head is.

    That is an attribute ``head_dim`` of the module that owns the projections. The row layer reads all query heads; a
    column layer that returns fewer features returns key/value heads. Modules whose heads an even split keeps whole are
    left out, and those where ranks would have other numbers of query heads a key/value head than the whole: their
    code may have that number fixed (:func:`fsdp_tp.plans.check_plan` refuses these).
    """
    splits: dict[str, Split] = {}
    modules = dict(model.named_modules())
    for attention in {parent_of(path) for path, style in styles.items() if style == "column"}:
        head_dim = getattr(modules[attention], "head_dim", None)
        own = {
            path: module
            for path in styles
            if parent_of(path) == attention and isinstance(module := modules.get(path), nn.Linear)
        }
        columns = {path: linear.out_features for path, linear in own.items() if styles[path] == "column"}
        rows = {path: linear.in_features for path, linear in own.items() if styles[path] == "row"}
        features = {*columns.values(), *rows.values()}
        if not isinstance(head_dim, int) or head_dim < 1 or len(rows) != 1 or any(size % head_dim for size in features):
            continue
        (queries,) = {size // head_dim for size in rows.values()}
        heads = {size // head_dim for size in columns.values()}
        kv = min(heads)
        if heads - {queries, kv} or queries % kv or all(count % ranks == 0 for count in (queries, kv)):
            continue
        layout = HeadLayout(queries, kv, ranks)
        if any(layout.num_local_groups(rank) != queries // kv for rank in range(ranks)):
            continue
        for path, size in (columns | rows).items():
            splits[path] = (layout.queries if size == queries * head_dim else layout.kv).blocks(head_dim)
    return splits
