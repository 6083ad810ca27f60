"""Between the names of a model's tensors and those that Hugging Face files have for them.

transformers knows both: it renames what older checkpoints call differently, adds or drops the prefix of the
base model, and merges the experts of a mixture, which files hold one by one. Its tables are used, not repeated.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_tp.layers.front import Front


@dataclass(frozen=True)
class Experts:
    """A tensor (experts, ...) of a model whose experts files hold one by one."""

    keys: tuple[tuple[str, ...], ...]
    """For every expert those of its tensors, which are joined along ``dim``."""
    dim: int
    shape: torch.Size


def find_tensors(model: nn.Module, names: Collection[str], tensors: Mapping[str, Tensor]) -> dict[str, str | Experts]:
    """For every name of ``model`` the key in ``tensors``, or several keys if they become one tensor.

    Keys that belong nowhere stand for themselves. Those that transformers ignores when it loads this model, buffers
    that old versions stored, are left out.

    Raises:
        ValueError: two keys are the same tensor of the model, or transformers makes one from several in a way other
            than joining experts.
    """
    loading = _Loading(model, names)
    found: dict[str, str | Experts] = {}
    of_experts: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key in sorted(tensors, key=_natural):
        name, pattern = loading.rename(key)
        if name in names and pattern is not None:
            of_experts[name][pattern].append(key)
        elif name not in names and loading.ignores(name):
            continue
        elif (other := found.setdefault(name if name in names else key, key)) != key:
            raise ValueError(f"{other} and {key} are both {name} of the model")
    for name, by_pattern in of_experts.items():
        if name in found:
            raise ValueError(f"{found[name]} and {next(iter(by_pattern.values()))[0]} are both {name} of the model")
        found[name] = _join(name, loading.converter_of[next(iter(by_pattern))], by_pattern, tensors)
    return found


class _Loading:
    """How transformers reads the keys of a file."""

    def __init__(self, model: Any, names: Collection[str]) -> None:
        self.converter_of: dict[str, Any] = {}
        self._model, self._names = model, dict.fromkeys(names, True)
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        self._ignored: re.Pattern[str] | None = None
        if not is_hugging_face(model):
            return
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        with _of_plain_class(model):
            conversions = get_model_conversion_mapping(model)
        self._converters = [each for each in conversions if isinstance(each, WeightConverter)]
        self._renamings = [each for each in conversions if not isinstance(each, WeightConverter)]
        self.converter_of = {pattern: each for each in self._converters for pattern in each.source_patterns}
        ignored = set(model._keys_to_ignore_on_load_unexpected or ())
        buffers = [name for name, _ in model.named_buffers()]
        # Persistent in old versions, not today: transformers ignores these two for all its models.
        for end, pattern in (
            ("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"),
            ("position_ids", r"(^|\.)position_ids$"),
        ):
            if any(name.endswith(end) for name in buffers):
                ignored.add(pattern)
        if ignored:
            self._ignored = re.compile("|".join(f"({pattern})" for pattern in ignored))

    def rename(self, key: str) -> tuple[str, str | None]:
        """The model's name, and the pattern of a conversion that this key goes through."""
        if not is_hugging_face(self._model):
            return key, None
        from transformers.core_model_loading import rename_source_key

        prefix = self._model.base_model_prefix
        name, pattern = rename_source_key(key, self._renamings, self._converters, prefix, self._names)
        if name not in self._names and key in self._names:
            name, pattern = rename_source_key(key, [], [], prefix, self._names)
        return name, pattern

    def ignores(self, name: str) -> bool:
        return self._ignored is not None and self._ignored.search(name) is not None


