"""Attention whose heads are split over the tensor axis, any number of them on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from fsdp_tp import regions
from fsdp_tp.layers.bound import BoundParameter, bind_locals
from fsdp_tp.layers.dropout import Dropout
from fsdp_tp.layers.fused import enter_products
from fsdp_tp.layers.heads import HeadLayout
from fsdp_tp.layers.linear import ColumnParallelLinear, RowParallelLinear
from fsdp_tp.layers.parameter import place_parameter, tensor_axis
from fsdp_tp.layers.rotary import rotary_angles, rotate
from fsdp_tp.layers.sequence import SequenceLength
from fsdp_tp.layers.split import Split
from fsdp_tp.mesh import ParallelMesh

NORM_EPSILON = 1e-6
"""Of the query and key norms, as Qwen3 and its like have it."""


class ParallelAttention(nn.Module):
    r"""softmax(Q K^T / sqrt(head_dim)) V with whole heads on every rank of the tensor axis.

    Grouped-query attention (arXiv 2305.13245) after Megatron-LM (arXiv 1909.08053, section 3). With t ranks, of which
    rank r computes H_r of the H query heads and K_r of the key/value heads
    (:class:`~fsdp_tp.layers.heads.HeadLayout`; neither number needs to divide anything):

    - Shapes per rank: x ``(..., S, hidden)``, q ``(..., H_r, S, head_dim)``, k and v ``(..., K_r, S, head_dim)``,
      output ``(..., S, hidden)``. With ``sequence_parallel`` x and the output are this rank's slice ``(..., S_r,
      hidden)``.
    - Forward: one all-reduce (reduce-scatter), of what the heads add to the output. Backward: one, of the input
      gradients of q, k and v together.
    - Weights: ``q_proj``, ``k_proj``, ``v_proj`` by rows and ``o_proj`` by columns, local gradients; key/value
      heads of several ranks are stored once, gathered for use, and their gradients summed. ``q_norm`` and ``k_norm``
      are whole on every rank, which sees its own heads only: one all-reduce sums both gradients.
    - A state dict has the names and shapes of one process, without regard to t.

    Args:
        hidden_size: of x.
        num_heads: query heads, H.
        num_kv_heads: key/value heads; divides ``num_heads``, which is the default.
        head_dim: default ``hidden_size / num_heads``.
        bias: of all four projections.
        qk_norm: an RMSNorm (arXiv 1910.07467) over the features of each query and key head, before the rotation.
        dropout: probability of dropping an attention weight in training, with masks that do not depend on the
            layout (:class:`~fsdp_tp.layers.Dropout`). All weights ``(..., H_r, S, S)`` then exist in memory; without
            it ``F.scaled_dot_product_attention`` picks the fastest kernel.
        causal: a token attends to itself and to those before it.
        rotary_base: of rotary position embeddings (arXiv 2104.09864; pairs as Hugging Face's Llama has them): 10000
            there. None: none.
        mesh: a ParallelMesh, or a DeviceMesh with a tensor axis.
        sequence_parallel: x is this rank's slice of the sequence and so is the output. All S_r are the same, or the
            attribute ``sequence_length`` is set to a :class:`~fsdp_tp.layers.SequenceLength` that knows S.
        device, dtype: as in ``nn.Linear``. The initial values are those of ``nn.Linear`` whatever t is.

    Raises:
        ValueError: ``num_kv_heads`` does not divide ``num_heads``; no ``head_dim`` is given and ``num_heads`` does not
            divide ``hidden_size``; a rotation of an odd ``head_dim``.
    """

    sequence_length: SequenceLength | None = None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        qk_norm: bool = False,
        dropout: float = 0.0,
        causal: bool = True,
        rotary_base: float | None = None,
        mesh: ParallelMesh | DeviceMesh,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None:
            if hidden_size % num_heads:
                raise ValueError(f"num_heads={num_heads} does not divide hidden_size={hidden_size}: say head_dim=")
            head_dim = hidden_size // num_heads
        if rotary_base is not None and head_dim % 2:
            raise ValueError(f"rotary_base={rotary_base} turns pairs of features, but head_dim={head_dim} is odd")
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        axis = tensor_axis(mesh)
        with torch.device("cpu"):  # also of a model that is built on meta
            layout = HeadLayout(num_heads, num_kv_heads, axis.size())
            heads, queries, kv = layout.queries, layout.queries.blocks(head_dim), layout.kv.blocks(head_dim)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.causal, self.rotary_base, self.sequence_parallel = causal, rotary_base, sequence_parallel
        self.tensor_group = axis.get_group()
        self._groups = layout.num_local_groups(axis.get_local_rank())
        self._heads = heads.rows[axis.get_local_rank()].clamp(min=0)  # a head of zeros: any

        def column(size: int, split: Split) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                hidden_size, size, bias, mesh=mesh, shared_input=True, split=split, device=device, dtype=dtype
            )

        self.q_proj = column(queries.size, queries)
        self.k_proj = column(kv.size, kv)
        self.v_proj = column(kv.size, kv)
        self.o_proj = RowParallelLinear(
            queries.size,
            hidden_size,
            bias,
            mesh=mesh,
            sequence_parallel=sequence_parallel,
            split=queries,
            device=device,
            dtype=dtype,
        )
        self.q_norm: nn.RMSNorm | None = None
        self.k_norm: nn.RMSNorm | None = None
        if qk_norm:
            self.q_norm = nn.RMSNorm(head_dim, NORM_EPSILON, device=device, dtype=dtype)
            self.k_norm = nn.RMSNorm(head_dim, NORM_EPSILON, device=device, dtype=dtype)
            for norm in (self.q_norm, self.k_norm):
                norm.weight = place_parameter(norm.weight, Replicate(), axis)
            both = [BoundParameter(norm, "weight", True) for norm in (self.q_norm, self.k_norm)]
            bind_locals(self, both, self.tensor_group)
        self.dropout = Dropout(dropout, mesh=mesh, split=heads, split_dim=-3)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """
        Args:
            x: ``(..., S, hidden_size)``, or this rank's slice.
            attention_mask: bool (True: attend) or added to the scores, as ``F.scaled_dot_product_attention`` takes
                it, the same on all ranks of the axis: what broadcasts to ``(..., num_heads, S, S)``, with all heads
                or one. It adds to ``causal``. A gradient for it is summed over the axis.
            positions: of the whole sequence, for the rotation: ``(..., S)``; default 0 to S - 1.

        Raises:
            ValueError: a mask whose dim -3 is neither 1 nor ``num_heads``.
        """
        projected = enter_products(
            x,
            (self.q_proj, self.k_proj, self.v_proj),
            self.tensor_group,
            sequence_parallel=self.sequence_parallel,
            length=self.sequence_length,
        )
        q, k, v = (rearrange(each, "... s (heads d) -> ... heads s d", d=self.head_dim) for each in projected)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary_base is not None:
            if positions is None:
                positions = torch.arange(q.shape[-2], device=x.device)
            angles = rotary_angles(positions, self.head_dim, self.rotary_base, x.dtype).unsqueeze(-3)
            q, k = rotate(q, angles), rotate(k, angles)
        y = self._attend(q, k, v, self._own_mask(attention_mask, q.shape[-2], x.device))
        return self.o_proj(rearrange(y, "... heads s d -> ... s (heads d)"))

    def _own_mask(self, mask: Tensor | None, length: int, device: torch.device) -> Tensor | None:
        """That of this rank's heads. None stands for the causal mask where there is no other."""
        if mask is None:
            return None
        if mask.ndim >= 3 and mask.shape[-3] not in (1, self.num_heads):
            raise ValueError(
                f"attention_mask of shape {tuple(mask.shape)}: dim -3 is that of the heads, so it must be of shape "
                f"({length}, {length}), (..., 1, {length}, {length}) or (..., {self.num_heads}, {length}, {length}); "
                "one for each sequence takes mask.unsqueeze(-3)"
            )
        if mask.requires_grad:
            mask = regions.copy_to_tensor_axis(mask, self.tensor_group)
        if mask.ndim >= 3 and mask.shape[-3] > 1:
            mask = mask.index_select(-3, self._heads.to(device))
        if not self.causal:
            return mask
        earlier = _causal_mask(length, device)
        return mask & earlier if mask.dtype == torch.bool else mask.masked_fill(~earlier, float("-inf"))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        drops = self.training and self.dropout.p > 0
        if not drops and mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self._groups > 1)
        if self._groups > 1:  # with a mask, enable_gqa would rule out the fast kernels on CUDA
            k, v = (each.repeat_interleave(self._groups, -3) for each in (k, v))
        if not drops:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if mask is None and self.causal:
            mask = _causal_mask(q.shape[-2], q.device)
        return attention_with_dropout(q, k, v, mask, self.dropout)

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"causal={self.causal}, rotary_base={self.rotary_base}, tensor={self.tensor_group.size()}"
        )


def attention_with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: Callable[[Tensor], Tensor],
    scale: float | None = None,
) -> Tensor:
    """What ``F.scaled_dot_product_attention`` computes, with a ``dropout`` of the weights other than its own, which it
    cannot take. As many heads of k and v as of q."""
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    wide = torch.promote_types(scores.dtype, torch.float32)
    # A row that may attend to nothing gets zeros, as from scaled_dot_product_attention.
    weights = torch._safe_softmax(scores.to(wide), -1).to(q.dtype)
    return dropout(weights) @ v


def _causal_mask(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()
