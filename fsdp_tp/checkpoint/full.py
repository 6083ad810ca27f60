"""The whole state dict of a plain model, which one rank has, into the parts of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_tp.checkpoint.rank_0 import on_rank_0
from fsdp_tp.layers.canonical import arrangement_of, own_part_of, whole_shape
from fsdp_tp.layers.split import Split
from fsdp_tp.paths import join_path


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor] | None = None) -> None:
    """Loads the state dict of the plain model that rank 0 has into ``model``, in place; every rank must call it.

    Tensors travel one at a time, and each rank keeps its part: no rank but 0 needs memory for more than its
    parts and one whole tensor (two, of a weight that is stored in another order).

    Args:
        model: with memory for its parameters, in any layout.
        state_dict: rank 0's counts; the others' may be None. Names and shapes of the plain model, any dtype: the
            model keeps its own. Of tied parameters one name is enough.

    Raises:
        ValueError: on every rank, and nothing is loaded: parameters or persistent buffers are missing,
            unexpected, of another shape, or tied in ``model`` and different in ``state_dict``; parameters of
            ``model`` are on the meta device.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    entries = list(_entries(model).values())
    if on_meta := [entry.names[0] for entry in entries if entry.tensor.is_meta]:
        raise ValueError(f"on the meta device: {', '.join(on_meta[:5])}; fsdp_tp.wrap(model, mesh) gives them memory")
    keys = on_rank_0(lambda: _match(entries, state_dict))
    for entry, key in zip(entries, keys, strict=True):
        _load_one(entry, None if state_dict is None else state_dict.get(key))


def _load_one(entry: _Entry, source: Tensor | None) -> None:
    tensor = entry.tensor
    # Where the communication is: parameters may be offloaded.
    device = torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor.device
    if not dist.is_initialized() or dist.get_rank() == 0:
        assert source is not None
        whole = source.detach().to(device, tensor.dtype).contiguous()
    else:
        whole = torch.empty(entry.shape, dtype=tensor.dtype, device=device)
    if dist.is_initialized():
        dist.broadcast(whole.flatten().view(torch.uint8), src=0)  # gloo does not know every dtype
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.data
    local.copy_(own_part_of(whole, tensor, entry.arrangement))


@dataclass
class _Entry:
    names: list[str]
    """More than one if it is tied."""
    tensor: Tensor
    arrangement: tuple[Split, int] | None

    @property
    def shape(self) -> torch.Size:
        return whole_shape(self.tensor, self.arrangement)


def _entries(model: nn.Module) -> dict[int, _Entry]:
    """What a state dict of ``model`` holds, each tensor once."""
    entries: dict[int, _Entry] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in _own_tensors(module):
            entry = entries.setdefault(id(tensor), _Entry([], tensor, arrangement_of(module, name)))
            entry.names.append(join_path(path, name))
    return entries


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield name, tensor


def _match(entries: list[_Entry], state_dict: Mapping[str, Tensor] | None) -> list[str]:
    """Under which key of ``state_dict`` each entry is."""
    if state_dict is None:
        raise ValueError("state_dict=None on rank 0, which must have the whole one")
    known = {name for entry in entries for name in entry.names}
    found = [[name for name in entry.names if name in state_dict] for entry in entries]
    pairs = list(zip(entries, found, strict=True))
    problems = {
        "missing": [" or ".join(entry.names) for entry, keys in pairs if not keys],
        "unexpected": [key for key in state_dict if key not in known],
        "of another shape": [
            f"{key} is {tuple(state_dict[key].shape)} and must be {tuple(entry.shape)}"
            for entry, keys in pairs
            for key in keys
            if state_dict[key].shape != entry.shape
        ],
        "tied in the model and different here": [
            " and ".join(keys)
            for _, keys in pairs
            if any(not _are_same(state_dict[keys[0]], state_dict[other]) for other in keys[1:])
        ],
    }
    if sentences := [f"{problem}: {', '.join(where)}" for problem, where in problems.items() if where]:
        raise ValueError(f"the state dict is not one of this model; {'; '.join(sentences)}")
    return [keys[0] for keys in found]


def _are_same(one: Tensor, other: Tensor) -> bool:
    return one is other or torch.equal(one, other)
