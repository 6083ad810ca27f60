"""The regions between a model's own modules, and what its code must find changed on a rank."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fsdp_tp import regions
from fsdp_tp.layers.attention import ParallelAttention
from fsdp_tp.layers.dropout import Dropout
from fsdp_tp.layers.embedding import VocabParallelEmbedding
from fsdp_tp.layers.front import transform_argument, transform_first_argument, transform_output
from fsdp_tp.layers.linear import ColumnParallelLinear
from fsdp_tp.layers.mlp import ParallelMLP
from fsdp_tp.layers.sequence import SEQUENCE_DIM, SequenceLength, enter_tensor_axis
from fsdp_tp.plans import Plan, match

_GATHERING = (ColumnParallelLinear, Dropout, ParallelAttention, ParallelMLP, VocabParallelEmbedding)
"""They ask for, or note, the length of the sequence."""


def insert_regions(
    model: nn.Module, plan: Plan, styles: Mapping[str, str], group: dist.ProcessGroup, *, sequence_parallel: bool
) -> None:
    """Puts in front of the modules of ``model`` what ``plan`` asks for, and behind them, in place.

    Args:
        styles: those of the plan, by path.
    """
    _insert_by_style(model, styles, group, sequence_parallel=sequence_parallel)
    for path, names in match(model, plan.shared_arguments).items():
        for name in names:
            transform_argument(
                model.get_submodule(path), name, functools.partial(regions.copy_to_tensor_axis, group=group)
            )
    for pattern, (names, heads) in plan.own_heads.items():
        for path in match(model, {pattern: ""}):
            for name in names:
                transform_argument(model.get_submodule(path), name, OwnHeads(*heads))
    for path, attributes in match(model, plan.attributes).items():
        for name, value in attributes.items():
            _set_attribute(model.get_submodule(path), name, value)


def _insert_by_style(
    model: nn.Module, styles: Mapping[str, str], group: dist.ProcessGroup, *, sequence_parallel: bool
) -> None:
    length = SequenceLength()
    if sequence_parallel:
        model._sequence_length = length  # type: ignore[assignment]  # for wrap's activation checkpointing
        for module in model.modules():
            if isinstance(module, _GATHERING):
                module.sequence_length = length

    def enter(x: Tensor) -> Tensor:
        return enter_tensor_axis(x, group, sequence_parallel=sequence_parallel, length=length)

    def split(x: Tensor) -> Tensor:
        length.note(x)
        return regions.split_to_tensor_axis(x, SEQUENCE_DIM, group)

    def gather(x: Tensor) -> Tensor:
        return regions.gather_from_tensor_axis(x, SEQUENCE_DIM, group, length.of(x, group))

    for path, style in styles.items():
        if style == "shared_input":
            transform_first_argument(model.get_submodule(path), enter)
        elif style == "experts":
            for name in ("hidden_states", "top_k_weights"):
                transform_argument(model.get_submodule(path), name, lambda x: regions.copy_to_tensor_axis(x, group))
            transform_output(model.get_submodule(path), lambda x: regions.reduce_from_tensor_axis(x, group))
        elif style == "whole_sequence" and sequence_parallel:
            module = model.get_submodule(path)
            transform_first_argument(module, gather)
            transform_output(module, split)
        elif style == "split_sequence" and sequence_parallel:
            transform_first_argument(model.get_submodule(path), split)
        elif style == "sequence_gather" and sequence_parallel:
            transform_output(model.get_submodule(path), gather)


class OwnHeads:
    """Of something for each of all heads that of this rank's: ``(batch, heads, ...)`` or ``(batch * heads, ...)``.

    What has one head in all is for every head; what has other dims (a mask of tokens) is not of heads.
    """

    def __init__(self, own: Tensor, count: int) -> None:
        self.own, self.count = own, count

    def __call__(self, x: Tensor) -> Tensor:
        if x.ndim == 3:
            return x.unflatten(0, (-1, self.count)).index_select(1, self.own.to(x.device)).flatten(0, 1)
        return x.index_select(1, self.own.to(x.device)) if x.ndim == 4 and x.shape[1] > 1 else x


class View:
    """An object that others use too, with other values under some names: a config with a rank's number of heads.

    Everything else is read from that object, and written to it, so that later changes of it are seen. A deep copy of a
    model has views of its own config.
    """

    def __init__(self, whole: Any) -> None:
        self.__dict__["_whole"] = whole
        self.__dict__["_own"] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy and pickle ask for, before there is a _whole
            raise AttributeError(name)
        name = self._canonical(name)
        return self._own[name] if name in self._own else getattr(self._whole, name)

    def __setattr__(self, name: str, value: Any) -> None:
        name = self._canonical(name)
        if name in self._own:
            self._own[name] = value
        else:
            setattr(self._whole, name, value)

    def _canonical(self, name: str) -> str:
        """Hugging Face configs have several names for one value."""
        return str(getattr(self._whole, "attribute_map", {}).get(name, name))

    def replace(self, name: str, value: Any) -> None:
        self._own[self._canonical(name)] = value


def _set_attribute(module: Any, name: str, value: Any) -> None:
    first, _, rest = name.partition(".")
    if not rest:
        setattr(module, first, value)
        return
    if not isinstance(getattr(module, first), View):
        setattr(module, first, View(getattr(module, first)))
    getattr(module, first).replace(rest, value)
