"""The degrees of parallelism: what is legal, and how many ranks each mesh axis gets."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple


class MeshShape(NamedTuple):
    """Sizes of the five mesh axes, outermost first; the tensor axis varies fastest."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int

    @property
    def world_size(self) -> int:
        size = 1
        for axis_size in self:
            size *= axis_size
        return size

    def coordinate(self, rank: int) -> MeshShape:
        """The position of ``rank`` on each axis (row-major order)."""
        position = []
        for size in reversed(self):
            rank, index = divmod(rank, size)
            position.append(index)
        return MeshShape(*reversed(position))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Degrees of parallelism of one training job.

    The degrees need not multiply to the world size: the ranks that they leave over hold
    replicas of the model (see ``hybrid_shard_degree``).
    """

    tensor_parallel_degree: int = 1
    """Ranks that split every matrix product between them."""
    hybrid_shard_degree: int | Literal["auto"] = 0
    """Ranks that share one sharded copy of the parameters, counting the context axis.
    0 shards over all of them, 1 does not shard (plain replicas), n shards over n and
    replicates over the rest. "auto" is for the trainer: it times the mesh and chooses
    (:mod:`fsdp_tp.degree`)."""
    context_parallel_degree: int = 1
    """Ranks that split each sequence between them; lies inside the shard group."""
    pipeline_parallel_degree: int = 1
    """Ranks that split the model by depth."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "hybrid_shard_degree" and value == "auto":
                continue
            lowest = 0 if field.name == "hybrid_shard_degree" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise ValueError(f"{field.name}={value!r} must be an integer of at least {lowest}")

    def shape(self, world_size: int) -> MeshShape:
        """Axis sizes for a world of ``world_size`` ranks.

        Raises:
            ValueError: a degree does not divide what it has to divide; the message names
                the setting, its value and every legal value.
        """
        _check_divides(
            "tensor_parallel_degree", self.tensor_parallel_degree, world_size, f"the world of {world_size} ranks"
        )
        per_pipeline = world_size // self.tensor_parallel_degree
        _check_divides(
            "pipeline_parallel_degree",
            self.pipeline_parallel_degree,
            per_pipeline,
            f"world / tensor = {per_pipeline} ranks",
        )
        data = per_pipeline // self.pipeline_parallel_degree
        if self.hybrid_shard_degree == "auto":
            raise ValueError(
                "hybrid_shard_degree='auto' is chosen by the trainer, or by fsdp_tp.degree.measure and .choose for a "
                f"model; here legal values are {', '.join(map(str, [0, *divisors(data)]))}"
            )
        degree = self.hybrid_shard_degree or data
        _check_divides(
            "hybrid_shard_degree",
            degree,
            data,
            f"the world of {data} ranks" if data == world_size else f"world / (pipeline * tensor) = {data} ranks",
            zero_is_legal=True,
        )
        _check_divides(
            "context_parallel_degree",
            self.context_parallel_degree,
            degree,
            f"the {degree} ranks that hybrid_shard_degree={self.hybrid_shard_degree} shards over",
        )
        return MeshShape(
            pipeline=self.pipeline_parallel_degree,
            replicate=data // degree,
            shard=degree // self.context_parallel_degree,
            context=self.context_parallel_degree,
            tensor=self.tensor_parallel_degree,
        )


def divisors(number: int) -> list[int]:
    """All positive divisors of ``number``, ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _check_divides(name: str, value: int, whole: int, whole_name: str, *, zero_is_legal: bool = False) -> None:
    if whole % value:
        legal = ([0] if zero_is_legal else []) + divisors(whole)
        raise ValueError(f"{name}={value} does not divide {whole_name}; legal values: {', '.join(map(str, legal))}")
