"""The model and the data that a command line names."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_BYTES = 256


def load(name: str, setting: str) -> Any:
    """The object behind ``module:name``, also of a module in the working directory."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"{setting}={name!r} must be module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{setting}={name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"{setting}={name!r} must be a function, not a {type(found).__name__}")
    return found


def find_model(name: str, sequence_length: int) -> tuple[Callable[[], nn.Module], int | None]:
    """The function that builds the model, and its vocabulary where that is known.

    Raises:
        ValueError: ``name`` is neither module:function nor a Hugging Face config that can be used.
    """
    if ":" in name:
        return load(name, "model"), None
    values: dict[str, Any]
    if name:
        path = Path(name)
        file = path / "config.json" if path.is_dir() else path
        try:
            values = json.loads(file.read_text())
            vocabulary = int(values["vocab_size"])
            values["model_type"]
        except (OSError, UnicodeDecodeError, ValueError, TypeError) as error:
            raise ValueError(f"model={name} is not module:function and not a config.json: {error}") from None
        except KeyError as error:
            raise ValueError(f"model={name} has no {error}") from None
    else:
        vocabulary = _BYTES
        values = {
            "model_type": "llama",
            "vocab_size": vocabulary,
            "hidden_size": 320,
            "intermediate_size": 896,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": sequence_length,
        }
    build = functools.partial(hugging_face, json.dumps(values))
    try:
        build()
    except Exception as error:  # configurations are checked by libraries with exceptions of their own
        raise ValueError(f"model={name or 'llama'} cannot be built: {error}") from error
    return build, vocabulary


def hugging_face(config: str) -> nn.Module:
    """A causal language model on the meta device, from a config in JSON."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = json.loads(config)
    made = AutoConfig.for_model(values.pop("model_type"), **values)
    made.use_cache = False
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(made)
    return model


def find_data(name: str, shape: tuple[int, int], seed: int, vocabulary: int | None) -> Callable[[int], Any]:
    if ":" in name and not Path(name).exists():
        found: Callable[[int], Any] = load(name, "data")
        return found
    if not name:
        return functools.partial(counting, shape, vocabulary or _BYTES, seed)
    path = Path(name)
    try:
        tokens = np.load(path).reshape(-1) if path.suffix == ".npy" else np.frombuffer(path.read_bytes(), np.uint8)
    except (OSError, ValueError) as error:
        raise ValueError(f"data={path} cannot be read: {error}") from None
    if len(tokens) < shape[0] * shape[1]:
        raise ValueError(f"data={path} holds {len(tokens)} tokens, fewer than the {shape[0] * shape[1]} of one batch")
    if vocabulary is not None and int(tokens.max()) >= vocabulary:
        raise ValueError(f"data={path} has the token {tokens.max()}; the model's vocab_size is {vocabulary}")
    return functools.partial(windows, torch.from_numpy(tokens.astype(np.int64)), shape)


def counting(shape: tuple[int, int], vocabulary: int, seed: int, step: int) -> Tensor:
    """Rows that count up by a step of their own, from a start of their own: something to learn."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    first = torch.randint(0, vocabulary, (shape[0], 1), generator=generator)
    stride = torch.randint(1, 4, (shape[0], 1), generator=generator)
    return (first + stride * torch.arange(shape[1])) % vocabulary


def windows(tokens: Tensor, shape: tuple[int, int], step: int) -> Tensor:
    """The next rows of ``tokens``, from the start again when they end."""
    rows = len(tokens) // shape[1]
    index = (torch.arange(shape[0]) + (step - 1) * shape[0]) % rows
    return tokens[: rows * shape[1]].view(rows, shape[1])[index]
