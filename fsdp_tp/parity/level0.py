"""Level 0: types instead of numbers, for worlds that do not exist."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_tp.initialize import materialize
from fsdp_tp.mesh import ParallelMesh
from fsdp_tp.parity import job as jobs
from fsdp_tp.parity import static
from fsdp_tp.parity.job import Job
from fsdp_tp.parity.layout import Layout
from fsdp_tp.parity.report import LevelReport, Result
from fsdp_tp.parity.workers import run_alone

_LARGE_WORLD = 2048
_MATERIALIZED = 10**9  # parameters, 4 GB in fp32


def check_types(job: Job, layouts: Sequence[Layout]) -> LevelReport:
    """Level 0: every layer and region type-checked on fake worlds of the layout's own size and
    of 2,048 ranks.

    Raises:
        ValueError: ``spmd_types`` is missing, or a layout does not fit the model.
    """
    made = LevelReport(level=0, reference="SPMD types")
    regions = Result("regions and collectives", 0)
    _judge_types(regions, run_alone(_region_findings))
    made.results.append(regions)
    for layout in layouts:
        result = Result(str(layout), 0)
        made.results.append(result)
        if layout.tensor == 1:
            result.sentence = "not checked: it has no tensor axis"
        elif job.wrap is not jobs.wrap:
            result.sentence = "not checked: it is wrapped by a function of yours"
        else:
            group = layout.tensor * layout.shard
            findings: dict[str, None] = {}
            for world_size in {layout.world_size, max(1, _LARGE_WORLD // group) * group}:
                # Alone: DTensor's caches would hand the second world the first one's meshes.
                findings |= dict.fromkeys(run_alone(_type_findings, job, layout, world_size))
            _judge_types(result, list(findings))
    return made


def _region_findings() -> list[str]:
    return [str(finding) for finding in static.check_regions()]


def _type_findings(job: Job, layout: Layout, world_size: int) -> list[str]:
    found = static.check(
        functools.partial(_build_for_types, job),
        job.batch(1),
        functools.partial(_typed_loss, job, layout),
        world_size=world_size,
        tensor_parallel_degree=layout.tensor,
        hybrid_shard_degree=layout.shard,
        sequence_parallel=layout.sequence_parallel,
        loss_parallel=layout.loss_parallel,
    )
    return [str(finding) for finding in found]


def _judge_types(result: Result, findings: Sequence[str]) -> None:
    result.verdict = "different" if findings else "equal"
    if findings:
        result.first_bad_module = findings[0].partition(":")[0]
        result.sentence = "; ".join(findings[:3])


def _build_for_types(job: Job) -> nn.Module:
    """Values do not matter, but some models read some: memory for them where there is enough."""
    model = job.build_model()
    if sum(parameter.numel() for parameter in model.parameters()) < _MATERIALIZED:
        materialize(model, torch.device("cpu"))
    return model


def _typed_loss(job: Job, layout: Layout, model: nn.Module, batch: Any, mesh: ParallelMesh) -> Tensor:
    return job.loss(model, batch, mesh, layout)
