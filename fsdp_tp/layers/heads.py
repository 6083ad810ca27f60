"""Any number of attention heads on any tensor degree.

Every rank gets whole heads: the same number of query heads for each of its key/value heads, so that
grouped-query attention (arXiv 2305.13245) runs on a rank as it does on one process. The axis is taken as
a grid of ``kv_ranks`` by ``query_ranks``: the first split the key/value heads, the second the query heads
of each. Neither has to divide anything: numbers differ by one where they must.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_tp.config import divisors
from fsdp_tp.layers.split import ZERO, Split, on_cpu


class HeadLayout:
    """Which heads each of ``ranks`` ranks computes.

    Among all grids it takes the one whose busiest rank has the fewest query heads, then the fewest
    key/value heads. A rank that no head is left for computes one of zeros.

    Args:
        num_heads: query heads.
        num_kv_heads: key/value heads; divides ``num_heads``. Query head h reads h // (num_heads / num_kv_heads).
        ranks: size of the tensor axis.

    Raises:
        ValueError: ``num_kv_heads`` does not divide ``num_heads``.
    """

    @on_cpu
    def __init__(self, num_heads: int, num_kv_heads: int, ranks: int) -> None:
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            legal = ", ".join(map(str, divisors(num_heads)))
            raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}; legal values: {legal}")
        self.num_heads, self.num_kv_heads, self.ranks = num_heads, num_kv_heads, ranks
        groups = num_heads // num_kv_heads

        def cost(query_ranks: int) -> tuple[int, int]:
            kv = -(-num_kv_heads // (ranks // query_ranks))
            return kv * -(-groups // query_ranks), kv

        self.query_ranks = min((size for size in divisors(ranks) if size <= groups), key=cost)
        self.kv_ranks = ranks // self.query_ranks
        self._kv: list[Tensor] = []
        self._queries: list[Tensor] = []
        self._groups: list[int] = []
        for rank in range(ranks):
            kv = torch.arange(num_kv_heads).tensor_split(self.kv_ranks)[rank // self.query_ranks]
            own = torch.arange(groups).tensor_split(self.query_ranks)[rank % self.query_ranks]
            queries = (kv[:, None] * groups + own).flatten()
            nothing = torch.tensor([ZERO])
            self._kv.append(kv if kv.numel() else nothing)
            self._queries.append(queries if kv.numel() else nothing)
            self._groups.append(own.numel() if kv.numel() else 1)

    def num_local_heads(self, rank: int) -> int:
        """Query heads of ``rank``."""
        return self._queries[rank].numel()

    def num_local_kv_heads(self, rank: int) -> int:
        return self._kv[rank].numel()

    def num_local_groups(self, rank: int) -> int:
        """Query heads of ``rank`` for each of its key/value heads."""
        return self._groups[rank]

    @property
    def queries(self) -> Split:
        """Of things that there are one of for each query head."""
        return Split(self.num_heads, self._queries)

    @property
    def kv(self) -> Split:
        """Of things that there are one of for each key/value head."""
        return Split(self.num_kv_heads, self._kv)

    @property
    @on_cpu
    def interleaved(self) -> Split:
        """Of heads in groups of all queries of a key/value head, its key and its value, group after group."""
        groups = self.num_heads // self.num_kv_heads
        rows = []
        for kv, queries in zip(self._kv, self._queries, strict=True):
            by_kv = queries.view(kv.numel(), -1)
            first = (kv * (groups + 2))[:, None]
            part = torch.cat([first + by_kv % groups, first + groups, first + groups + 1], dim=1)
            rows.append(torch.full((by_kv.shape[1] + 2,), ZERO) if kv[0] == ZERO else part.flatten())
        return Split(self.num_kv_heads * (groups + 2), rows)

    def __repr__(self) -> str:
        return f"HeadLayout({self.num_heads}, {self.num_kv_heads}, ranks={self.ranks})"
