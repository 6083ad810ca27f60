"""Parameters on the tensor axis: DTensors outside ``forward``, plain local tensors inside."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from fsdp_tp.mesh import ParallelMesh

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


def split_size(name: str, size: int, axis: DeviceMesh) -> int:
    """``size / axis.size()``.

    Raises:
        ValueError: the axis does not divide ``size``.
    """
    if size % axis.size():
        raise ValueError(f"{name}={size} is not a multiple of the tensor axis, which has {axis.size()} ranks")
    return size // axis.size()


def place_parameter(parameter: torch.Tensor, placement: Placement, axis: DeviceMesh) -> nn.Parameter:
    """This rank's part of ``parameter``, which all ranks of ``axis`` hold whole, as a DTensor.

    Needs no communication. Keeps dtype and ``requires_grad``; copies, so that the whole
    tensor can be freed. With one rank on the axis the result is a plain copy.
    """
    whole = parameter.detach()
    if axis.size() == 1:
        return nn.Parameter(whole.clone(), requires_grad=parameter.requires_grad)
    local = whole
    if isinstance(placement, Shard):
        size = split_size(
            f"dim {placement.dim} of a parameter of shape {tuple(whole.shape)}", whole.shape[placement.dim], axis
        )
        local = whole.narrow(placement.dim, axis.get_local_rank() * size, size)
    local = local.clone(memory_format=torch.contiguous_format)
    dtensor = DTensor.from_local(local, axis, [placement], run_check=False, shape=whole.shape, stride=whole.stride())
    return nn.Parameter(dtensor, requires_grad=parameter.requires_grad)


def is_fsdp_sharded(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` is in FSDP's sharded state (and not gathered for a forward)."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any("shard" in name or "replicate" in name for name in names)


def to_local(parameter: torch.Tensor) -> torch.Tensor:
    """The local tensor to compute with. Its gradient has the placements of the parameter.

    A replicated parameter therefore needs an equal gradient on every rank; where each rank
    applies it to its own slice, pass the result through :func:`fsdp_tp.regions.sum_gradients`.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if is_fsdp_sharded(parameter):
        raise RuntimeError(
            "a parameter is still sharded by FSDP: it is gathered for the forward of its FSDP module only. "
            "To call another method, register it with torch.distributed.fsdp.register_fsdp_forward_method"
        )
    return parameter.to_local(grad_placements=parameter.placements)


def shell_of(cls: type[Layer], original: nn.Module, expected: type[nn.Module]) -> Layer:
    """A module of class ``cls`` with the attributes, hooks, mode and parameters of ``original``.

    Raises:
        ValueError: ``original`` is of another class than ``expected``, subclasses included:
            their forward may differ.
    """
    if type(original) is not expected:
        raise ValueError(f"{cls.__name__} takes the place of nn.{expected.__name__}, not of {type(original).__name__}")
    layer = cls.__new__(cls)
    for name, value in original.__dict__.items():
        layer.__dict__[name] = copy.copy(value) if isinstance(value, dict | set) else value  # tables of hooks and such
    return layer
