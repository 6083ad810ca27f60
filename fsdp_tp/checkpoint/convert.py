"""Between checkpoints and Hugging Face directories, in one process that builds the model on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fsdp_tp.checkpoint as checkpoint
from fsdp_tp.checkpoint import files
from fsdp_tp.checkpoint.hugging_face import load_hf, map_hf, save_hf
from fsdp_tp.checkpoint.manifest import Damaged, Manifest
from fsdp_tp.checkpoint.state import OPTIMIZER

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def to_hugging_face(path: Path, directory: Path, config: Path | None, dtype: torch.dtype | None) -> None:
    """Writes the model of the checkpoint ``path`` to the new ``directory``.

    Raises:
        ValueError: ``path`` is damaged, is not of the model of ``config``, or needs one.
    """
    manifest = Manifest.read(path)
    stored = [tensor for name, tensor in manifest.tensors.items() if not name.startswith(OPTIMIZER)]
    if problems := manifest.problems(path, sorted({chunk.file for tensor in stored for chunk in tensor.chunks})):
        raise Damaged("; ".join(problems))
    found = _read_config(config) if config is not None else _trained_config(path, manifest)
    model = _build(found, _common(files.DTYPES[tensor.dtype] for tensor in stored))
    checkpoint.load(path, model=model)
    save_hf(model, directory, dtype=dtype)


def from_hugging_face(directory: Path, path: Path, config: Path | None, dtype: torch.dtype | None) -> None:
    """Writes the weights of a Hugging Face ``directory`` to the new checkpoint ``path``.

    Raises:
        ValueError: see :func:`load_hf`.
    """
    found = _read_config(config or directory)
    model = _build(found, dtype or _common(tensor.dtype for tensor in map_hf(directory).values()))
    load_hf(model, directory)
    checkpoint.save(path, model=model)


def _common(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The narrowest that holds all floating-point values."""
    floating = {dtype for dtype in dtypes if dtype.is_floating_point}
    try:
        return functools.reduce(torch.promote_types, floating or {torch.float32})
    except RuntimeError:  # of float8 and others
        raise ValueError(f"no dtype holds the values of all of {', '.join(map(str, floating))}") from None


def _build(config: Any, dtype: torch.dtype) -> nn.Module:
    """The class that the config names, or its causal language model; parameters have memory and no values."""
    import transformers

    cls = getattr(transformers, (config.architectures or [""])[0], None)
    build: Any = transformers.AutoModelForCausalLM.from_config
    if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
        build = cls._from_config
    try:
        with torch.device("meta"):
            model = build(config, dtype=dtype)
        model.to_empty(device="cpu")
        model.tie_weights()  # to_empty gives each of tied parameters its own memory
    except Exception as error:  # configurations are checked by libraries with exceptions of their own
        raise ValueError(f"a model of type {config.model_type} cannot be built: {error}") from error
    return model


def _read_config(path: Path) -> Any:
    from fsdp_tp.train.model import read_config

    try:
        return read_config(path)
    except Exception as error:  # configurations are checked by libraries with exceptions of their own
        raise ValueError(f"{path} cannot be read: {error}") from error


def _trained_config(path: Path, manifest: Manifest) -> Any:
    """Of a checkpoint of fsdp_tp.train, which stores its settings."""
    from fsdp_tp.train.config import ModelConfig
    from fsdp_tp.train.model import llama_config

    try:
        saved = manifest.extra["config"]
        settings, sequence_length = ModelConfig(**saved["model"]), saved["data"]["sequence_length"]
        rows = manifest.tensors["model.embed_tokens.weight"].shape[0] if settings.model is None else 0
    except (KeyError, TypeError):
        raise ValueError(
            f"{path} does not say which model it is of; give its Hugging Face config.json with --config"
        ) from None
    if settings.model is not None:
        if not Path(settings.model).exists():
            raise ValueError(
                f"{path} is of the model {settings.model}, which is not there; give its config.json with --config"
            )
        return _read_config(Path(settings.model))
    return llama_config(replace(settings, vocab_size=rows), rows, sequence_length)
