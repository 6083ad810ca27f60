"""Gives the dropout of somebody's model masks that do not depend on the layout (:mod:`fsdp_tp.layers.dropout`)."""

from __future__ import annotations

import ast
import inspect
import sys
import warnings
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_tp.layers.attention import attention_with_dropout
from fsdp_tp.layers.dropout import Dropout, place_in_sequence, place_in_split, place_of_whole
from fsdp_tp.layers.linear import ColumnParallelLinear, RowParallelLinear
from fsdp_tp.layers.split import ZERO, Split
from fsdp_tp.mesh import ParallelMesh
from fsdp_tp.modules import find_blocks
from fsdp_tp.paths import lineage

_ATTENTION = "fsdp_tp"
_OF_ATTENTION = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "dropout_rate")
_FUNCTIONAL = ("dropout", "residual_dropout", "embedding_dropout", "hidden_dropout", "activation_dropout")
"""Settings of Hugging Face configs; the latter are (in some models) of calls of ``F.dropout``, out of our reach."""
_QUERIES = ("q", "q_proj", "query")
"""Names of the layer that makes the queries, and nothing else."""


def place_dropouts(
    model: nn.Module, mesh: ParallelMesh, styles: Mapping[str, str], *, sequence_parallel: bool = False
) -> None:
    """Replaces every ``nn.Dropout`` of ``model`` of which it is clear what part of the whole it sees, in place, and the
    attention function of a Hugging Face model with attention dropout. Warns of the rest.

    Args:
        model: its layers are split already.
        styles: of the plan, by path.
    """
    left = []
    blocks = find_blocks(model)
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) is not nn.Dropout or module.p == 0:
            continue
        ancestors = lineage(path)[1:]  # the nearest first
        rows = next((found for each in ancestors if (found := _rows(model.get_submodule(each)))), [])
        in_block = any(ancestor in blocks for ancestor in ancestors)
        new: Dropout
        if len(rows) == 1 and (mesh.tensor_size == 1 or not _is_ambiguous(rows[0])):
            new = _DropoutBesideRow(module.p, mesh=mesh, row=rows[0], sequence_parallel=sequence_parallel)
        elif rows or any(styles.get(ancestor) in ("experts", "whole_sequence") for ancestor in ancestors):
            left.append(path)
            continue
        elif sequence_parallel and not in_block and "split_sequence" not in styles.values():
            left.append(path)  # before or behind the last norm, which gathers?
            continue
        else:
            new = Dropout(module.p, mesh=mesh, sequence_parallel=sequence_parallel and in_block)
        if sequence_parallel:
            new.sequence_length = getattr(model, "_sequence_length", None)
        model.set_submodule(path, new.train(module.training))
    config: Any = getattr(model, "config", None)
    of_attention = [f"config.{name}" for name in _OF_ATTENTION if getattr(config, name, 0.0)]
    if of_attention and not _use_attention_function(model, mesh):
        left += of_attention
    functional = [f"config.{name}" for name in _FUNCTIONAL if getattr(config, name, 0.0)]
    if functional and _calls_dropout(model):
        left += functional
    if left and mesh.tensor_size > 1:
        warnings.warn(
            f"dropout ({', '.join(left[:3])}): each rank draws its own masks, so on split activations they differ "
            "from those of one process; on whole activations they must agree, so seed the ranks of a tensor axis alike",
            stacklevel=3,
        )


def _rows(module: nn.Module) -> list[RowParallelLinear]:
    return [child for child in module.children() if isinstance(child, RowParallelLinear)]


def _is_ambiguous(row: RowParallelLinear) -> bool:
    """Whether the width does not tell what goes into ``row`` from what comes out."""
    return row.out_features in [part.numel() for part in row.split.rows]


def _calls_dropout(model: nn.Module) -> bool:
    """Whether the code of ``model`` calls ``F.dropout``, as far as one can see, but for its eager attention."""
    files = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    return any(
        _file_calls_dropout(name) for name in files if name.partition(".")[0] not in ("torch", "fsdp_tp", "builtins")
    )


@cache
def _file_calls_dropout(name: str) -> bool:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except (KeyError, OSError, TypeError):  # not to be seen: it may
        return True
    calls = [
        node.func
        for part in tree.body
        if getattr(part, "name", "") != "eager_attention_forward"
        for node in ast.walk(part)
        if isinstance(node, ast.Call)
    ]
    return any(ast.unparse(call).endswith(("F.dropout", "functional.dropout")) for call in calls)


class _Heads:
    """The heads of which ``features`` are, as a row layer reads them; made once for each number of heads."""

    def __init__(self, features: Split, rank: int) -> None:
        self.features, self.rank = features, rank
        self._made: dict[int, Split] = {}

    def __call__(self, local_heads: int) -> Split:
        if local_heads not in self._made:
            width = self.features.rows[self.rank].numel() // local_heads
            firsts = [rows[::width] for rows in self.features.rows]
            self._made[local_heads] = Split(
                self.features.size // width, [torch.where(first == ZERO, ZERO, first // width) for first in firsts]
            )
        return self._made[local_heads]


