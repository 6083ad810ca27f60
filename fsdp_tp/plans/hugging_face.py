"""A plan from the ``base_model_tp_plan`` that a Hugging Face config carries.

That plan names the column and row layers only. Everything else is told from rehearsals of
the model: with whole weights, and with one rank's part of them. What they leave open is an error.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from torch import nn

from fsdp_tp.config import divisors
from fsdp_tp.modules import find_blocks, is_norm
from fsdp_tp.paths import is_within, parent_of
from fsdp_tp.plans.rehearsal import Recording, Slices, rehearse
from fsdp_tp.plans.suggest import suggestion

_STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "vocab",
    "replicate": "replicate",
    "replicated_with_grad_allreduce": "per_head",
}
_OF_EACH_TOKEN = ("add", "mul", "rmul", "radd", "dropout", "to", "float", "type")
"""Operations that give a slice of the sequence what they give the whole."""


def has_plan(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "base_model_tp_plan", None))


class _Open(ValueError):
    """The config's plan is not enough; another plan can be."""


def hugging_face_plan(model: Any, size: int, *, sequence_parallel: bool = False) -> dict[str, str]:
    """Paths and styles of a model whose config has a ``base_model_tp_plan``, with a warning.

    Args:
        size: of the tensor axis.

    Raises:
        ValueError: the plan has a style that is none of ours, the axis does not divide a layer that
            it splits or the heads, or how the model works leaves the treatment of a weight open.
    """
    what = f"the base_model_tp_plan of {type(model).__name__}"
    try:
        styles = _plan(model, size, what, sequence_parallel)
    except _Open as error:
        raise ValueError(f"{error}. {suggestion(model)}") from error
    warnings.warn(
        f"{type(model).__name__} is not in the README's table of families that are proven equal to one process: "
        "its plan is made from its config's base_model_tp_plan. Prove it with python -m fsdp_tp.parity, or pass "
        "verify=True",
        stacklevel=4,
    )
    return styles


def _plan(model: Any, size: int, what: str, sequence_parallel: bool) -> dict[str, str]:
    styles = _translate(model, what)
    columns = [path for path, style in styles.items() if style == "column"]
    rows = [path for path, style in styles.items() if style == "row"]
    if not columns or not rows:
        raise _Open(f"{what} splits no layer of its blocks")
    _check_sizes(model, columns, rows, size)
    styles |= _ends(model)

    shape = (2, 2 * size)
    slices = Slices(size=size, columns=columns, rows=rows)
    whole = _rehearse(model, shape, None, f"{what} is not enough: its forward cannot be followed")
    part = _rehearse(
        model,
        shape,
        slices,
        f"{what} does not suit its forward, which fails with a part of the weights (does it fix the number of heads, "
        "or norm over all of them?)",
    )
    parents = {parent_of(path) for path in (*columns, *rows)} - set(find_blocks(model))
    styles |= _whole_weights(model, styles, parents, whole, part, what)
    shared = [parent for parent in sorted(parents) if _reads_only_by(whole, parent, columns)]
    styles |= dict.fromkeys(shared, "shared_input")
    if sequence_parallel:
        try:
            styles |= _sequence(model, parents, shared, whole, slices, shape)
        except ValueError as error:
            raise ValueError(f"sequence_parallel=True is not possible with {what}: {error}") from None
    return styles


def _translate(model: Any, what: str) -> dict[str, str]:
    prefix = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    modules = dict(model.named_modules())
    paths = [*modules, *(name for name, _ in model.named_parameters())]
    styles: dict[str, str] = {}
    unknown: dict[str, None] = {}
    for pattern, theirs in model.config.base_model_tp_plan.items():
        regex = re.compile(r"\d+".join(map(re.escape, f"{prefix}{pattern}".split("*"))))
        for path in filter(regex.fullmatch, paths):  # one that matches nothing is of other sizes of the family
            ours = _STYLES.get(theirs)
            is_linear = type(modules.get(path)) is nn.Linear
            if ours is None or (ours in ("column", "row") and not is_linear):
                unknown[f"{pattern}: {theirs}"] = None
            else:
                styles[path] = ours
    if unknown:
        raise _Open(f"{what} splits in ways that plan='auto' cannot: {', '.join(unknown)}")
    return styles


def _check_sizes(model: Any, columns: list[str], rows: list[str], size: int) -> None:
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(model.config, name, None)
        if isinstance(heads, int) and heads % size:
            raise ValueError(_does_not_divide(size, f"{name}={heads}", heads))
    for path in (*columns, *rows):
        name = "out_features" if path in columns else "in_features"
        if (features := getattr(model.get_submodule(path), name)) % size:
            raise ValueError(_does_not_divide(size, f"the {name}={features} of {path}", features))


