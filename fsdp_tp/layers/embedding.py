"""Token embedding with the vocabulary split over the tensor axis (arXiv 1909.08053, section 3)."""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp_tp import regions
from fsdp_tp.comm.functional import chunk_of
from fsdp_tp.layers.parameter import place_parameter, shell_of, tensor_axis, to_local
from fsdp_tp.layers.sequence import SEQUENCE_DIM, SequenceLength
from fsdp_tp.mesh import ParallelMesh


class VocabParallelEmbedding(nn.Embedding):
    r"""Looks up rows of E = [E_1; ...; E_t], split by rows over a tensor axis of t ranks.

    - Shapes per rank: ids ``(...)`` (the same on all ranks of the axis), E_r
      ``(num_embeddings / t, embedding_dim)``, output ``(..., embedding_dim)``, or with
      ``sequence_parallel`` this rank's slice ``(..., S_r, embedding_dim)``.
    - Forward: a rank looks up the ids in its rows and puts zeros for all others; the sum
      over the axis (all-reduce, or reduce-scatter) adds zeros to the one true row, so the
      output has the same bits for every t.
    - Gradient: dE_r from this rank's rows only; nothing is reduced.

    Args:
        num_embeddings, embedding_dim: global sizes. The last ranks have fewer rows where t does not divide
            ``num_embeddings``.
        mesh: a ParallelMesh, or a DeviceMesh with a tensor axis.
        padding_idx: as in ``nn.Embedding``: this row gets no gradient.
        sequence_parallel: leave the output split along the sequence (dim -2), as ``torch.chunk``
            does. The attribute ``sequence_length``, where set, notes how long it is.
        device, dtype: as in ``nn.Embedding``. The initial values do not depend on t.

    Raises:
        RuntimeError: an id out of range (on CUDA, as a device-side assertion).
    """

    sequence_length: SequenceLength | None = None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mesh: ParallelMesh | DeviceMesh,
        padding_idx: int | None = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self._split(mesh, sequence_parallel=sequence_parallel)

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, *, mesh: ParallelMesh | DeviceMesh, sequence_parallel: bool = False
    ) -> Self:
        """A new layer with this rank's rows of ``embedding`` (copied), its hooks and mode.

        ``embedding`` must hold the same values on all ranks; it is not changed. A subclass whose
        forward goes on from that of ``nn.Embedding`` (one that scales its output) goes on from this
        layer's.

        Raises:
            ValueError: ``embedding`` uses ``max_norm``, ``scale_grad_by_freq`` or ``sparse``.
        """
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, option):
                raise ValueError(f"{option}={getattr(embedding, option)} is not possible on a split vocabulary")
        kind = type(embedding)
        combined = cls if kind is nn.Embedding else type(kind.__name__, (kind, cls), {"__module__": kind.__module__})
        layer: Self = shell_of(combined, embedding, kind)
        layer._split(mesh, sequence_parallel=sequence_parallel)
        return layer

    def _split(self, mesh: ParallelMesh | DeviceMesh, *, sequence_parallel: bool) -> None:
        axis = tensor_axis(mesh)
        self.weight = place_parameter(self.weight, Shard(0), axis)
        self.tensor_group = axis.get_group()
        self.first_row, _ = chunk_of(self.num_embeddings, axis.size(), axis.get_local_rank())
        self.sequence_parallel = sequence_parallel

    def forward(self, input: Tensor) -> Tensor:
        weight = to_local(self.weight)
        if self.tensor_group.size() == 1:
            return F.embedding(input, weight, self.padding_idx)
        rows = weight.shape[0]
        torch._assert_async(
            ((input >= 0) & (input < self.num_embeddings)).all(), f"an id is not in [0, {self.num_embeddings})"
        )
        index = input - self.first_row
        elsewhere = (index < 0) | (index >= rows)
        padding_idx = None
        if self.padding_idx is not None and 0 <= self.padding_idx - self.first_row < rows:
            padding_idx = self.padding_idx - self.first_row
        if rows:
            output = F.embedding(index.masked_fill(elsewhere, 0), weight, padding_idx)
            output = output.masked_fill(elsewhere.unsqueeze(-1), 0)
        else:
            output = weight.sum(0).expand(*input.shape, -1)  # zeros, of which the empty weight has a gradient
        if self.sequence_parallel:
            if self.sequence_length is not None:
                self.sequence_length.note(output)
            return regions.reduce_scatter_sequence(output, SEQUENCE_DIM, self.tensor_group)
        return regions.reduce_from_tensor_axis(output, self.tensor_group)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tensor={self.tensor_group.size()}"
