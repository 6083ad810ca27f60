"""Applies a plan to a model, in place: its linears, embeddings and norms join the tensor axis."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves

from fsdp_tp import regions
from fsdp_tp.layers.embedding import VocabParallelEmbedding
from fsdp_tp.layers.front import transform_first_argument
from fsdp_tp.layers.linear import SEQUENCE_DIM, ColumnParallelLinear, RowParallelLinear
from fsdp_tp.layers.loss import vocab_parallel_cross_entropy
from fsdp_tp.layers.parameter import is_fsdp_sharded, place_parameter
from fsdp_tp.layers.replicated import ReplicatedParameter, bind_locals, replicated_parameters
from fsdp_tp.mesh import ParallelMesh
from fsdp_tp.modules import find_blocks, require_no_optimizer
from fsdp_tp.plans import auto_plan, families, match_plan

_SPLIT_STYLES = ("column", "column_gather", "row", "vocab")
_ONE_ARGUMENT_STYLES = ("shared_input", "split_sequence")


def parallelize(
    model: nn.Module,
    mesh: ParallelMesh,
    *,
    plan: str | Mapping[str, str] = "auto",
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
) -> nn.Module:
    """Splits ``model`` over the tensor axis of ``mesh``, in place, and returns it.

    Every rank must hold the same weights (or all be on the meta device). Afterwards every
    parameter is a DTensor on the tensor axis, tied weights are still tied, frozen ones still
    frozen, and ``forward`` takes and returns plain tensors that are equal on all ranks of the
    axis. With a tensor axis of one rank the model is left alone.

    Args:
        model: a Hugging Face decoder, or any module with a dict plan. Not yet wrapped by FSDP.
        mesh: from :func:`fsdp_tp.init_mesh`.
        plan: ``"auto"`` (the model's own Hugging Face plan, completed), the name of a family
            to take the model for, or a dict of module-path patterns to styles; the styles
            are listed in :data:`fsdp_tp.plans.STYLES`.
        sequence_parallel: between blocks each rank holds its slice of the sequence; saves
            activation memory for the same traffic. The axis must divide the sequence length.
        loss_parallel: ``column_gather`` layers leave their output split: logits are this
            rank's slice of the vocabulary, for ``vocab_parallel_cross_entropy``. The loss that
            a Hugging Face model computes from ``labels`` is replaced accordingly.

    Raises:
        ValueError: the plan or the model's shapes do not fit; an optimizer already holds the
            parameters; a parameter whose treatment the plan leaves open.
    """
    if any(is_fsdp_sharded(parameter) for parameter in model.parameters()):
        raise ValueError("the model is already wrapped by fully_shard: parallelize it before")
    require_no_optimizer(model, "parallelize")
    if mesh.tensor_size == 1:
        return model
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("the model has DTensor parameters already: parallelize must be the first to split it")
    if isinstance(plan, str):
        if plan != "auto" and plan not in families():
            raise ValueError(f"plan={plan!r} must be 'auto', a dict or one of {', '.join(families())}")
        plan = auto_plan(model, mesh.tensor, family=None if plan == "auto" else plan)
    styles = match_plan(model, plan)
    _check_every_gradient_is_known(model, styles, sequence_parallel)
    _warn_about_dropout(model)

    originals = dict(model.named_modules())
    tied: dict[int, nn.Parameter] = {}  # by the id of an original, all of which live until the end
    for path, style in styles.items():
        if style not in _SPLIT_STYLES:
            continue
        try:
            layer = _split_layer(originals[path], path, styles, mesh, sequence_parallel, loss_parallel)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        _tie(originals[path], layer, tied, path)
        model.set_submodule(path, layer)

    _replicate_the_rest(model, styles, mesh, tied, sequence_parallel=sequence_parallel)
    for path, style in styles.items():
        if style in _ONE_ARGUMENT_STYLES:
            _insert_region(model.get_submodule(path), style, mesh, sequence_parallel)
    _check_first_inputs(model, mesh)
    if loss_parallel and hasattr(model, "loss_function"):
        model.loss_function = _hugging_face_loss(mesh)  # type: ignore[assignment]
    return model


def _split_layer(
    module: Any, path: str, styles: Mapping[str, str], mesh: ParallelMesh, sequence_parallel: bool, loss_parallel: bool
) -> nn.Module:
    style = styles[path]
    if style == "row":
        return RowParallelLinear.from_linear(module, mesh=mesh, sequence_parallel=sequence_parallel)
    if style == "vocab":
        splits_later = "split_sequence" in styles.values()
        return VocabParallelEmbedding.from_embedding(
            module, mesh=mesh, sequence_parallel=sequence_parallel and not splits_later
        )
    return ColumnParallelLinear.from_linear(
        module,
        mesh=mesh,
        gather_output=style == "column_gather" and not loss_parallel,
        sequence_parallel=sequence_parallel,
        shared_input=styles.get(path.rpartition(".")[0]) == "shared_input",
    )


def _tie(original: nn.Module, layer: nn.Module, tied: dict[int, Any], path: str) -> None:
    """Makes ``layer`` use the parameter that an earlier layer made of the same original."""
    for name, parameter in original._parameters.items():
        if parameter is None:
            continue
        split = getattr(layer, name)
        first = tied.setdefault(id(parameter), split)
        if first is not split:
            if first.placements != split.placements:
                raise ValueError(f"{path}.{name} is tied to a weight that the plan splits another way")
            layer._parameters[name] = first


def _replicate_the_rest(
    model: nn.Module,
    styles: Mapping[str, str],
    mesh: ParallelMesh,
    tied: dict[int, nn.Parameter],
    *,
    sequence_parallel: bool,
) -> None:
    """Everything that no layer split becomes ``Replicate()`` on the tensor axis and is bound."""
    group = mesh.tensor.get_group()
    own: dict[str, list[ReplicatedParameter]] = {}
    for path, module in model.named_modules():
        if styles.get(path) in _SPLIT_STYLES:
            if isinstance(module, RowParallelLinear) and sequence_parallel and module.bias is not None:
                own[path] = [ReplicatedParameter(module, "bias", True)]
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None:
                replicated = place_parameter(parameter, Replicate(), mesh.tensor)
                module._parameters[name] = tied.setdefault(id(parameter), replicated)
        style = _style_of(path, styles)
        partial = style == "per_head" or (style == "sequence" and sequence_parallel)
        own[path] = replicated_parameters(module, partial=partial)
    blocks = find_blocks(model)
    for path, module in list(model.named_modules()):
        entries = [] if styles.get(path) in _SPLIT_STYLES else own[path]
        if path in blocks:
            inside = [entry for inner, some in own.items() if _is_within(inner, path) for entry in some]
            if any(entry.partial for entry in inside):
                entries = inside  # all at once, so that one all-reduce sums the gradients of the block
        if entries:
            bind_locals(module, entries, group)


def _style_of(path: str, styles: Mapping[str, str]) -> str:
    """The style of a module that keeps its parameters whole: its own, or its nearest ancestor's."""
    while path:
        if styles.get(path) in ("replicate", "sequence", "per_head"):
            return styles[path]
        path = path.rpartition(".")[0]
    return "replicate"


def _is_within(path: str, ancestor: str) -> bool:
    return path == ancestor or path.startswith(f"{ancestor}.")


def _check_every_gradient_is_known(model: nn.Module, styles: Mapping[str, str], sequence_parallel: bool) -> None:
    """A whole weight may see whole activations or a slice of them; a guess would be a wrong gradient."""
    split_parents = {path.rpartition(".")[0] for path, style in styles.items() if style in ("column", "row")}
    unclear = []
    for path, module in model.named_modules():
        known = any(
            styles.get(ancestor) in (*_SPLIT_STYLES, "replicate", "sequence", "per_head") for ancestor in _lineage(path)
        )
        if known or not any(parameter is not None for parameter in module._parameters.values()):
            continue
        if sequence_parallel or any(ancestor in split_parents for ancestor in _lineage(path)[1:]):
            unclear.append(path or f"{type(model).__name__} itself")
    if unclear:
        raise ValueError(
            f"the plan does not say what these modules see: {', '.join(unclear)}. Give each a style: 'replicate' "
            "(activations that every rank has whole), 'sequence' (between blocks, split by sequence parallelism) "
            "or 'per_head' (between a column and a row layer)"
        )


def _lineage(path: str) -> list[str]:
    """``a.b.c`` -> ``[a.b.c, a.b, a, ""]``."""
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]


