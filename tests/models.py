"""Toy models and batches that several tests train."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

VOCABULARY = 64
SEQUENCE = 8
ROWS = 8

SIZES = dict(
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

    sizes = {**SIZES, **overrides}
    if family == "qwen3":
        sizes.setdefault("head_dim", 8)
    config = AutoConfig.for_model(family, **sizes)
    return AutoModelForCausalLM.from_config(config)


def batch(step: int = 0, *, rows: int = ROWS, sequence: int = SEQUENCE) -> torch.Tensor:
    """Token ids ``(rows, sequence + 1)`` of one global batch: runs of counting up, so that there
    is something to learn."""
    generator = torch.Generator().manual_seed(1000 + step)
    first = torch.randint(0, VOCABULARY, (rows, 1), generator=generator)
    return (first + torch.arange(sequence + 1)) % VOCABULARY


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """The global value of a DTensor or plain tensor, as a plain tensor of its own."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


class TwoLayerNet(nn.Module):
    """A decoder-like model of plain torch modules, with a bare parameter, for dict plans."""

    def __init__(self, width: int = 16, hidden: int = 32, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width, dtype=dtype)
        self.position = nn.Parameter(torch.randn(SEQUENCE, width, dtype=dtype) / 4)
        self.layers = nn.ModuleList(_Block(width, hidden, dtype) for _ in range(2))
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.head = nn.Linear(width, VOCABULARY, bias=False, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class _Block(nn.Module):
    def __init__(self, width: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.mlp = _MLP(width, hidden, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class _MLP(nn.Module):
    def __init__(self, width: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, dtype=dtype)
        self.up = nn.Linear(width, hidden, dtype=dtype)
        self.group_norm = nn.RMSNorm(4, dtype=dtype)  # over groups of features: sees this rank's groups only
        self.down = nn.Linear(hidden, width, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.gate(x)) * self.up(x)
        hidden = self.group_norm(hidden.unflatten(-1, (-1, 4))).flatten(-2)
        return self.down(hidden)


TWO_LAYER_PLAN = {
    "embed": "vocab",
    "layers.*.norm": "sequence",
    "layers.*.mlp": "shared_input",
    "layers.*.mlp.gate": "column",
    "layers.*.mlp.up": "column",
    "layers.*.mlp.group_norm": "per_head",
    "layers.*.mlp.down": "row",
    "norm": "sequence_gather",
    "head": "column_gather",
}
