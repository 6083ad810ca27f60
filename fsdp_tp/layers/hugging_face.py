"""The loss that Hugging Face models compute from labels, on split logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_tp.layers.loss import vocab_parallel_cross_entropy
from fsdp_tp.mesh import ParallelMesh


def hugging_face_loss(mesh: ParallelMesh) -> Callable[..., torch.Tensor]:
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
