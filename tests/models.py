"""Toy models and batches that several tests train."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY = 64
SEQUENCE = 8
ROWS = 8

_SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    use_cache=False,
)


def hugging_face(family: str, **overrides: Any) -> nn.Module:
    """A toy decoder of a Hugging Face family (``llama``, ``mistral``, ``qwen2``, ``qwen3``)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**_SIZES, **overrides}
    if family == "qwen3":
        sizes.setdefault("head_dim", 8)
    config = AutoConfig.for_model(family, **sizes)
    return AutoModelForCausalLM.from_config(config)


def batch(step: int = 0, *, rows: int = ROWS, sequence: int = SEQUENCE) -> torch.Tensor:
    """Token ids ``(rows, sequence + 1)`` of one global batch."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCABULARY, (rows, sequence + 1), generator=generator)
