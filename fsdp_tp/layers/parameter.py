"""Parameters on the tensor axis: DTensors outside ``forward``, plain local tensors inside."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fsdp_tp.comm.functional import chunk_of
from fsdp_tp.mesh import ParallelMesh
from fsdp_tp.modules import is_conv1d

Layer = TypeVar("Layer", bound=nn.Module)


def tensor_axis(mesh: ParallelMesh | DeviceMesh) -> DeviceMesh:
    """The 1-D tensor axis of ``mesh``: a ParallelMesh, or a DeviceMesh that has or is that axis."""
    if isinstance(mesh, ParallelMesh):
        return mesh.tensor
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim == 1:
            return mesh
        if mesh.mesh_dim_names and "tensor" in mesh.mesh_dim_names:
            return mesh["tensor"]
    raise ValueError(f"mesh={mesh!r} must be a ParallelMesh or a DeviceMesh with an axis named 'tensor'")


def place_parameter(parameter: Tensor, placement: Placement, axis: DeviceMesh) -> nn.Parameter:
    """This rank's part of ``parameter``, which all ranks of ``axis`` hold whole, as a DTensor.

    Needs no communication. Keeps dtype and ``requires_grad``; copies, so that the whole
    tensor can be freed. With one rank on the axis the result is a plain copy.
    """
    whole = parameter.detach()
    if axis.size() == 1:
        return nn.Parameter(whole.clone(), requires_grad=parameter.requires_grad)
    dtensor = from_local(
        split_by([placement], whole, axis).clone(memory_format=torch.contiguous_format), axis, [placement], whole
    )
    return nn.Parameter(dtensor, requires_grad=parameter.requires_grad)


def own_part(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of ``whole``, a tensor placed as ``parameter``. No communication."""
    return split_by(parameter.placements, whole, parameter.device_mesh) if isinstance(parameter, DTensor) else whole


def own_slices(parameter: Tensor) -> tuple[slice, ...]:
    """Where in all of ``parameter`` this rank's part is. No communication."""
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    return slices_at(coordinate, parameter.placements, parameter.shape, parameter.device_mesh)


def split_by(placements: Sequence[Placement], whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's part of ``whole``, as DTensor cuts: the last ranks of an axis may have less, or nothing."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return whole[slices_at(coordinate, placements, whole.shape, mesh)]


def slices_at(
    coordinate: Sequence[int], placements: Sequence[Placement], shape: torch.Size, mesh: DeviceMesh
) -> tuple[slice, ...]:
    """Where in the whole the part of the rank at ``coordinate`` of ``mesh`` is.

    The tensor axis comes last in a mesh but splits first: FSDP shards what it left.
    """
    starts, lengths = [0] * len(shape), list(shape)
    for axis in reversed(range(mesh.ndim)):
        placement = placements[axis]
        if not placement.is_replicate():
            dim: int = placement.dim  # type: ignore[attr-defined]
            start, lengths[dim] = chunk_of(lengths[dim], mesh.size(axis), coordinate[axis])
            starts[dim] += start
    return tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))


def from_local(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], whole: Tensor) -> DTensor:
    """A DTensor of the shape of ``whole`` from this rank's part. No communication."""
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def is_fsdp_sharded(parameter: Tensor) -> bool:
    """Whether ``parameter`` is in FSDP's sharded state (and not gathered for a forward)."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any("shard" in name or "replicate" in name for name in names)


def to_local(parameter: Tensor) -> Tensor:
    """The local tensor to compute with. Its gradient has the placements of the parameter.

    A replicated parameter therefore needs an equal gradient on every rank; where each rank
    applies it to its own slice, pass the result through :func:`fsdp_tp.regions.sum_gradients`.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if is_fsdp_sharded(parameter):
        raise RuntimeError(
            "a parameter is still sharded by FSDP: it is gathered for the forward of its FSDP module only. "
            "To call another method, register it with fsdp_tp.register_forward_method"
        )
    return parameter.to_local(grad_placements=parameter.placements)


def _computes_as_linear(module: nn.Module) -> bool:
    """Whether it is of another class whose forward is that of ``nn.Linear``, the weight perhaps transposed."""
    cls = type(module)
    falcon = ("transformers.models.falcon.modeling_falcon", "FalconLinear")
    return is_conv1d(module) or (cls.__module__, cls.__name__) == falcon


def shell_of(cls: type[Layer], original: nn.Module, expected: type[nn.Module]) -> Layer:
    """A module of class ``cls`` with the attributes, hooks, mode and parameters of ``original``.

    Raises:
        ValueError: ``original`` is of another class than ``expected``, subclasses included:
            their forward may differ.
    """
    if type(original) is not expected and not _computes_as_linear(original):
        raise ValueError(f"{cls.__name__} takes the place of nn.{expected.__name__}, not of {type(original).__name__}")
    layer = cls.__new__(cls)
    for name, value in original.__dict__.items():
        layer.__dict__[name] = copy.copy(value) if isinstance(value, dict | set) else value  # tables of hooks and such
    return layer