class _DropoutBesideRow(Dropout):
    """In a module with one row layer: tells from its input whether that lies before or behind it."""

    def __init__(self, p: float, *, mesh: ParallelMesh, row: RowParallelLinear, sequence_parallel: bool) -> None:
        super().__init__(p, mesh=mesh)
        self.inner, self.outer, self.between = row.split, row.out_features, sequence_parallel
        self.heads = _Heads(row.split, self.tensor_group.rank())

    def _place(self, x: Tensor) -> tuple[list[Tensor], list[int]]:
        rank = self.tensor_group.rank()
        if x.ndim > 3:  # attention weights
            return place_in_split(x, self.heads(x.shape[-3]), -3, rank)
        if x.shape[-1] == self.outer:
            length = None if self.sequence_length is None else self.sequence_length.noted
            if self.between and x.shape[-2] != length:
                return place_in_sequence(x, self.sequence_length, self.tensor_group)
            return place_of_whole(x)
        if x.shape[-1] == self.inner.rows[rank].numel():
            return place_in_split(x, self.inner, -1, rank)
        raise ValueError(
            f"dropout of {x.shape[-1]} features beside a row layer that reads {self.inner.rows[rank].numel()} on "
            f"this rank and returns {self.outer}: it is not known which part of the whole they are"
        )


def _use_attention_function(model: Any, mesh: ParallelMesh) -> bool:
    """Whether all attention of ``model`` now goes through :func:`_attention`."""
    if getattr(model.config, "_attn_implementation", None) != "sdpa" or not hasattr(model, "set_attn_implementation"):
        return False
    if not model._can_set_attn_implementation():
        return False
    features = {module: found for module in model.modules() if (found := _query_features(module)) is not None}
    attentions = [module for module in model.modules() if _is_attention(module)]
    if mesh.tensor_size > 1 and (not features or any(module not in features for module in attentions)):
        return False
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_ATTENTION, _attention)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
    for module in model.modules():
        if mesh.tensor_size == 1 or module in features:
            module.__dict__["_attention_dropout"] = _AttentionDropout(mesh, features.get(module))
    model.set_attn_implementation(_ATTENTION)
    return bool(model.config._attn_implementation == _ATTENTION)


def _is_attention(module: nn.Module) -> bool:
    """Whether ``module`` is likely to call the attention function."""
    return "Attention" in type(module).__name__ and any(isinstance(each, nn.Linear) for each in module.children())


def _query_features(module: nn.Module) -> Split | None:
    """How those of the queries are split that ``module`` has; the row layer behind attention reads as many."""
    for row in _rows(module):
        return row.split
    for name, child in module.named_children():
        if name in _QUERIES and isinstance(child, ColumnParallelLinear) and not child.gather_output:
            return child.split
    return None


class _AttentionDropout(Dropout):
    """Of attention weights, with the probability that the model's code asks for in every call."""

    def __init__(self, mesh: ParallelMesh, features: Split | None) -> None:
        super().__init__(mesh=mesh)
        self.heads = None if features is None else _Heads(features, mesh.tensor_rank)

    def _place(self, x: Tensor) -> tuple[list[Tensor], list[int]]:
        if self.heads is None:
            return place_of_whole(x)
        return place_in_split(x, self.heads(x.shape[-3]), -3, self.tensor_group.rank())

    def drop(self, weights: Tensor, p: float) -> Tensor:
        return self._drop(weights, p, *self._place(weights))


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called as Hugging Face calls its own: query ``(batch, heads of this rank, S, d)`` -> ``(batch, S, heads, d)``."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    drop = getattr(module, "_attention_dropout", None)
    if dropout and drop is None:
        warnings.warn(f"{type(module).__name__}: attention dropout whose place is not known", stacklevel=2)
    if not dropout or drop is None:
        if position_bias is not None:
            kwargs["position_bias"] = position_bias
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return output
    if kwargs.get("softcap") is not None:
        raise ValueError("attention dropout with softcap is not possible: set it to 0")
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) if groups > 1 else each for each in (key, value))
    causal = module.is_causal if is_causal is None else is_causal
    if attention_mask is None and causal and query.shape[2] > 1:
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if position_bias is not None:
        attention_mask = _with_mask(position_bias, attention_mask)
    attended = attention_with_dropout(query, key, value, attention_mask, partial(drop.drop, p=dropout), scaling)
    return attended.transpose(1, 2).contiguous(), None


def _with_mask(bias: Tensor, mask: Tensor | None) -> Tensor:
    """Both as what is added to the scores."""
    if mask is None:
        return bias
    return torch.where(mask, bias, float("-inf")) if mask.dtype == torch.bool else bias + mask
