"""Which hybrid shard degree communicates fastest on the mesh at hand: ``--hybrid-shard-degree auto``.

For every legal degree the collectives that FSDP runs over its groups are timed on the real ranks, all groups at once
since they share links: a small and a larger message each, through which T(bytes) = latency + bytes / bandwidth is laid
(Hockney's model). A step's communication is then the sum over the model's units, and the fastest degree whose
parameters, gradients and optimizer state fit into memory is chosen.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_tp.comm.choose import check_comm, communicates_in_place
from fsdp_tp.comm.wires import with_wire
from fsdp_tp.config import MeshShape, ParallelConfig, divisors
from fsdp_tp.mesh import ParallelMesh, build_mesh
from fsdp_tp.modules import find_blocks

# torch 2.13 has new names, and warns of those that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_SMALL, _LARGE = 64 << 10, 4 << 20  # bytes
_ROUNDS = 5
_AS_FAST = 1.1  # times the fastest; two degrees that send the same bytes were measured 5 to 7 % apart
_STATE_BYTES = 16  # a parameter in fp32, its gradient, and two moments of Adam


@dataclass(frozen=True)
class Unit:
    """A module that FSDP gathers as a whole: a block, or the rest of the model."""

    numel: int
    """Of this rank's parameters before FSDP shards them."""
    is_root: bool


@dataclass(frozen=True)
class Candidate:
    """What one degree costs a rank."""

    degree: int
    gather_seconds: float
    reduce_seconds: float
    """Reduce-scatters and all-reduces of gradients."""
    memory_bytes: int
    """Parameters, gradients and optimizer state, sharded, and the largest unit and its gradients, whole."""
    fits: bool

    @property
    def seconds(self) -> float:
        """Of communication in a step."""
        return self.gather_seconds + self.reduce_seconds


