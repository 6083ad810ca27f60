"""A plan: how every part of a model joins the tensor axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_tp.layers.split import Split


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything by patterns of module paths (``"layers.*.attn.wq"``); ``*`` stands for one component.

    Users write ``styles`` alone, as a dict. The rest is for models whose shapes or code need more.
    """

    styles: Mapping[str, str]
    """See :data:`fsdp_tp.plans.STYLES`."""
    splits: Mapping[str, Split] = field(default_factory=dict)
    """Of column and row layers, where the features of a rank are not an even chunk."""
    parameters: Mapping[str, tuple[Split, int]] = field(default_factory=dict)
    """Single parameters of modules that keep their own forward and see this rank's part: split and dim."""
    shared_arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Besides the inputs of ``shared_input`` modules: arguments that nothing but column layers inside reads, whole on
    every rank."""
    own_heads: Mapping[str, tuple[tuple[str, ...], Any]] = field(default_factory=dict)
    """Arguments that hold something for every head, of which a rank needs that of its own: names, and indices."""
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What modules must find on this rank in place of what they have: ``num_heads``, ``config.num_heads``."""

    def __or__(self, other: Plan) -> Plan:
        """Both together."""
        return Plan(**{name: {**mine, **getattr(other, name)} for name, mine in vars(self).items()})
