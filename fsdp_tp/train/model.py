"""The model that a configuration asks for, on the meta device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_tp.train.config import ModelConfig

_VOCABULARY_MULTIPLE = 64


def build_model(config: ModelConfig, *, tokenizer_size: int, sequence_length: int) -> nn.Module:
    """A Hugging Face causal language model without weights.

    Raises:
        ValueError: a model file that cannot be used, sizes that do not fit each other, or a
            tokenizer that is larger than the model's vocabulary.
    """
    from transformers import AutoModelForCausalLM

    try:
        hugging_face = (
            read_config(config.model) if config.model else llama_config(config, tokenizer_size, sequence_length)
        )
        hugging_face.use_cache = False
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(hugging_face)
    except Exception as error:  # configurations are checked by libraries with exceptions of their own
        raise ValueError(f"model={config.model or 'llama'} cannot be built: {error}") from error
    if tokenizer_size > hugging_face.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer_size} tokens, more than the model's vocab_size={hugging_face.vocab_size}"
        )
    return model


def llama_config(config: ModelConfig, tokenizer_size: int, sequence_length: int) -> Any:
    """The transformers config of the trainer's own sizes. Raises ValueError if they do not fit each other."""
    from transformers import LlamaConfig

    if config.hidden_size % config.num_heads or config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_heads={config.num_heads} must divide hidden_size={config.hidden_size} and be a multiple of "
            f"num_kv_heads={config.num_kv_heads}"
        )
    rounded_up = -(-tokenizer_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    return LlamaConfig(
        vocab_size=config.vocab_size or rounded_up,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=sequence_length,
        tie_word_embeddings=config.tie_embeddings,
    )


def read_config(path: Path) -> Any:
    """The transformers config in a config.json or a directory with one; never from the network.

    Raises:
        ValueError: it cannot be read.
    """
    from transformers import AutoConfig

    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text())
        model_type = values.pop("model_type")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is not a readable config.json: {error}") from None
    except (KeyError, AttributeError, TypeError):
        raise ValueError(f"{file} has no model_type") from None
    return AutoConfig.for_model(model_type, **values)
