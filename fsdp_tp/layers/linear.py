"""Linear layers whose weight is split over the tensor axis.

After Megatron-LM (arXiv 1909.08053, section 3); sequence parallelism after arXiv
2205.05198, section 4.2. In the docstrings t is the size of the tensor axis, r the rank
on it, and ``...`` any leading dims; under sequence parallelism the sequence is dim -2, and
a rank holds S_r of its S tokens. What t does not divide is split as ``torch.chunk`` does: ceil(S / t)
each, the last ranks less or none; ``out_features / t`` stands for such a part too
(:meth:`Split.even <fsdp_tp.layers.split.Split.even>`). Another ``split`` says which features each rank has.
"""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from fsdp_tp import regions
from fsdp_tp.layers import fused
from fsdp_tp.layers.bound import local_with_summed_gradient
from fsdp_tp.layers.canonical import place_split
from fsdp_tp.layers.parameter import place_parameter, shell_of, tensor_axis, to_local
from fsdp_tp.layers.sequence import SEQUENCE_DIM, SequenceLength, enter_tensor_axis
from fsdp_tp.layers.split import Split
from fsdp_tp.mesh import ParallelMesh


class ColumnParallelLinear(nn.Linear):
    r"""Y = X W^T + b with the rows of W (the columns of W^T) split over the tensor axis.

    With W = [W_1; ...; W_t], each rank computes Y_r = X W_r^T + b_r.

    - Shapes per rank: X ``(..., in_features)``, W_r ``(out_features / t, in_features)``,
      b_r ``(out_features / t,)``, Y_r ``(..., out_features / t)``, or ``(..., out_features)``
      with ``gather_output``.
    - Input gradient: dX = sum over r of dY_r W_r: an all-reduce, or with
      ``sequence_parallel`` a reduce-scatter.
    - Weight gradients: dW_r = dY_r^T X and db_r = sum of dY_r: local, nothing is reduced.

    Args:
        in_features, out_features: global sizes.
        bias: learn an additive bias.
        mesh: a ParallelMesh, or a DeviceMesh with a tensor axis.
        gather_output: all-gather Y, so that every rank has it whole.
        sequence_parallel: X is this rank's slice of the sequence, ``(..., S_r, in_features)``;
            it is all-gathered before the product, and kept so for the weight gradient. All S_r are
            the same, or the attribute ``sequence_length`` is set to a
            :class:`~fsdp_tp.layers.SequenceLength` that knows S.
        shared_input: the caller has already taken X through
            :func:`~fsdp_tp.regions.copy_to_tensor_axis` or :func:`~fsdp_tp.regions.gather_sequence`,
            once for all layers that read it; this layer then does not reduce dX again.
        device, dtype: as in ``nn.Linear``. The initial values do not depend on t: every rank
            draws the whole weight, as ``nn.Linear`` would, and keeps its rows.
        split: of the output features: for heads that must stay whole, or for packed weights.
    """

    out_dim = 0
    """Of the weight."""
    sequence_length: SequenceLength | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: ParallelMesh | DeviceMesh,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        shared_input: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        split: Split | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._split(
            mesh,
            gather_output=gather_output,
            sequence_parallel=sequence_parallel,
            shared_input=shared_input,
            split=split,
        )

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        mesh: ParallelMesh | DeviceMesh,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        shared_input: bool = False,
        split: Split | None = None,
    ) -> Self:
        """A new layer with this rank's part of ``linear``'s weights (copied), its hooks and mode.

        ``linear`` must hold the same values on all ranks; it is not changed.
        """
        layer = shell_of(cls, linear, nn.Linear)
        layer._split(
            mesh,
            gather_output=gather_output,
            sequence_parallel=sequence_parallel,
            shared_input=shared_input,
            split=split,
        )
        return layer

    def _split(
        self,
        mesh: ParallelMesh | DeviceMesh,
        *,
        gather_output: bool,
        sequence_parallel: bool,
        shared_input: bool,
        split: Split | None,
    ) -> None:
        axis = tensor_axis(mesh)
        default = Split.chunks if gather_output else Split.even
        self.split = split or default(self.out_features, axis.size())
        assert not gather_output or self.split.is_chunked, "gathering assumes the order of the whole"
        place_split(self, "weight", self.split, self.out_dim, axis)
        if self.bias is not None:
            place_split(self, "bias", self.split, 0, axis)
        self.tensor_group = axis.get_group()
        self.gather_output = gather_output
        self.sequence_parallel = sequence_parallel
        self.shared_input = shared_input

    def forward(self, input: Tensor) -> Tensor:
        outputs = None
        if self.sequence_parallel and not self.shared_input:
            outputs = fused.gathered_products(input, [self], self.tensor_group, self.sequence_length)
        if outputs is not None:
            [output] = outputs
        else:
            if not self.shared_input:
                input = enter_tensor_axis(
                    input, self.tensor_group, sequence_parallel=self.sequence_parallel, length=self.sequence_length
                )
            output = self._product(input, *self.local_operands())
        if self.gather_output:
            output = regions.gather_from_tensor_axis(output, -1, self.tensor_group, self.out_features)
        return output

    def local_operands(self) -> tuple[Tensor, Tensor | None]:
        """W_r and b_r."""
        weight = self.split.local(to_local(self.weight), self.out_dim, self.tensor_group)
        bias = None if self.bias is None else self.split.local(to_local(self.bias), 0, self.tensor_group)
        return weight, bias

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tensor={self.tensor_group.size()}, gather_output={self.gather_output}"


