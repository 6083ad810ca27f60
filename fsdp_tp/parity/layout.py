"""How a job is laid out over processes, as one word of a command line."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from fsdp_tp.config import ParallelConfig

_AXES = ("tensor", "shard", "replicate")
_LATER = ("pipeline", "context")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the mesh axes, and the options that change how the same job is computed.

    ``Layout()`` is one process. ``Layout.parse("tensor=2,shard=2,sequence_parallel")`` reads the
    form that ``str(layout)`` writes.
    """

    tensor: int = 1
    shard: int = 1
    replicate: int = 1
    sequence_parallel: bool = False
    loss_parallel: bool = False
    activation_checkpointing: bool = False
    compile: bool = False
    micro_batches: int = 1
    """Gradient accumulation: parts that a rank computes its share of a global batch in."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not type(field.default) or (type(value) is int and value < 1):
                legal = "true or false" if isinstance(field.default, bool) else "an integer of at least 1"
                raise ValueError(f"layout: {field.name}={value!r} must be {legal}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError: an unknown word, or a size that is none."""
        values: dict[str, int | bool] = {}
        names = {field.name: field.default for field in fields(cls)}
        for part in filter(None, (part.strip() for part in text.replace("one process", "").split(","))):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if name in _LATER:
                raise ValueError(f"layout {text!r}: the {name} axis has no layers yet; legal axes: {', '.join(_AXES)}")
            if name not in names:
                raise ValueError(f"layout {text!r}: unknown {name!r}; legal: {', '.join(names)}")
            if name in values:
                raise ValueError(f"layout {text!r}: {name} is given twice")
            if isinstance(names[name], bool):
                if equals:
                    raise ValueError(f"layout {text!r}: {name} stands alone, without '={value}'")
                values[name] = True
            elif not value.isdigit() or int(value) < 1:
                raise ValueError(f"layout {text!r}: {name}={value} must be an integer of at least 1")
            else:
                values[name] = int(value)
        return cls(**values)  # type: ignore[arg-type]

    @property
    def world_size(self) -> int:
        return self.tensor * self.shard * self.replicate

    @property
    def data_size(self) -> int:
        """Ranks that read different rows of a global batch."""
        return self.shard * self.replicate

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(tensor_parallel_degree=self.tensor, hybrid_shard_degree=self.shard)

    def __str__(self) -> str:
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(field.name if value is True else f"{field.name}={value}")
        return ",".join(parts) or "one process"