def _join(name: str, converter: Any, by_pattern: Mapping[str, list[str]], tensors: Mapping[str, Tensor]) -> Experts:
    dim = _joined_dim(converter)
    lists = [by_pattern.get(pattern, []) for pattern in converter.source_patterns]
    if dim is None:
        raise ValueError(
            f"transformers makes {name} from {', '.join(each for keys in lists for each in keys[:1])} by "
            f"{', '.join(map(repr, converter.operations))}; load_hf joins experts only. Load the checkpoint with "
            "from_pretrained and save it with save_pretrained(..., save_original_format=False)"
        )
    for keys, pattern in zip(lists, converter.source_patterns, strict=True):
        numbers = [_number_in(key) for key in keys]
        if numbers != list(range(max(map(len, lists)))):
            raise ValueError(f"{name} is joined from the same experts of each kind: of {pattern} there are {numbers}")
    experts = tuple(zip(*lists, strict=True))
    shapes = {_joined_shape([tensors[key].shape for key in keys], dim) for keys in experts}
    if len(shapes) > 1 or None in shapes:
        raise ValueError(
            f"the experts of {name} must have one shape: found "
            + ", ".join(f"{key} {tuple(tensors[key].shape)}" for keys in experts for key in keys)
        )
    return Experts(experts, dim, torch.Size([len(experts), *(shapes.pop() or ())]))


def _joined_dim(converter: Any) -> int | None:
    """Of every expert the dim along which its tensors are joined, None if ``converter`` does anything else."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    match converter.operations:
        case [MergeModulelist(dim=0)] if len(converter.source_patterns) == len(converter.target_patterns) == 1:
            return 0
        case [MergeModulelist(dim=0), Concatenate(dim=dim, num_shards_attribute=None)] if dim > 0:
            return dim - 1 if len(converter.target_patterns) == 1 else None
    return None


def _joined_shape(shapes: list[torch.Size], dim: int) -> tuple[int, ...] | None:
    """None if they cannot be joined."""
    others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len(others) > 1 or any(len(shape) <= dim for shape in shapes):
        return None
    return (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])


def names_to_store(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Of the names of one tensor, none or the one under which ``save_pretrained`` stores it."""
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    stored = sorted((name for name in names if name not in left_out), key=lambda name: name in tied)
    return stored[:1]


class Storing:
    """Names and forms in which ``save_pretrained`` stores tensors of ``model``, as far as they can be made from one
    tensor at a time; otherwise the model's own, which ``from_pretrained`` knows as well."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._reverts = is_hugging_face(model) and _is_revertible(model)

    def convert(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not self._reverts:
            return {name: tensor}
        from transformers.core_model_loading import revert_weight_conversion

        with _of_plain_class(self._model):
            converted: dict[str, Tensor] = revert_weight_conversion(self._model, {name: tensor})  # type: ignore[arg-type]
        return converted


def _is_revertible(model: Any) -> bool:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        with _of_plain_class(model):
            conversions = get_model_conversion_mapping(model, add_legacy=False)
    return all(
        _joined_dim(each) is not None if type(each) is WeightConverter else type(each) in (WeightRenaming, PrefixChange)
        for each in conversions
    )


def is_hugging_face(model: nn.Module) -> bool:
    return hasattr(model, "base_model_prefix") and hasattr(model, "config")


def plain_class(model: nn.Module) -> type[nn.Module]:
    """The class of ``model`` before fully_shard and plans put others in front."""
    classes: tuple[Any, ...] = type(model).__mro__
    return next(cls for cls in classes if not issubclass(cls, FSDPModule | Front))


@contextmanager
def _of_plain_class(model: nn.Module) -> Iterator[None]:
    """Where transformers looks at the class: it takes any that is not of its own modules for a user's."""
    cls = type(model)
    model.__class__ = plain_class(model)
    try:
        yield
    finally:
        model.__class__ = cls


def _number_in(key: str) -> int:
    """Of an expert: the last of its key's numbers."""
    return int(next((part for part in reversed(key.split(".")) if part.isdecimal()), -1))


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Numbers in the order of their values: expert 10 after expert 9."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in key.split(".")]
