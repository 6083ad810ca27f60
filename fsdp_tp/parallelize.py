"""Applies a plan to a model, in place: its linears, embeddings and norms join the tensor axis."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from fsdp_tp.borders import insert_regions
from fsdp_tp.dropouts import place_dropouts
from fsdp_tp.inputs import check_first_inputs
from fsdp_tp.layers.attention import ParallelAttention
from fsdp_tp.layers.bound import BoundParameter, bind_locals
from fsdp_tp.layers.canonical import accept_whole_tensors, place_split
from fsdp_tp.layers.conv1d import ColumnParallelConv1D, RowParallelConv1D
from fsdp_tp.layers.embedding import VocabParallelEmbedding
from fsdp_tp.layers.hugging_face import split_labels_loss
from fsdp_tp.layers.linear import ColumnParallelLinear, RowParallelLinear
from fsdp_tp.layers.norm import check_rms_norm, split_rms_norm
from fsdp_tp.layers.parameter import place_parameter
from fsdp_tp.layers.split import Split
from fsdp_tp.mesh import ParallelMesh
from fsdp_tp.methods import support_generate
from fsdp_tp.modules import find_blocks, is_conv1d, require_no_optimizer
from fsdp_tp.paths import is_within, join_path
from fsdp_tp.plans import Plan, auto_plan, check_plan, check_sequence_is_split, families, match, match_plan
from fsdp_tp.plans.own_heads import splits_by_head
from fsdp_tp.plans.parts import expert_parts
from fsdp_tp.plans.weights import (
    SPLIT_STYLES,
    check_every_gradient_is_known,
    check_ties,
    is_inside_shared_input,
    whole_style,
)
from fsdp_tp.verify import Verification, Verify

_SLICED_STYLES = ("sequence", "sequence_gather")


def parallelize(
    model: nn.Module,
    mesh: ParallelMesh,
    *,
    plan: str | Mapping[str, str] | Plan = "auto",
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    verify: Verify = False,
) -> nn.Module:
    """Splits ``model`` over the tensor axis of ``mesh``, in place, and returns it.

    Every rank must hold the same weights (or all be on the meta device). Afterwards every
    parameter is a DTensor on the tensor axis, tied weights are still tied, frozen ones still
    frozen, and ``forward`` takes and returns plain tensors that are equal on all ranks of the
    axis. With a tensor axis of one rank the model is left alone.

    Dropout then drops what it would drop on any layout where it is clear what part of the whole it sees
    (:class:`fsdp_tp.layers.Dropout`); a warning names the rest.

    Args:
        model: a Hugging Face decoder, or any module with a dict plan. Not yet wrapped by FSDP. Layers of
            :mod:`fsdp_tp.layers` that it was built from are left as they are: the plan speaks of the others.
        mesh: from :func:`fsdp_tp.init_mesh`.
        plan: ``"auto"`` (the model's Hugging Face family), the name of a family to take the model
            for, a dict of module-path patterns to styles, which are listed in
            :data:`fsdp_tp.plans.STYLES` (an attention module that has an attribute ``head_dim`` is split into
            whole heads, however many there are), or a :class:`fsdp_tp.plans.Plan`, which says more.
        sequence_parallel: between blocks each rank holds its slice of the sequence, which may
            have any length (the last ranks hold less, or nothing); saves activation memory for
            the same traffic. Column layers keep their gathered input for the weight gradient, one
            tensor for all layers of a ``shared_input`` module. Keeping the slice and gathering it
            again in backward (arXiv 2205.05198, section 4.2.2) would cost two more all-gathers a
            block, a quarter more traffic; activation checkpointing keeps neither.
        loss_parallel: ``column_gather`` layers leave their output split: logits are this
            rank's slice of the vocabulary, for ``vocab_parallel_cross_entropy``. The loss that
            a Hugging Face model computes from ``labels`` is replaced accordingly.
        verify: run one tiny batch through a copy of the original and through the parallel model, in
            eval mode, and compare the outputs of all modules and the gradients of all parameters.
            True for a Hugging Face model; of others the batch: a tuple of arguments or a dict of
            keyword arguments, the same on every rank. Takes memory for a second whole model. Where the parallel
            forward fails on one rank alone, its peers wait for it until the timeout of their collective.

    Raises:
        ValueError: the plan or the model's shapes do not fit; an optimizer already holds the
            parameters; a parameter whose treatment the plan leaves open; ``verify`` found a module
            whose output differs (then the model is split already).
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            "the model is already wrapped by fully_shard, which must come after parallelize; wrap() calls it itself: "
            "then remove the script's own fully_shard calls"
        )
    require_no_optimizer(model, "parallelize")
    if isinstance(plan, str) and plan != "auto" and plan not in families():
        raise ValueError(f"plan={plan!r} must be 'auto', a dict or one of {', '.join(families())}")
    if not isinstance(plan, str | Mapping | Plan):
        raise ValueError(f"plan={plan!r} must be 'auto', the name of a family, a dict or a Plan")
    if mesh.tensor_size == 1:
        if verify is not False:
            warnings.warn(
                "verify has no effect: the tensor axis has one rank, and the model stays as it is", stacklevel=2
            )
        if not isinstance(plan, str):
            styles = plan.styles if isinstance(plan, Plan) else plan
            check_plan(model, match_plan(model, styles))  # a script is debugged on one process first
        return model
    built = _built_parallel(model)
    if any(isinstance(parameter, DTensor) and parameter not in built for parameter in model.parameters()):
        raise ValueError("the model has DTensor parameters already: parallelize must be the first to split it")
    if built and verify is not False:
        raise ValueError("verify compares with the model on one process, but this one was built from parallel layers")
    if isinstance(plan, str):
        full = auto_plan(model, mesh.tensor, family=plan, sequence_parallel=sequence_parallel)
    else:
        full = plan if isinstance(plan, Plan) else Plan(styles=plan)
        by_head = splits_by_head(model, match_plan(model, full.styles), mesh.tensor_size)
        full = Plan(styles={}, splits=by_head) | full
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    proven = plan in ("auto", model_type) and model_type in families()
    styles = match_plan(model, full.styles)
    splits, parts = match(model, full.splits), match(model, full.parameters)
    for path in [path for path, style in styles.items() if style == "experts"]:
        parts |= expert_parts(path, model.get_submodule(path), mesh.tensor_size)
    styles = check_plan(model, styles, splits=splits, ranks=mesh.tensor_size, proven=proven)
    if sequence_parallel and not built:
        check_sequence_is_split(styles)
    check_every_gradient_is_known(model, styles, parts, sequence_parallel)
    check_ties(model, styles, parts)
    norms = _norms_over_heads(model, styles, splits, mesh.tensor_size)
    verification = Verification(model, mesh, verify, styles, cut=sequence_parallel) if verify is not False else None

    tied = _replace_layers(model, styles, splits, mesh, sequence_parallel, loss_parallel)
    for norm, split in norms.items():
        split_rms_norm(norm, split, mesh.tensor)
    _bind_the_rest(model, styles, parts, mesh, tied, sequence_parallel=sequence_parallel)
    insert_regions(model, full, styles, mesh.tensor.get_group(), sequence_parallel=sequence_parallel)
    place_dropouts(model, mesh, styles, sequence_parallel=sequence_parallel)
    if verification is not None:
        verification(model)
    accept_whole_tensors(model)
    check_first_inputs(model, mesh.tensor.get_group(), mesh.device)
    heads = [layer for path, layer in model.named_modules() if styles.get(path) == "column_gather"]
    support_generate(model, mesh, heads if loss_parallel else [])
    if loss_parallel and heads:
        split_labels_loss(model, mesh)
    elif loss_parallel:
        warnings.warn("loss_parallel=True has no effect: no layer of the plan is column_gather", stacklevel=2)
    return model