class RowParallelLinear(nn.Linear):
    r"""Y = X W^T + b with the columns of W (the rows of W^T) split over the tensor axis.

    With W = [W_1, ..., W_t] and X = [X_1, ..., X_t], Y = (sum over r of X_r W_r^T) + b.

    - Shapes per rank: X_r ``(..., in_features / t)``, W_r ``(out_features, in_features / t)``,
      b ``(out_features,)`` on every rank, Y ``(..., out_features)``, or with
      ``sequence_parallel`` this rank's slice ``(..., S_r, out_features)``.
    - Forward: the sum is an all-reduce, or with ``sequence_parallel`` a reduce-scatter.
      b is added after it, once.
    - Input gradient: dX_r = dY W_r: local.
    - Weight gradients: dW_r = dY^T X_r: local. db = sum of dY, the same on every rank; with
      ``sequence_parallel`` each rank sees its slice of dY, so db is summed over the axis.

    Args:
        in_features, out_features: global sizes.
        bias: learn an additive bias.
        mesh: a ParallelMesh, or a DeviceMesh with a tensor axis.
        input_is_parallel: X is already split, as a column-parallel layer leaves it; otherwise
            this layer takes its slice of a whole X.
        sequence_parallel: leave Y split along the sequence.
        device, dtype: as in ``nn.Linear``. The initial values do not depend on t.
        split: of the input features, as the column-parallel layer before splits its output.
    """

    in_dim = 1
    """Of the weight."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: ParallelMesh | DeviceMesh,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        split: Split | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._split(mesh, input_is_parallel=input_is_parallel, sequence_parallel=sequence_parallel, split=split)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        mesh: ParallelMesh | DeviceMesh,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        split: Split | None = None,
    ) -> Self:
        """A new layer with this rank's part of ``linear``'s weights (copied), its hooks and mode.

        ``linear`` must hold the same values on all ranks; it is not changed.
        """
        layer = shell_of(cls, linear, nn.Linear)
        layer._split(mesh, input_is_parallel=input_is_parallel, sequence_parallel=sequence_parallel, split=split)
        return layer

    def _split(
        self,
        mesh: ParallelMesh | DeviceMesh,
        *,
        input_is_parallel: bool,
        sequence_parallel: bool,
        split: Split | None,
    ) -> None:
        axis = tensor_axis(mesh)
        default = Split.even if input_is_parallel else Split.chunks
        self.split = split or default(self.in_features, axis.size())
        assert input_is_parallel or self.split.is_chunked, "taking a slice assumes the order of the whole"
        place_split(self, "weight", self.split, self.in_dim, axis)
        if self.bias is not None:
            self.bias = place_parameter(self.bias, Replicate(), axis)
        self.tensor_group = axis.get_group()
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel = sequence_parallel

    def forward(self, input: Tensor) -> Tensor:
        if not self.input_is_parallel:
            input = regions.split_to_tensor_axis(input, -1, self.tensor_group)
        weight = self.split.local(to_local(self.weight), self.in_dim, self.tensor_group)
        output = None
        if self.sequence_parallel:
            output = fused.scattered_product(input, weight.t() if self.in_dim == 1 else weight, self.tensor_group)
        if output is None:
            output = self._product(input, weight)
            if self.sequence_parallel:
                output = regions.reduce_scatter_sequence(output, SEQUENCE_DIM, self.tensor_group)
            else:
                output = regions.reduce_from_tensor_axis(output, self.tensor_group)
        if self.bias is None:
            return output
        if self.sequence_parallel:
            return output + local_with_summed_gradient(self.bias, self.tensor_group)
        return output + to_local(self.bias)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tensor={self.tensor_group.size()}"
