"""Short digests of tensors from which the distance of two tensors can be told.

A count sketch (Charikar, Chen, Farach-Colton 2002): each element goes with a pseudo-random sign
into one of ``BUCKETS`` sums. It is linear, so ranks sketch the part that they hold and the parts
add up, and for two tensors a, b of one shape the norm of sketch(a) - sketch(b) estimates that of
a - b without bias, with a standard deviation of about 1 / sqrt(2 * BUCKETS) = 9 %. Tensors of up
to ``BUCKETS`` elements are kept exactly. The sum of squares is stored behind the buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

BUCKETS = 61
"""A prime, so that no power-of-two stride of a tensor meets one bucket only."""


class Sketcher:
    """Keeps the signs; they depend on an element's index alone, not on the machine."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._signs = torch.empty(0, dtype=torch.int8, device=device)

    def __call__(self, piece: Tensor, shape: Sequence[int], starts: Sequence[int]) -> Tensor:
        """The sketch, ``(BUCKETS + 1,)`` fp64 on the CPU, of a tensor of ``shape`` that is ``piece`` from the
        index ``starts`` on and zero elsewhere."""
        piece = piece.detach()
        if not shape:
            piece, shape, starts = piece.reshape(1), (1,), (0,)
        if tuple(piece.shape[1:]) != tuple(shape[1:]):
            rows = piece.new_zeros((piece.shape[0], *shape[1:]))
            inner = zip(starts[1:], piece.shape[1:], strict=True)
            rows[(slice(None), *(slice(start, start + size) for start, size in inner))] = piece
            piece = rows
        offset = starts[0] * (piece[0].numel() if len(piece) else 0)
        flat = piece.reshape(-1)
        flat = flat * self.signs(offset + flat.numel())[offset:]
        before = offset % BUCKETS
        flat = F.pad(flat, (before, -(before + flat.numel()) % BUCKETS))
        buckets = flat.view(-1, BUCKETS).sum(0, dtype=torch.float64)
        squares = torch.linalg.vector_norm(flat, dtype=torch.float64) ** 2
        return torch.cat([buckets, squares.reshape(1)]).cpu()

    def signs(self, count: int) -> Tensor:
        """The first ``count`` signs, int8."""
        if len(self._signs) < count:
            # The finaliser of splitmix64, whose low bit is as good as random.
            mixed = torch.arange(max(count, 2 * len(self._signs)), device=self._device) * -7046029254386353131
            mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
            mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
            self._signs = ((mixed >> 40 & 1) * 2 - 1).to(torch.int8)
        return self._signs[:count]
