"""Gives the dropout of somebody's model masks that do not depend on the layout (:mod:`fsdp_tp.layers.dropout`)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_tp.layers.attention import attention_with_dropout
from fsdp_tp.layers.dropout import Dropout
from fsdp_tp.layers.linear import RowParallelLinear
from fsdp_tp.layers.split import ZERO, Split
from fsdp_tp.mesh import ParallelMesh
from fsdp_tp.modules import find_blocks

_ATTENTION = "fsdp_tp"
_OF_ATTENTION = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_FUNCTIONAL = ("dropout", "residual_dropout", "embedding_dropout", "hidden_dropout")
"""Settings of Hugging Face configs; the latter are (in some models) of calls of ``F.dropout``, out of our reach."""


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
        ancestors = _ancestors(path)  # the nearest first
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
    if any(getattr(config, name, 0.0) for name in _OF_ATTENTION) and not _use_attention_function(model, mesh):
        left.append("config.attention_dropout")
    if not any(isinstance(module, nn.Dropout) for module in model.modules()):
        left += [f"config.{name}" for name in _FUNCTIONAL if getattr(config, name, 0.0)]
    if left and mesh.tensor_size > 1:
        warnings.warn(
            f"dropout ({', '.join(left[:3])}): each rank draws its own masks, so on split activations they differ "
            "from those of one process; on whole activations they must agree, so seed the ranks of a tensor axis alike",
            stacklevel=3,
        )


def _ancestors(path: str) -> list[str]:
    """``a.b.c`` -> ``[a.b, a, ""]``."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(len(parts) - 1, -1, -1)]


def _rows(module: nn.Module) -> list[RowParallelLinear]:
    return [child for child in module.children() if isinstance(child, RowParallelLinear)]


def _is_ambiguous(row: RowParallelLinear) -> bool:
    """Whether the width does not tell what goes into ``row`` from what comes out."""
    return row.out_features in [part.numel() for part in row.split.rows]


class _DropoutBesideRow(Dropout):
    """In a module with one row layer: tells from its input whether that lies before or behind it."""

    def __init__(self, p: float, *, mesh: ParallelMesh, row: RowParallelLinear, sequence_parallel: bool) -> None:
        super().__init__(p, mesh=mesh)
        self.inner, self.outer, self.between = row.split, row.out_features, sequence_parallel

    def _place(self, x: Tensor) -> tuple[list[Tensor], list[int]]:
        length = None if self.sequence_length is None else self.sequence_length.noted
        rank = self.tensor_group.rank()
        self.split, self.sequence_parallel, self.split_dim = None, False, -1
        if x.ndim > 3:  # attention weights
            self.split, self.split_dim = _heads(self.inner, x.shape[-3], rank), -3
        elif x.shape[-1] == self.outer:
            self.sequence_parallel = self.between and x.shape[-2] != length
        elif x.shape[-1] == self.inner.rows[rank].numel():
            self.split = self.inner
        else:
            raise ValueError(
                f"dropout of {x.shape[-1]} features beside a row layer that reads {self.inner.rows[rank].numel()} on "
                f"this rank and returns {self.outer}: it is not known which part of the whole they are"
            )
        return super()._place(x)


def _heads(features: Split, local_heads: int, rank: int) -> Split:
    """Of the heads of which ``features`` are, as a row layer reads them."""
    width = features.rows[rank].numel() // local_heads
    firsts = [rows[::width] for rows in features.rows]
    return Split(features.size // width, [torch.where(first == ZERO, ZERO, first // width) for first in firsts])


def _use_attention_function(model: Any, mesh: ParallelMesh) -> bool:
    """Whether all attention of ``model`` now goes through :func:`_attention`."""
    if getattr(model.config, "_attn_implementation", None) != "sdpa" or not hasattr(model, "set_attn_implementation"):
        return False
    if not model._can_set_attn_implementation():
        return False
    if mesh.tensor_size > 1 and not any(_rows(module) for module in model.modules()):
        return False
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_ATTENTION, _attention)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
    for module in model.modules():
        rows = _rows(module)
        module.__dict__["_attention_dropout"] = _AttentionDropout(mesh, rows[0].split if rows else None)
    model.set_attn_implementation(_ATTENTION)
    return bool(model.config._attn_implementation == _ATTENTION)


class _AttentionDropout:
    """Made on demand: heads are known from the first query."""

    def __init__(self, mesh: ParallelMesh, features: Split | None) -> None:
        self.mesh, self.features = mesh, features
        self.made: Dropout | None = None

    def __call__(self, p: float, local_heads: int) -> Dropout:
        if self.made is None:
            assert self.features is not None or self.mesh.tensor_size == 1, "attention without a row layer"
            split = self.features and _heads(self.features, local_heads, self.mesh.tensor_rank)
            self.made = Dropout(p, mesh=self.mesh, split=split, split_dim=-3)
        self.made.p = p
        return self.made


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called as Hugging Face calls its own: query ``(batch, heads of this rank, S, d)`` -> ``(batch, S, heads, d)``."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not dropout:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, 0.0, scaling, is_causal, **kwargs
        )
        return output
    if kwargs.get("softcap") is not None or kwargs.get("position_bias") is not None:
        raise ValueError("attention dropout with softcap or position_bias is not possible: set it to 0")
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) if groups > 1 else each for each in (key, value))
    causal = module.is_causal if is_causal is None else is_causal
    if attention_mask is None and causal and query.shape[2] > 1:
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    drop = module._attention_dropout(dropout, query.shape[1])
    attended = attention_with_dropout(query, key, value, attention_mask, drop, scaling)
    return attended.transpose(1, 2).contiguous(), None
