"""ParallelMesh: one world of ranks with five named axes."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from datetime import timedelta
from functools import cache, cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_tp.comm.backend import backend_of, cpu_backend
from fsdp_tp.comm.hosts import hosts_of
from fsdp_tp.comm.shared_memory import timeout_of
from fsdp_tp.config import MeshShape, ParallelConfig, divisors

_DESCRIBED_RANKS = 64

logger = logging.getLogger("fsdp_tp")


class ParallelMesh:
    """The ranks of a training job, arranged on the axes
    ``(pipeline, replicate, shard, context, tensor)``; all five always exist.

    Build it with :func:`init_mesh`. It owns no process group: they belong to
    ``device_mesh``, and whoever needs one is handed the mesh.
    """

    def __init__(self, device_mesh: DeviceMesh, *, backend: str | None = None) -> None:
        if device_mesh.mesh_dim_names != MeshShape._fields:
            raise ValueError(
                f"a ParallelMesh has the axes {', '.join(MeshShape._fields)}, not {device_mesh.mesh_dim_names}"
            )
        self.device_mesh = device_mesh
        self._backend = backend  # of groups that are still to be made; None: that of the default group
        self.shape = MeshShape(*device_mesh.mesh.shape)
        self._hosts: list[int] | None = None  # of each rank, as a number; None: not known

    @property
    def device_type(self) -> str:
        """``"cuda"`` or ``"cpu"``."""
        return self.device_mesh.device_type

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, torch.accelerator.current_device_index())

    @cached_property
    def coordinate(self) -> MeshShape:
        """This rank's position on each axis."""
        return self.shape.coordinate(self.device_mesh.get_rank())

    @cached_property
    def tensor(self) -> DeviceMesh:
        """The 1-D mesh over which this rank splits matrix products."""
        return self.device_mesh["tensor"]

    @cached_property
    def shard(self) -> DeviceMesh:
        """The 1-D mesh over which FSDP shards: the shard axis with the context axis folded in."""
        if self.shape.context == 1:
            return self.device_mesh["shard"]
        return self._flatten("shard", "context", name="shard_context")

    @cached_property
    def fsdp(self) -> DeviceMesh:
        """The 2-D mesh (replicate, shard) for FSDP; the context axis is folded into shard."""
        if self.shape.context == 1:
            return self.device_mesh["replicate", "shard"]
        return DeviceMesh._concatenate([self.device_mesh["replicate"], self.shard])

    @cached_property
    def data(self) -> DeviceMesh:
        """The 1-D mesh of ranks whose tokens add up to the global batch: replicate x shard x context."""
        return self._flatten("replicate", "shard", "context", name="data")

    def _flatten(self, *axes: str, name: str) -> DeviceMesh:
        return self.device_mesh[axes]._flatten(name, backend_override=self._backend)

    @property
    def tensor_rank(self) -> int:
        return self.coordinate.tensor

    @property
    def tensor_size(self) -> int:
        return self.shape.tensor

    @property
    def shard_size(self) -> int:
        """Size of the shard axis. FSDP shards over ``shard_size * context_size`` ranks."""
        return self.shape.shard

    @property
    def context_size(self) -> int:
        return self.shape.context

    @property
    def replicate_size(self) -> int:
        return self.shape.replicate

    @property
    def pipeline_size(self) -> int:
        return self.shape.pipeline

    @property
    def data_rank(self) -> int:
        """Which slice of the global batch this rank reads, of ``data_size`` slices."""
        return self.coordinate.replicate * self.shape.shard + self.coordinate.shard

    @property
    def data_size(self) -> int:
        return self.shape.replicate * self.shape.shard

    @property
    def ranks_on_this_host(self) -> int:
        """How many ranks of the world run on this rank's host; 1 where that is not known."""
        return self._hosts.count(self._hosts[dist.get_rank()]) if self._hosts else 1

    def describe(self) -> str:
        """A table of who is where, for humans. Needs no communication; any one rank may print it."""
        shape = self.shape
        lines = [
            f"{shape.world_size} ranks on {self.device_type}: "
            + " x ".join(f"{name} {size}" for name, size in zip(MeshShape._fields, shape, strict=True)),
            "  ".join(["rank", *(f"{name:>9}" for name in MeshShape._fields), "batch slice"]),
        ]
        for rank in range(min(shape.world_size, _DESCRIBED_RANKS)):
            at = shape.coordinate(rank)
            slice_of_batch = f"{at.replicate * shape.shard + at.shard} of {self.data_size}"
            lines.append("  ".join([f"{rank:>4}", *(f"{index:>9}" for index in at), f"{slice_of_batch:>11}"]))
        if shape.world_size > _DESCRIBED_RANKS:
            lines.append(f"... and so on to rank {shape.world_size - 1}; the tensor axis varies fastest")
        return "\n".join(lines)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in zip(MeshShape._fields, self.shape, strict=True))
        return f"ParallelMesh({sizes}, device_type={self.device_type!r})"


