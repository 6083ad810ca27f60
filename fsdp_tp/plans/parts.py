"""Parts that the plans of several families have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fsdp_tp.layers.heads import HeadLayout
from fsdp_tp.layers.split import Split
from fsdp_tp.modules import is_conv1d
from fsdp_tp.plans.plan import Plan

_COUNTS = {
    "num_heads": "heads",
    "num_attention_heads": "heads",
    "n_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "num_kv_heads": "kv_heads",
    "num_key_value_groups": "groups",
}
"""Attributes by which attention modules know how much they have of what."""


@dataclass(frozen=True)
class Heads:
    """The heads of one attention module, on ``rank``."""

    layout: HeadLayout
    head_dim: int
    rank: int

    @property
    def splits(self) -> tuple[Split, Split]:
        """Of query features, and of key or value features."""
        return self.layout.queries.blocks(self.head_dim), self.layout.kv.blocks(self.head_dim)

    @property
    def own(self) -> tuple[Tensor, int]:
        """Indices of this rank's query heads among all, and the number of all. A head of zeros may be any."""
        return self.layout.queries.rows[self.rank].clamp(min=0), self.layout.num_heads

    def attention(
        self,
        path: str,
        module: nn.Module,
        columns: Sequence[str],
        row: str,
        *,
        fused: str = "",
        counts: Mapping[str, str] | None = None,
    ) -> Plan:
        """The plan of the attention modules at ``path``, all like ``module``.

        Args:
            columns, fused: as in :class:`~fsdp_tp.plans.families.Family`.
            row: path of the output projection.
            counts: of further attributes of ``module``.
        """
        queries, kv = self.splits
        splits = [queries, kv, kv]
        if fused:
            interleaved = fused == "interleaved"
            splits = [self.layout.interleaved.blocks(self.head_dim) if interleaved else Split.packed(splits)]
        styles = {path: "shared_input", row: "row"} | {f"{path}.{name}": "column" for name in columns}
        by_path = {f"{path}.{name}": split for name, split in zip(columns, splits, strict=True)}
        return Plan(
            styles=styles, splits={row: queries} | by_path, attributes={path: self._counts(module, counts or {})}
        )

    def _counts(self, module: nn.Module, further: Mapping[str, str]) -> dict[str, int]:
        """What ``module`` must take for its numbers of heads on this rank."""
        values = {
            "heads": self.layout.num_local_heads(self.rank),
            "kv_heads": self.layout.num_local_kv_heads(self.rank),
            "groups": self.layout.num_local_groups(self.rank),
            "features": self.layout.num_local_heads(self.rank) * self.head_dim,
        }
        usual = {name: values[count] for name, count in _COUNTS.items() if hasattr(module, name)}
        return usual | {name: values[count] for name, count in further.items()}


def expert_parts(path: str, experts: Any, ranks: int) -> dict[str, tuple[Split, int]]:
    """The parameters of a module of style ``experts``: every expert's width is split."""
    width = Split.even(experts.down_proj.shape[-1], ranks)
    return {f"{path}.gate_up_proj": (Split.packed([width, width]), 1), f"{path}.down_proj": (width, 2)}


def in_features(linear: Any) -> int:
    """Of an ``nn.Linear``, or of transformers' ``Conv1D``, which stores its weight the other way round."""
    size: int = linear.weight.shape[0] if is_conv1d(linear) else linear.in_features
    return size


def path_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(path for path, module in model.named_modules() if module is wanted)
