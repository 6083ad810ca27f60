"""Applies a plan to a model, in place: its linears, embeddings and norms join the tensor axis."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp_tp.borders import insert_regions
from fsdp_tp.dropouts import place_dropouts
from fsdp_tp.inputs import check_first_inputs
from fsdp_tp.layers.attention import ParallelAttention
from fsdp_tp.layers.bound import BoundParameter, bind_locals
from fsdp_tp.layers.canonical import accept_whole_tensors, place_split
from fsdp_tp.layers.conv1d import ColumnParallelConv1D, RowParallelConv1D, is_conv1d
from fsdp_tp.layers.embedding import VocabParallelEmbedding
from fsdp_tp.layers.linear import ColumnParallelLinear, RowParallelLinear
from fsdp_tp.layers.loss import vocab_parallel_cross_entropy
from fsdp_tp.layers.norm import split_rms_norm
from fsdp_tp.layers.parameter import place_parameter
from fsdp_tp.layers.split import Split
from fsdp_tp.mesh import ParallelMesh
from fsdp_tp.methods import support_generate
from fsdp_tp.modules import find_blocks, require_no_optimizer
from fsdp_tp.plans import WHOLE_STYLES, Plan, auto_plan, check_plan, families, match, match_plan
from fsdp_tp.verify import Verification, Verify

_SLICED_STYLES = ("sequence", "sequence_gather", "sequence_gather_whole")
_SPLIT_STYLES = ("column", "column_gather", "row", "vocab")


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
            :data:`fsdp_tp.plans.STYLES`, or a :class:`fsdp_tp.plans.Plan`, which says more.
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
            keyword arguments, the same on every rank. Takes memory for a second whole model.

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
    if mesh.tensor_size == 1:
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
        if plan != "auto" and plan not in families():
            raise ValueError(f"plan={plan!r} must be 'auto', a dict or one of {', '.join(families())}")
        full = auto_plan(model, mesh.tensor, family=plan, sequence_parallel=sequence_parallel)
    else:
        full = plan if isinstance(plan, Plan) else Plan(styles=plan)
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    proven = plan in ("auto", model_type) and model_type in families()
    styles = match_plan(model, full.styles)
    splits, parts = match(model, full.splits), match(model, full.parameters)
    styles = check_plan(model, styles, splits=splits, ranks=mesh.tensor_size, proven=proven)
    _check_every_gradient_is_known(model, styles, parts, sequence_parallel)

    _check_ties(model, styles, parts)
    verification = Verification(model, mesh, verify, styles, cut=sequence_parallel) if verify is not False else None

    # All layers are built before the first takes its place: an error leaves the model as it was.
    layers = {}
    for path, style in styles.items():
        if style in _SPLIT_STYLES:
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

    for path, style in styles.items():
        if style == "over_heads":
            split_rms_norm(model.get_submodule(path), splits[path], mesh.tensor)
    _bind_the_rest(model, styles, parts, mesh, tied, sequence_parallel=sequence_parallel)
    insert_regions(model, full, styles, mesh.tensor.get_group(), sequence_parallel=sequence_parallel)
    place_dropouts(model, mesh, styles, sequence_parallel=sequence_parallel)
    if verification is not None:
        verification(model)
    accept_whole_tensors(model)
    check_first_inputs(model, mesh.tensor.get_group(), mesh.device)
    heads = [layer for path, layer in model.named_modules() if styles.get(path) == "column_gather"]
    support_generate(model, mesh, heads if loss_parallel else [])
    if loss_parallel:
        if "column_gather" not in styles.values():
            warnings.warn("loss_parallel=True has no effect: no layer of the plan is column_gather", stacklevel=2)
        elif isinstance(getattr(type(model), "loss_function", None), property):  # of Hugging Face models
            model.loss_function = _hugging_face_loss(mesh)  # type: ignore[assignment]
    return model


def _built_parallel(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of layers that are on the tensor axis already, since the model was built from them."""
    layers = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, ParallelAttention)
    ours = [module for module in model.modules() if isinstance(module, layers)]
    return {parameter for module in ours for parameter in module.parameters() if isinstance(parameter, DTensor)}


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
    is_head = sequence_parallel and style == "column_gather"
    # After a gathered last norm the output projection's input is whole, its gradient still to be summed.
    follows_gather = is_head and "sequence_gather" in styles.values()
    reads_whole = is_head and "sequence_gather_whole" in styles.values() and not follows_gather
    column = ColumnParallelConv1D if is_conv1d(module) else ColumnParallelLinear
    return column.from_linear(
        module,
        mesh=mesh,
        gather_output=style == "column_gather" and not loss_parallel,
        sequence_parallel=sequence_parallel and not reads_whole,
        shared_input=follows_gather or _is_inside_shared_input(path, styles),
        split=split,
    )