def _does_not_divide(size: int, what: str, number: int) -> str:
    return (
        f"tensor_parallel_degree={size} does not divide {what}; legal values: {', '.join(map(str, divisors(number)))}. "
        "For another degree pass a dict plan that leaves these layers whole, or a fsdp_tp.plans.Plan with splits that "
        "cut between heads"
    )


def _ends(model: Any) -> dict[str, str]:
    """The embedding, and the head if it is a linear: their outputs are whole, so they fit everywhere."""
    paths = {module: path for path, module in model.named_modules()}
    styles = {paths[model.get_input_embeddings()]: "vocab"}
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        styles[paths[head]] = "column_gather"
    return styles


def _rehearse(model: Any, shape: tuple[int, int], slices: Slices | None, sentence: str) -> Recording:
    try:
        return rehearse(model, shape, slices)
    except Exception as error:  # whatever the model's forward raises
        raise _Open(f"{sentence}: {(str(error) or type(error).__name__).splitlines()[0]}") from error


def _whole_weights(
    model: nn.Module, styles: dict[str, str], parents: set[str], whole: Recording, part: Recording, what: str
) -> dict[str, str]:
    """Styles of all modules with weights that are not split: by whether what they read is."""
    found: dict[str, str] = {}
    blocks = find_blocks(model)
    for path, module in model.named_modules():
        if styles.get(path, "per_head") != "per_head" or not any(True for _ in module.parameters(recurse=False)):
            continue
        inside = any(is_within(path, parent) for parent in parents)
        shapes = [[_shape(call.input) for call in recording.of(path)] for recording in (whole, part)]
        reads_part = shapes[0] != shapes[1]
        if reads_part and inside and not _has_children(module):
            found[path] = "per_head"
        elif inside or reads_part or styles.get(path):
            raise _Open(
                f"{what} does not say how {path} ({type(module).__name__}) is treated, and its place does not tell"
            )
        else:
            found[path] = "sequence" if is_norm(module) and _within_any(path, blocks) else "replicate"
    return found


def _reads_only_by(recording: Recording, parent: str, columns: list[str]) -> bool:
    """Whether nothing but column layers reads the first argument of ``parent``, inside of it."""
    inputs = {id(call.input) for call in recording.of(parent)}
    readers = {read.path for read in recording.reads if id(read.tensor) in inputs and is_within(read.path, parent)}
    inside = [column for column in columns if is_within(column, parent)]
    return bool(inside) and readers == set(inside)


def _sequence(
    model: Any,
    parents: set[str],
    shared: list[str],
    whole: Recording,
    slices: Slices,
    shape: tuple[int, int],
) -> dict[str, str]:
    blocks = find_blocks(model)
    for parent in sorted(parents):
        if parent not in shared:
            raise ValueError(f"not only column layers read the first argument of {parent}")
    for path in (*slices.columns, *slices.rows):
        if parent_of(path) not in parents:
            raise ValueError(f"{path} stands in the block itself")
    for path, module in model.named_modules():
        outside = _within_any(path, blocks) and path not in blocks and not any(is_within(path, p) for p in parents)
        holds_a_parent = any(is_within(parent, path) for parent in parents)
        if outside and not holds_a_parent and not (is_norm(module) or isinstance(module, nn.Dropout | nn.Identity)):
            raise ValueError(f"{path} ({type(module).__name__}) may mix the tokens of a sequence")
    for read in whole.reads:
        if read.path in blocks and read.operation.strip("_") not in _OF_EACH_TOKEN:
            raise ValueError(
                f"the forward of {read.path} calls {read.operation}, which may mix the tokens of a sequence"
            )

    called = [call for call in whole.calls if call.path in blocks]
    first, last = called[0], called[-1]
    after = whole.calls[whole.calls.index(last) + 1 :]
    norms = [call for call in after if call.input is last.output and is_norm(model.get_submodule(call.path))]
    readers = {read.path for read in whole.reads if read.tensor is last.output and read.path not in blocks}
    if (
        len(norms) != 1
        or len(whole.of(norms[0].path)) != 1
        or any(not is_within(path, norms[0].path) for path in readers)
    ):
        raise ValueError("what the last block returns does not go into one last norm")
    last_norm = norms[0].path
    ends = {first.path: "split_sequence", last_norm: "sequence_gather"}

    split = Slices(
        size=slices.size,
        columns=slices.columns,
        rows=slices.rows,
        cut_input=[first.path],
        join_input=shared,
        cut_output=slices.rows,
        join_output=[last_norm],
    )
    part = _rehearse(model, shape, split, "its forward fails on a slice of the sequence")
    if _shape(part.calls[-1].output) != _shape(whole.calls[-1].output):
        raise ValueError("its output has another shape on a slice of the sequence")
    return ends


def _has_children(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _within_any(path: str, paths: Any) -> bool:
    return any(is_within(path, each) for each in paths)


def _shape(value: Any) -> Any:
    return getattr(value, "shape", None)