def init_mesh(
    *,
    tensor_parallel_degree: int = 1,
    hybrid_shard_degree: int = 0,
    context_parallel_degree: int = 1,
    pipeline_parallel_degree: int = 1,
    device_type: str | None = None,
    config: ParallelConfig | None = None,
    timeout: timedelta | None = None,
) -> ParallelMesh:
    """Arranges all ranks of the world on the five axes; every rank must call it.

    Starts the default process group if the script has not: from torchrun's environment,
    or, without one, a world of this single process, so that a script can be debugged
    with plain ``python``. On a CPU its backend is ``fsdp_tp_shm``, shared memory between
    processes of one host; where the script has started gloo, the groups of the mesh's axes
    are of that backend all the same. ``FSDP_TP_BACKEND=gloo`` in the environment prevents both.

    Args:
        tensor_parallel_degree, hybrid_shard_degree, context_parallel_degree,
        pipeline_parallel_degree: see :class:`ParallelConfig`.
        device_type: ``"cuda"`` or ``"cpu"``; by default CUDA where there is a device.
        config: the same degrees as one object, instead of the four arguments.
        timeout: after this long a collective that some rank does not join raises on the
            others; by default torch's own (30 minutes on a CPU, 10 on CUDA).

    Raises:
        ValueError: a degree does not divide the world; the message lists the legal values.
    """
    degrees = ParallelConfig(
        tensor_parallel_degree=tensor_parallel_degree,
        hybrid_shard_degree=hybrid_shard_degree,
        context_parallel_degree=context_parallel_degree,
        pipeline_parallel_degree=pipeline_parallel_degree,
    )
    if config is not None:
        if degrees != ParallelConfig():
            raise ValueError(f"pass the degrees either one by one or as config={config}, not both")
        degrees = config
    mesh = build_mesh(degrees, device_type=device_type, timeout=timeout)
    if dist.get_rank() == 0:
        if mesh.device_type == "cpu":
            _say_backends(mesh)
        if mesh._hosts is not None:
            _warn_of_crossings(degrees, mesh._hosts)
    return mesh


def build_mesh(
    degrees: ParallelConfig, *, device_type: str | None = None, timeout: timedelta | None = None
) -> ParallelMesh:
    """What :func:`init_mesh` does, without a word."""
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    _init_process_group_if_needed(device_type, timeout)
    shape = degrees.shape(dist.get_world_size())
    backend = _backend_of_axes(device_type)
    device_mesh = init_device_mesh(
        device_type,
        tuple(shape),
        mesh_dim_names=MeshShape._fields,
        backend_override={name: backend for name in MeshShape._fields} if backend else None,
    )
    mesh = ParallelMesh(device_mesh, backend=backend)
    # Making a group takes every rank: here all of them are.
    axes = [*(mesh.device_mesh[name] for name in MeshShape._fields), mesh.shard, mesh.data]
    groups = {axis.get_group() for axis in axes} | {dist.distributed_c10d._get_default_group()}
    if timeout is None and device_type == "cpu" and dist.get_backend() != "fake":
        # That which the script started with, also for the groups of axes.
        timeout = timeout_of(dist.distributed_c10d._get_default_group())
    if timeout is not None:
        for group in groups:
            for device in group._device_types:
                group._get_backend(device)._set_default_timeout(timeout)
    if dist.get_world_size() > 1 and dist.get_backend() != "fake":
        mesh._hosts = hosts_of(dist.distributed_c10d._get_default_group())
    return mesh


def _init_process_group_if_needed(device_type: str, timeout: timedelta | None) -> None:
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else cpu_backend()
    if device_type == "cuda" and (local_rank := int(os.environ.get("LOCAL_RANK", 0))) < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def _backend_of_axes(device_type: str) -> str | None:
    """The backend for the groups of a mesh, where the default group has a slower one than there is."""
    if device_type != "cpu" or dist.get_backend() != "gloo":
        return None
    backend = cpu_backend()
    return None if backend == "gloo" else backend


def _say_backends(mesh: ParallelMesh) -> None:
    """Logs, once, what the axes of more than one rank communicate over."""
    over: dict[str, list[str]] = {}
    for name, size in zip(MeshShape._fields, mesh.shape, strict=True):
        if size > 1:
            over.setdefault(backend_of(mesh.device_mesh[name].get_group()), []).append(name)
    for backend, axes in over.items():
        where = "on the CPU" if len(over) == 1 else f"of axis {', '.join(axes)}"
        memory = ""
        if backend == "fsdp_tp_shm":
            memory = " (shared memory" + (", gloo between hosts)" if len(set(mesh._hosts or ())) > 1 else ")")
        default = "" if dist.get_backend() == backend else f"; the default group is of {dist.get_backend()}"
        _log_once(f"collectives {where} go over {backend}{memory}{default}")


def _warn_of_crossings(degrees: ParallelConfig, hosts: list[int]) -> None:
    """Once for each of the degrees that makes groups span hosts where another one would not."""
    size = len(hosts)
    for name in ("tensor_parallel_degree", "hybrid_shard_degree"):
        asked = getattr(degrees, name)
        if asked > 1 and _crosses(degrees, name, hosts):
            better = [d for d in divisors(size) if d > 1 and _legal(degrees, name, d, size)]
            better = [d for d in better if not _crosses(replace(degrees, **{name: d}), name, hosts)]
            if better:
                _warn_once(
                    f"{name}={asked} makes groups of ranks that span hosts, whose links are slower than a host's "
                    f"memory; {name}={max(better)} does not"
                )


def _legal(degrees: ParallelConfig, name: str, degree: int, world_size: int) -> bool:
    try:
        replace(degrees, **{name: degree}).shape(world_size)
    except ValueError:
        return False
    return True


def _crosses(degrees: ParallelConfig, name: str, hosts: list[int]) -> bool:
    """Whether some group of the tensor axis, or of the shard axis with the context axis, is on several hosts."""
    shape = degrees.shape(len(hosts))
    grid = torch.tensor(hosts).reshape(tuple(shape))
    if name == "tensor_parallel_degree":
        groups = grid.reshape(-1, shape.tensor)
    else:
        groups = grid.permute(0, 1, 4, 2, 3).reshape(-1, shape.shard * shape.context)
    return bool((groups != groups[:, :1]).any())


@cache
def _log_once(message: str) -> None:
    logger.info(message)


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)