def _placement(style: str | None, name: str) -> Placement:
    """Where the parameter ``name`` of a module of ``style`` goes on the tensor axis."""
    if style == "row":
        return Shard(1) if name == "weight" else Replicate()
    return Shard(0) if style in _SPLIT_STYLES else Replicate()


def _check_ties(model: nn.Module, styles: Mapping[str, str], parts: Mapping[str, tuple[Split, int]]) -> None:
    first: dict[nn.Parameter, tuple[str, Placement]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            part = parts.get(_join(path, name))
            placement = _placement(styles.get(path), name) if part is None else Shard(part[1])
            other, other_placement = first.setdefault(parameter, (f"{path}.{name}", placement))
            if placement != other_placement:
                raise ValueError(
                    f"{path}.{name} is tied to {other}, but the plan places them differently: "
                    f"{placement} and {other_placement}"
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
        if styles.get(path) in _SPLIT_STYLES:
            if isinstance(module, RowParallelLinear) and sequence_parallel and module.bias is not None:
                own[path] = [BoundParameter(module, "bias", True)]
            continue
        own[path] = []
        for name, parameter in module._parameters.items():
            if (part := parts.get(_join(path, name))) is not None:
                if parameter in tied:
                    module._parameters[name] = tied[parameter]
                else:
                    place_split(module, name, *part, mesh.tensor)
                own[path].append(BoundParameter(module, name, False, *part))
            elif parameter is not None and not isinstance(parameter, DTensor):
                replicated = place_parameter(parameter, Replicate(), mesh.tensor)
                module._parameters[name] = tied.setdefault(parameter, replicated)
                style = _whole_style(_join(path, name), styles)
                partial = style == "per_head" or (sequence_parallel and style in _SLICED_STYLES)
                own[path].append(BoundParameter(module, name, partial))
    blocks = find_blocks(model)
    for path, module in list(model.named_modules()):
        entries = [] if styles.get(path) in _SPLIT_STYLES else own[path]
        if path in blocks:
            inside = [entry for inner, some in own.items() if _is_within(inner, path) for entry in some]
            if any(entry.partial for entry in inside):
                entries = inside  # all at once, so that one all-reduce sums the gradients of the block
        if entries:
            bind_locals(module, entries, group)


def _whole_style(path: str, styles: Mapping[str, str]) -> str | None:
    """The style of a parameter that stays whole: its own, its module's or the nearest ancestor's."""
    return next((styles[at] for at in _lineage(path) if styles.get(at) in WHOLE_STYLES), None)


def _is_inside_shared_input(path: str, styles: Mapping[str, str]) -> bool:
    return any(styles.get(ancestor) == "shared_input" for ancestor in _lineage(path)[1:])


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_within(path: str, ancestor: str) -> bool:
    return path == ancestor or path.startswith(f"{ancestor}.")


def _check_every_gradient_is_known(
    model: nn.Module, styles: Mapping[str, str], parts: Mapping[str, tuple[Split, int]], sequence_parallel: bool
) -> None:
    """A whole weight may see whole activations or a slice of them; a guess would be a wrong gradient."""
    split_parents = {path.rpartition(".")[0] for path, style in styles.items() if style in ("column", "row")}
    unclear = []
    for path, module in model.named_modules():
        if styles.get(path) in (*_SPLIT_STYLES, "over_heads"):
            continue
        for name, own in module.named_parameters(recurse=False):
            if isinstance(own, DTensor):
                continue  # of a parallel layer
            parameter = _join(path, name)
            if parameter in parts:
                continue
            style = _whole_style(parameter, styles)
            if style not in ("per_head", "over_heads") and _is_inside_shared_input(parameter, styles):
                raise ValueError(
                    f"{parameter} stays whole inside a shared_input module, where only weights between the column and "
                    "row layers can: give it the style 'per_head' if it is there, or drop the shared_input"
                )
            beside_split_layers = any(ancestor in split_parents for ancestor in _lineage(path))
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


def _lineage(path: str) -> list[str]:
    """``a.b.c`` -> ``[a.b.c, a.b, a, ""]``."""
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]


def _hugging_face_loss(mesh: ParallelMesh) -> Callable[..., torch.Tensor]:
    def loss_function(
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The causal language-model loss on this rank's slice of the vocabulary."""
        if shift_labels is None:
            assert labels is not None
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = vocab_parallel_cross_entropy(
            logits, shift_labels, mesh=mesh, ignore_index=ignore_index, reduction=reduction
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    return loss_function
