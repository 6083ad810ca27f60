"""Settings of an optimizer and the state of a scheduler as JSON, and back as the same types.

What JSON has no type for is an object with the key ``kind``.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_tp.checkpoint.files import DTYPES, dtype_name

_KIND = "kind"


def to_json(value: Any, name: str) -> Any:
    """Raises ValueError for what cannot be stored; ``name`` says to humans what it is."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor) and not isinstance(value, DTensor):
        return {_KIND: "tensor", "dtype": dtype_name(name, value.dtype), "items": value.tolist()}
    kind = type(value)
    if kind is list:
        return _each(value, name)
    if kind is tuple:
        return {_KIND: "tuple", "items": _each(value, name)}
    if kind in (dict, Counter):
        if kind is dict and _KIND not in value and all(isinstance(key, str) for key in value):
            return {key: to_json(each, f"{name}.{key}") for key, each in value.items()}
        pairs = [[to_json(key, f"a key of {name}"), to_json(each, f"{name}[{key!r}]")] for key, each in value.items()]
        return {_KIND: kind.__name__, "items": pairs}
    raise ValueError(
        f"{name} is a {kind.__name__}, which cannot be stored; None, numbers, strings, plain tensors, and lists, "
        "tuples, dicts and Counters of them can"
    )


def from_json(stored: Any) -> Any:
    """The inverse of :func:`to_json`."""
    if isinstance(stored, list):
        return [from_json(each) for each in stored]
    if not isinstance(stored, dict):
        return stored
    if _KIND not in stored:
        return {key: from_json(each) for key, each in stored.items()}
    kind, items = stored[_KIND], stored["items"]
    if kind == "tensor":
        return torch.tensor(items, dtype=DTYPES[stored["dtype"]])
    if kind == "tuple":
        return tuple(from_json(items))
    pairs = {from_json(key): from_json(each) for key, each in items}
    return Counter(pairs) if kind == "Counter" else pairs


def _each(values: list[Any] | tuple[Any, ...], name: str) -> list[Any]:
    return [to_json(each, f"{name}[{index}]") for index, each in enumerate(values)]


def json_copy(value: Any, name: str) -> Any:
    """What will be read of a value, whatever becomes of it while it is written. Raises ValueError, see below."""
    require_json(value, name)
    return json.loads(json.dumps(value))


def require_json(value: Any, name: str) -> None:
    """Raises ValueError for what JSON cannot hold, or makes something else of."""
    if isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise ValueError(
                    f"{name} has the key {key!r}, a {type(key).__name__}; keys must be strings, as in JSON"
                )
            require_json(each, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            require_json(each, f"{name}[{index}]")
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise ValueError(
            f"{name} is a {type(value).__name__}, which JSON cannot hold; None, numbers, strings, lists and dicts can "
            "(of a tensor take .tolist() or .item())"
        )
