"""A two-layer perceptron whose width is split over the tensor axis."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_tp.layers.dropout import Dropout
from fsdp_tp.layers.fused import enter_products
from fsdp_tp.layers.linear import ColumnParallelLinear, RowParallelLinear
from fsdp_tp.layers.parameter import tensor_axis
from fsdp_tp.layers.sequence import SequenceLength
from fsdp_tp.layers.split import Split
from fsdp_tp.mesh import ParallelMesh

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "tanh": torch.tanh,
}
"""Elementwise, so a rank applies them to its features. f(0) may be anything: nothing computes with padding."""


class ParallelMLP(nn.Module):
    r"""down(f(gate(x)) * up(x)), or without a gate down(f(up(x))), the width split over the tensor axis.

    After Megatron-LM (arXiv 1909.08053, section 3); gated as in arXiv 2002.05202. With a tensor axis of t ranks:

    - Shapes per rank: x ``(..., hidden)``, the activations between ``(..., width / t)`` (the last ranks less where t
      does not divide it), output ``(..., hidden)``. With ``sequence_parallel`` x and the output are this rank's
      slice ``(..., S_r, hidden)``.
    - Forward: one all-reduce (reduce-scatter), of the output. Backward: one, of the input gradients of gate and up
      together.
    - Weights: ``gate_proj`` and ``up_proj`` by rows, ``down_proj`` by columns; all gradients are local.

    Args:
        hidden_size: of x.
        intermediate_size: the width; any number.
        gated: with ``gate_proj``.
        activation: f, one of :data:`ACTIVATIONS`.
        bias: of all projections.
        dropout: probability of dropping one of the activations between, in training, with masks that do not depend
            on the layout (:class:`~fsdp_tp.layers.Dropout`).
        mesh: a ParallelMesh, or a DeviceMesh with a tensor axis.
        sequence_parallel: x is this rank's slice of the sequence and so is the output. All S_r are the same, or the
            attribute ``sequence_length`` is set to a :class:`~fsdp_tp.layers.SequenceLength` that knows S.
        device, dtype: as in ``nn.Linear``. The initial values are those of ``nn.Linear`` whatever t is.

    Raises:
        ValueError: an unknown ``activation``.
    """

    sequence_length: SequenceLength | None = None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        gated: bool = True,
        activation: str = "silu",
        bias: bool = False,
        dropout: float = 0.0,
        mesh: ParallelMesh | DeviceMesh,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r} must be one of {', '.join(map(repr, ACTIVATIONS))}")
        axis = tensor_axis(mesh)
        self.activation, self.sequence_parallel = activation, sequence_parallel
        self.tensor_group = axis.get_group()

        def column() -> ColumnParallelLinear:
            return ColumnParallelLinear(
                hidden_size, intermediate_size, bias, mesh=mesh, shared_input=True, device=device, dtype=dtype
            )

        self.gate_proj = column() if gated else None
        self.up_proj = column()
        self.down_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            bias,
            mesh=mesh,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=dtype,
        )
        self.dropout = Dropout(dropout, mesh=mesh, split=Split.even(intermediate_size, axis.size()))

    def forward(self, x: Tensor) -> Tensor:
        layers = [self.up_proj] if self.gate_proj is None else [self.up_proj, self.gate_proj]
        up, *gate = enter_products(
            x, layers, self.tensor_group, sequence_parallel=self.sequence_parallel, length=self.sequence_length
        )
        function = ACTIVATIONS[self.activation]
        hidden = function(gate[0]) * up if gate else function(up)
        return self.down_proj(self.dropout(hidden))

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, tensor={self.tensor_group.size()}"