def _insert_region(module: nn.Module, style: str, mesh: ParallelMesh, sequence_parallel: bool) -> None:
    group = mesh.tensor.get_group()
    if style == "split_sequence":
        if sequence_parallel:
            transform_first_argument(module, lambda x: regions.split_to_tensor_axis(x, SEQUENCE_DIM, group))
    elif sequence_parallel:
        transform_first_argument(module, lambda x: regions.gather_sequence(x, SEQUENCE_DIM, group))
    else:
        transform_first_argument(module, lambda x: regions.copy_to_tensor_axis(x, group))


def _check_first_inputs(model: nn.Module, mesh: ParallelMesh) -> None:
    """On the first forward: ranks of one tensor group must get one batch, or every gradient is wrong."""
    group = mesh.tensor.get_group()

    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        handle.remove()
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        sums = [_position_weighted_sum(tensor) for tensor in tensors]
        if not sums:
            return
        extremes = torch.stack([*sums, *(-value for value in sums)])
        largest = extremes.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        # Of each value and of its negative every rank must hold the largest: then all are equal.
        different = torch.tensor([not torch.equal(largest, extremes)], dtype=torch.int32, device=largest.device)
        dist.all_reduce(different, dist.ReduceOp.MAX, group=group)
        if different.item():
            raise ValueError(
                f"the {group.size()} ranks of one tensor axis got different inputs, but they compute one batch "
                "together: choose a rank's slice by mesh.data_rank of mesh.data_size, not by its global rank"
            )

    handle = model.register_forward_pre_hook(check, with_kwargs=True, prepend=True)


def _position_weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().flatten().double()
    return (flat * (torch.arange(flat.numel(), device=flat.device) % 1009 + 1)).sum()


def _warn_about_dropout(model: nn.Module) -> None:
    dropout = getattr(getattr(model, "config", None), "attention_dropout", 0.0)
    if dropout:
        warnings.warn(
            f"attention_dropout={dropout}: each rank draws the masks of its own heads, so the dropped "
            "positions differ from those of one process",
            stacklevel=3,
        )


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
