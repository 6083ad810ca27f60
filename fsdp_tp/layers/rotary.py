"""Rotary position embedding (RoFormer, arXiv 2104.09864, section 3.4.2)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> Tensor:
    """``(..., head_dim / 2)`` of the positions ``(...)``: m * base^(-2i / head_dim), at least in fp32."""
    wide = torch.promote_types(dtype, torch.float32)
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim
    return positions.to(wide).unsqueeze(-1) * base**-steps


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """``x (..., head_dim)`` with the pair (i, i + head_dim / 2) turned by ``angles[..., i]``.

    The paper pairs neighbours (2i, 2i + 1). Hugging Face's Llama and its descendants pair halves, with query and key
    rows in an order to match: so do we, that their weights mean the same here.
    """
    first, second = x.to(angles.dtype).chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
