"""The whole state dict of a plain model, which one rank has, into the parts of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

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
    entries = entries_of(model)

    def match() -> list[str]:
        if state_dict is None:
            raise ValueError("state_dict=None on rank 0, which must have the whole one")
        return match_entries(entries, state_dict, "the state dict")

    keys = on_rank_0(match)
    for entry, key in zip(entries, keys, strict=True):
        _load_one(entry, None if state_dict is None else state_dict.get(key))


def _load_one(entry: Entry, source: Tensor | None) -> None:
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
    entry.local.copy_(own_part_of(whole, tensor, entry.arrangement))


@dataclass
class Entry:
    """A tensor of a model's state dict."""

    names: list[str]
    """More than one if it is tied."""
    tensor: Tensor
    arrangement: tuple[Split, int] | None

    @property
    def shape(self) -> torch.Size:
        """In one process."""
        return whole_shape(self.tensor, self.arrangement)

    @property
    def local(self) -> Tensor:
        """This rank's values."""
        return self.tensor._local_tensor if isinstance(self.tensor, DTensor) else self.tensor.data


def entries_of(model: nn.Module) -> list[Entry]:
    """What a state dict of ``model`` holds, each tensor once and as FSDP shards it.

    Raises:
        ValueError: some of it is on the meta device.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    entries: dict[int, Entry] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in _own_tensors(module):
            entry = entries.setdefault(id(tensor), Entry([], tensor, arrangement_of(module, name)))
            entry.names.append(join_path(path, name))
    if on_meta := [entry.names[0] for entry in entries.values() if entry.tensor.is_meta]:
        raise ValueError(f"on the meta device: {', '.join(on_meta[:5])}; fsdp_tp.wrap(model, mesh) gives them memory")
    return list(entries.values())


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield name, tensor


class _HasShape(Protocol):
    @property
    def shape(self) -> torch.Size: ...


def match_entries(entries: list[Entry], given: Mapping[str, _HasShape], what: str) -> list[str]:
    """Under which key of ``given`` each entry is.

    Raises:
        ValueError: ``given``, which the sentence calls ``what``, does not fit; all that does not is listed.
    """
    known = {name for entry in entries for name in entry.names}
    found = [[name for name in entry.names if name in given] for entry in entries]
    pairs = list(zip(entries, found, strict=True))
    problems = {
        "missing": [" or ".join(entry.names) for entry, keys in pairs if not keys],
        "unexpected": [key for key in given if key not in known],
        "of another shape": [
            f"{key} is {tuple(given[key].shape)} and must be {tuple(entry.shape)}"
            for entry, keys in pairs
            for key in keys
            if given[key].shape != entry.shape
        ],
        "tied in the model and different here": [
            " and ".join(keys)
            for _, keys in pairs
            if any(not _are_same(given[keys[0]], given[other]) for other in keys[1:])
        ],
    }
    if sentences := [f"{problem}: {', '.join(where)}" for problem, where in problems.items() if where]:
        raise ValueError(f"{what} is not one of this model; {'; '.join(sentences)}")
    return [keys[0] for keys in found]


def _are_same(one: _HasShape, other: _HasShape) -> bool:
    return one is other or (isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other))
