"""Plans that would give wrong numbers later, told from the shapes of what they split."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fsdp_tp.layers.split import Split
from fsdp_tp.modules import find_blocks
from fsdp_tp.paths import is_within, parent_of


def check_plan(
    model: nn.Module,
    styles: Mapping[str, str],
    *,
    splits: Mapping[str, Split] | None = None,
    ranks: int = 1,
    proven: bool = False,
) -> dict[str, str]:
    """``styles`` (see :func:`fsdp_tp.plans.match_plan`) in the words that ``parallelize`` acts on.

    Only the plain styles ``column`` and ``per_head`` are checked: others say that what these would
    get wrong is meant.

    Args:
        splits: of layers whose features are not split evenly over the ``ranks``: these are meant.
        proven: the plan was compared with one process: packed rows are known to be in the right order.

    Raises:
        ValueError: a column layer that no row layer follows, a packed projection whose rows would be
            split in the wrong order, or a norm over all heads.
    """
    columns = _linears(model, styles, ("column", "column_by_head"))
    rows = _linears(model, styles, ("row",))
    _check_followed(model, styles, columns, rows)
    if not proven:
        features = {path: (module.in_features, module.out_features) for path, module in (columns | rows).items()}
        for path, (row, wanted) in packed(styles, features).items():
            raise ValueError(
                f"{path} is column and returns {features[path][1]} features, but {row} reads {wanted}: it is packed "
                "(query, key and value, or gate and up, in one weight), and a slice of its rows would not hold a part "
                "of each. If its rows are those of one head after another, query, key and value of each, say "
                "'column_by_head'; else unpack it into several linears"
            )
    _check_norms(model, styles, columns)
    _check_heads(model, {path: column for path, column in columns.items() if path not in (splits or {})}, ranks)
    return {path: "column" if style == "column_by_head" else style for path, style in styles.items()}


def packed(styles: Mapping[str, str], features: Mapping[str, tuple[int, int]]) -> dict[str, tuple[str, int]]:
    """Column layers whose output is not what the row layer beside them reads: ``{path: (row layer, its inputs)}``.

    Only where a module has one of each. With several column layers (query, key and value) those
    may differ: fewer heads, gates, heads of other widths.

    Args:
        features: of linears, by path: ``(in, out)``.
    """
    found = {}
    for path in features:
        if styles.get(path) != "column":
            continue
        beside = [other for other in features if parent_of(other) == parent_of(path)]
        columns = [other for other in beside if styles.get(other) in ("column", "column_by_head")]
        rows = [other for other in beside if styles.get(other) == "row"]
        if len(columns) == 1 and len(rows) == 1 and features[path][1] != features[rows[0]][0]:
            found[path] = (rows[0], features[rows[0]][0])
    return found


def _check_followed(
    model: nn.Module, styles: Mapping[str, str], columns: Mapping[str, nn.Linear], rows: Mapping[str, nn.Linear]
) -> None:
    blocks = find_blocks(model)
    with_rows = {_block_of(path, blocks) for path in rows}
    for path in columns:
        if (block := _block_of(path, blocks)) not in with_rows:
            raise ValueError(
                f"{path} is column, but {block or 'the model'} has no row layer that would read its output: what "
                "follows would take this rank's features for all of them. Say 'row' of the linear that reads it, or "
                "'column_gather' of the last projection"
            )
        reader = _whole_reader(model, path, columns, rows)
        if reader is not None:
            raise ValueError(
                f"{path} is column, but {reader} beside it, the only linear there that reads as many features "
                f"({columns[path].out_features}), is {styles.get(reader, 'not in the plan')}: it would take this "
                f"rank's features for all of them. Say 'row' of {reader}"
            )


def _whole_reader(
    model: nn.Module, path: str, columns: Mapping[str, nn.Linear], rows: Mapping[str, nn.Linear]
) -> str | None:
    """The linear beside a column layer that must be what reads its output, if the plan leaves that linear whole."""
    parent = parent_of(path)
    beside = {
        f"{parent}.{name}".removeprefix("."): child
        for name, child in model.get_submodule(parent).named_children()
        if isinstance(child, nn.Linear)
    }
    features = columns[path].out_features
    readers = [other for other, linear in beside.items() if other not in columns and linear.in_features == features]
    # A module whose output is as wide as its input has more linears of this size than the reader.
    if features == columns[path].in_features or len(readers) != 1 or readers[0] in rows:
        return None
    return readers[0]


def check_sequence_is_split(styles: Mapping[str, str]) -> None:
    """Of a plan for sequence parallelism.

    Raises:
        ValueError: norms are said to see a slice of the sequence, and nothing would make slices.
    """
    sliced = next((path for path, style in styles.items() if style in ("sequence", "sequence_gather")), None)
    if sliced is not None and not {"vocab", "split_sequence"} & set(styles.values()):
        raise ValueError(
            f"sequence_parallel=True and {sliced} is {styles[sliced]}, applied to this rank's slice of the sequence, "
            "but nothing in the plan splits the sequence: say 'vocab' of the embedding, or 'split_sequence' of the "
            "first block where the embedding stays whole"
        )


def _check_norms(model: nn.Module, styles: Mapping[str, str], columns: Mapping[str, nn.Linear]) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for path, style in styles.items():
        if style != "per_head":
            continue
        parent = parent_of(path)
        while parent and not any(is_within(column, parent) for column in columns):
            parent = parent_of(parent)
        beside = {column: module.out_features for column, module in columns.items() if is_within(column, parent)}
        widest = max(beside, key=lambda column: beside[column], default=None)
        for name, parameter in parameters.items():
            if widest is None or not (name == path or parent_of(name) == path):
                continue
            size = parameter.numel()
            if parameter.ndim == 1 and size > 1 and size == beside[widest]:
                raise ValueError(
                    f"{name} is per_head, but has {size} elements, one for each feature of {widest}: it is applied to "
                    "all heads at once, of which a rank has its part only. A norm over all heads needs their sum over "
                    "the ranks; leave the module whole ('replicate', and its linears out of the plan)"
                )


def _check_heads(model: nn.Module, columns: Mapping[str, nn.Linear], ranks: int) -> None:
    """Of modules that say how wide a head is."""
    for path, column in columns.items():
        head_dim = getattr(model.get_submodule(parent_of(path)), "head_dim", None)
        if not isinstance(head_dim, int) or head_dim < 1 or column.out_features % head_dim:
            continue
        heads = column.out_features // head_dim
        if heads % ranks:
            raise ValueError(
                f"{path} is column and returns {heads} heads of head_dim={head_dim}: over a tensor axis of {ranks} "
                "ranks that would cut inside a head, or leave ranks other numbers of queries for a key than the "
                "module's code may have fixed. Build the attention from "
                "fsdp_tp.ParallelAttention, or pass plan=fsdp_tp.plans.Plan(styles=..., splits=...) with splits from "
                "fsdp_tp.layers.heads.HeadLayout"
            )


def _linears(model: nn.Module, styles: Mapping[str, str], wanted: tuple[str, ...]) -> dict[str, nn.Linear]:
    modules = {path: model.get_submodule(path) for path, style in styles.items() if style in wanted}
    return {path: module for path, module in modules.items() if isinstance(module, nn.Linear)}


def _block_of(path: str, blocks: Mapping[str, nn.Module]) -> str:
    return next((block for block in blocks if is_within(path, block)), "")