def units_of(model: nn.Module, tensor_parallel_degree: int = 1) -> list[Unit]:
    """The units into which :func:`fsdp_tp.wrap` cuts a model (which may be on the meta device); their sizes under
    tensor parallelism are rounded, as if it split all parameters."""
    blocks = list(find_blocks(model).values())
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    rest = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in inside)
    return [Unit(-(-size // tensor_parallel_degree), False) for size in sizes] + [
        Unit(-(-rest // tensor_parallel_degree), True)
    ]


def measure(
    parallel: ParallelConfig,
    units: Sequence[Unit],
    *,
    micro_batches: Callable[[int], int] = lambda data_size: 1,
    param_dtype: torch.dtype = torch.float32,
    comm: str = "auto",
    memory_bytes: int | None = None,
    timeout: timedelta | None = None,
) -> list[Candidate]:
    """Times every legal degree on the world; all ranks call it together and get the same. Seconds on a slow link.

    Args:
        parallel: the other degrees.
        micro_batches: of a step, by the number of data ranks; a ValueError says that this number does not do.
        param_dtype: in which parameters are gathered; gradients are reduced in fp32.
        comm: as for :func:`fsdp_tp.fully_shard`. Where parameters are shared in place, gathers cost only a barrier.
        memory_bytes: what a rank has; by default what is free now, the least over the ranks.

    Raises:
        ValueError: no degree is legal, or no such ``comm``.
    """
    check_comm(comm)
    shape = replace(parallel, hybrid_shard_degree=0)
    mesh = build_mesh(shape, timeout=timeout)
    data = mesh.shape.replicate * mesh.shape.shard * mesh.shape.context
    memory = _least(_free_bytes(mesh) if memory_bytes is None else memory_bytes)
    _discard(mesh)
    candidates, refusals = [], []
    for degree in divisors(data):
        try:
            config = replace(parallel, hybrid_shard_degree=degree)
            config.shape(dist.get_world_size())
            batches = micro_batches(data)
        except ValueError as refusal:
            refusals.append(str(refusal))
            continue
        mesh = build_mesh(config, timeout=timeout)
        candidates.append(_candidate(degree, mesh, units, batches, param_dtype, comm, memory))
        _discard(mesh)
    if not candidates:
        raise ValueError(f"hybrid_shard_degree='auto': no degree is legal: {refusals[0]}")
    return candidates


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest that fits. Of those that are as fast as can be told, the one that holds least, since it also updates
    least. The smallest, if none fits."""
    fitting = [each for each in candidates if each.fits]
    as_fast = _AS_FAST * min((each.seconds for each in fitting), default=0.0)
    fastest = [each for each in fitting if each.seconds <= as_fast]
    return min(fastest or candidates, key=lambda each: each.memory_bytes)


def describe(candidates: Sequence[Candidate], chosen: Candidate) -> str:
    """A table for humans."""
    lines = ["hybrid shard degree  gathers  reductions  a step  memory a rank"]
    for each in candidates:
        note = "  <- chosen" if each is chosen else ""
        if not each.fits:
            note = "  does not fit" + (", but nothing does" if each is chosen else "")
        times = (each.gather_seconds, each.reduce_seconds, each.seconds)
        gather, reduce, total = (_milliseconds(seconds) for seconds in times)
        memory = f"{each.memory_bytes / 2**20:,.0f} MiB"
        lines.append(f"{each.degree:>19}{gather:>9}{reduce:>12}{total:>8}{memory:>15}{note}")
    return "\n".join(lines)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"


def _candidate(
    degree: int,
    mesh: ParallelMesh,
    units: Sequence[Unit],
    micro_batches: int,
    param_dtype: torch.dtype,
    comm: str,
    memory: int,
) -> Candidate:
    axes = [mesh.shard.get_group(), mesh.device_mesh["replicate"].get_group()]
    # Wires are on CPUs.
    shard, replicate = (with_wire(group, comm) if mesh.device.type == "cpu" else group for group in axes)
    in_place = communicates_in_place(axes[0], comm)
    gather = _timing(mesh, "barrier" if in_place else "all_gather", shard, param_dtype)
    scatter, reduce = _timing(mesh, "reduce_scatter", shard), _timing(mesh, "all_reduce", replicate)
    for group, wired in zip(axes, (shard, replicate), strict=True):
        if wired is not group and group is not dist.group.WORLD:  # which keeps it, should it be chosen
            dist.destroy_process_group(wired)
    gathering = reducing = 0.0
    for unit in units:
        # The root stays whole from forward to backward; blocks are gathered for each.
        gathers = micro_batches * (1 if unit.is_root else 2)
        gathering += gathers * gather(unit.numel * param_dtype.itemsize)
        reducing += micro_batches * scatter(unit.numel * 4) + reduce(unit.numel * 4 // degree)
    total, largest = sum(unit.numel for unit in units), max(unit.numel for unit in units)
    whole = largest * (param_dtype.itemsize + 4) if degree > 1 else 0
    size = _STATE_BYTES * total // degree + whole
    # Ranks measure differently, and must choose alike.
    gathering, reducing = -_least(-gathering), -_least(-reducing)
    return Candidate(degree, gathering, reducing, size, size <= memory)


def _timing(
    mesh: ParallelMesh, op: str, group: dist.ProcessGroup, dtype: torch.dtype = torch.float32
) -> Callable[[int], float]:
    """Seconds of a collective by the bytes of its whole message."""
    ranks = group.size()
    if ranks == 1:
        return lambda size: 0.0
    seconds = []
    for size in (_SMALL, _LARGE):
        numel = size // dtype.itemsize // ranks * ranks
        whole = torch.zeros(numel, dtype=dtype, device=mesh.device)
        part = whole[: numel // ranks].clone()
        calls: dict[str, Callable[[], Any]] = {
            "barrier": partial(dist.barrier, group),
            "all_gather": partial(_all_gather, whole, part, group=group),
            "reduce_scatter": partial(_reduce_scatter, part, whole, group=group),
            "all_reduce": partial(dist.all_reduce, whole, group=group),
        }
        times = []
        for _ in range(_ROUNDS + 1):
            dist.barrier()
            began = time.perf_counter()
            calls[op]()
            if mesh.device.type != "cpu":
                torch.accelerator.synchronize()
            times.append(time.perf_counter() - began)
        seconds.append(statistics.median(times[1:]))
    small, large = seconds
    slope = max(0.0, large - small) / (_LARGE - _SMALL)
    return lambda size: max(0.0, small - slope * _SMALL) + slope * size


def _discard(mesh: ParallelMesh) -> None:
    """Ends the groups of a mesh that was only for measuring."""
    axes = [*(mesh.device_mesh[name] for name in MeshShape._fields), mesh.shard, mesh.data]
    for group in dict.fromkeys(axis.get_group() for axis in axes):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _free_bytes(mesh: ParallelMesh) -> int:
    """On the device, or a rank's share of what its host has."""
    if mesh.device.type == "cuda":
        return torch.cuda.mem_get_info()[0]
    with open("/proc/meminfo") as lines:
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    return free // mesh.ranks_on_this_host


def _least(value: float) -> Any:
    """Over all ranks; an int stays one."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return min(values)