def _built_parallel(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of layers that are on the tensor axis already, since the model was built from them."""
    layers = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, ParallelAttention)
    ours = [module for module in model.modules() if isinstance(module, layers)]
    return {parameter for module in ours for parameter in module.parameters() if isinstance(parameter, DTensor)}


def _norms_over_heads(
    model: nn.Module, styles: Mapping[str, str], splits: Mapping[str, Split], ranks: int
) -> dict[nn.Module, Split]:
    norms: dict[nn.Module, Split] = {}
    for path in [path for path, style in styles.items() if style == "over_heads"]:
        norm = model.get_submodule(path)
        weight = getattr(norm, "weight", None)
        split = splits.get(path) or Split.even(weight.numel() if isinstance(weight, nn.Parameter) else 0, ranks)
        try:
            check_rms_norm(norm, split)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        norms[norm] = split
    return norms


def _replace_layers(
    model: nn.Module,
    styles: Mapping[str, str],
    splits: Mapping[str, Split],
    mesh: ParallelMesh,
    sequence_parallel: bool,
    loss_parallel: bool,
) -> dict[nn.Parameter, nn.Parameter]:
    """Returns the part that each parameter became. All layers are built before the first takes its place: an error
    leaves the model as it was."""
    layers = {}
    for path, style in styles.items():
        if style in SPLIT_STYLES:
            module = model.get_submodule(path)
            try:
                layers[module] = _split_layer(
                    module, path, styles, mesh, sequence_parallel, loss_parallel, splits.get(path)
                )
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
    tied = _tie(layers)
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module in layers:
            model.set_submodule(path, layers[module])
    return tied


def _split_layer(
    module: Any,
    path: str,
    styles: Mapping[str, str],
    mesh: ParallelMesh,
    sequence_parallel: bool,
    loss_parallel: bool,
    split: Split | None,
) -> nn.Module:
    style = styles[path]
    if style == "row":
        row = RowParallelConv1D if is_conv1d(module) else RowParallelLinear
        return row.from_linear(module, mesh=mesh, sequence_parallel=sequence_parallel, split=split)
    if style == "vocab":
        splits_later = "split_sequence" in styles.values()
        return VocabParallelEmbedding.from_embedding(
            module, mesh=mesh, sequence_parallel=sequence_parallel and not splits_later
        )
    reads_whole = style == "column_gather" and "sequence_gather" in styles.values()
    column = ColumnParallelConv1D if is_conv1d(module) else ColumnParallelLinear
    return column.from_linear(
        module,
        mesh=mesh,
        gather_output=style == "column_gather" and not loss_parallel,
        sequence_parallel=sequence_parallel and not reads_whole,
        shared_input=is_inside_shared_input(path, styles),
        split=Split.chunks(module.out_features, mesh.tensor_size) if style == "column_gather" else split,
    )


def _tie(layers: Mapping[nn.Module, nn.Module]) -> dict[nn.Parameter, nn.Parameter]:
    """Lets layers share what their originals share; maps each original parameter to its part."""
    tied: dict[nn.Parameter, nn.Parameter] = {}
    for original, layer in layers.items():
        for name, parameter in original._parameters.items():
            if parameter is not None:
                layer._parameters[name] = tied.setdefault(parameter, getattr(layer, name))
    return tied


def _bind_the_rest(
    model: nn.Module,
    styles: Mapping[str, str],
    parts: Mapping[str, tuple[Split, int]],
    mesh: ParallelMesh,
    tied: dict[nn.Parameter, nn.Parameter],
    *,
    sequence_parallel: bool,
) -> None:
    """Everything that no layer split is bound: split by ``parts``, or else ``Replicate()`` on the tensor axis."""
    group = mesh.tensor.get_group()
    own: dict[str, list[BoundParameter]] = {}
    for path, module in model.named_modules():
        if styles.get(path) in SPLIT_STYLES:
            if isinstance(module, RowParallelLinear) and sequence_parallel and module.bias is not None:
                own[path] = [BoundParameter(module, "bias", True)]
            continue
        own[path] = []
        for name, parameter in module._parameters.items():
            if (part := parts.get(join_path(path, name))) is not None:
                if parameter in tied:
                    module._parameters[name] = tied[parameter]
                else:
                    place_split(module, name, *part, mesh.tensor)
                own[path].append(BoundParameter(module, name, False, *part))
            elif parameter is not None and not isinstance(parameter, DTensor):
                replicated = place_parameter(parameter, Replicate(), mesh.tensor)
                module._parameters[name] = tied.setdefault(parameter, replicated)
                style = whole_style(join_path(path, name), styles)
                partial = style == "per_head" or (sequence_parallel and style in _SLICED_STYLES)
                own[path].append(BoundParameter(module, name, partial))
    blocks = find_blocks(model)
    for path, module in list(model.named_modules()):
        entries = [] if styles.get(path) in SPLIT_STYLES else own[path]
        if path in blocks:
            inside = [entry for inner, some in own.items() if is_within(inner, path) for entry in some]
            if any(entry.partial for entry in inside):
                entries = inside  # all at once, so that one all-reduce sums the gradients of the block
        if entries:
            bind_locals(module, entries, group)
