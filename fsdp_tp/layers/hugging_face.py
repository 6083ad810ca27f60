"""The loss that Hugging Face models compute from labels, on split logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_tp.layers.front import own_forward
from fsdp_tp.layers.loss import vocab_parallel_cross_entropy
from fsdp_tp.mesh import ParallelMesh


def split_labels_loss(model: Any, mesh: ParallelMesh) -> None:
    """The loss that ``model`` computes from ``labels`` takes split logits, where it is the causal one of transformers.

    A model that computes it in its own forward would do so on a slice of the vocabulary: there ``labels`` become an
    error.
    """
    if not isinstance(getattr(type(model), "loss_function", None), property):
        return  # not of transformers
    code = inspect.unwrap(own_forward(model)).__code__
    if "loss_function" in code.co_names and getattr(model, "loss_type", None) == "ForCausalLM":
        model.loss_function = _causal_loss(mesh)
        return

    def refuse(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("labels") is not None:
            raise ValueError(
                f"labels: with loss_parallel=True {type(model).__name__} would compute its loss on this rank's slice "
                "of the vocabulary; pass none and give the logits to fsdp_tp.vocab_parallel_cross_entropy, or leave "
                "loss_parallel off"
            )

    model.register_forward_pre_hook(refuse, with_kwargs=True)


def _causal_loss(mesh: ParallelMesh) -> Callable[..., torch.Tensor]:
    def loss_function(
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The causal language-model loss on this rank's slice of the vocabulary."""
        if shift_labels is None:
            assert labels is not None
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = vocab_parallel_cross_entropy(
            logits, shift_labels, mesh=mesh, ignore_index=ignore_index, reduction=reduction
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    return loss_function
