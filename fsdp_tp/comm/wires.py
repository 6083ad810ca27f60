"""Process groups on whose links values take fewer bytes than they have.

A wire is a property of a group: of its own group for the same ranks, beside that which other collectives use, so that
nothing but what is meant to is rounded.

``fp32_accumulate``: sums (reduce-scatter, all-reduce) travel as bf16, rounded to nearest even, and are added up in
fp32 by the rank that they are for; no sum travels along a ring and is rounded at each station. What is gathered stays
exact.

``int8``: sums and what is gathered travel as signed bytes, in blocks of 128 values that share an fp32 scale,
max |value| / 127 (1.03 bytes a value). One quantisation a value and journey: each is off by at most 1/254 of its
block's largest, and receivers add up in fp32. All ranks see the same: the rank that a shard comes from takes the
quantised values too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp_tp.comm.backend import NAME, register
from fsdp_tp.comm.native import load
from fsdp_tp.comm.shared_memory import timeout_of

_CODES = {"fp32_accumulate": 1, "int8": 2}  # enum fsdp_tp_wire
WIRES = tuple(_CODES)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ON_LINK = {
    "fp32_accumulate": "sums bf16 values in fp32",
    "int8": "quantises what it sends to int8",
}


def spans_hosts(group: dist.ProcessGroup) -> bool:
    """Whether its ranks are on several hosts. The first call for a group is made by all its ranks together."""
    backend = group._get_backend(torch.device("cpu"))
    if (hosts := getattr(backend, "hosts", None)) is not None:
        return len(hosts) > 1
    if (found := _spans.get(group)) is None:
        library = load()
        names: list[Any] = [None] * group.size()
        dist.all_gather_object(names, library if isinstance(library, str) else library.host_text(), group=group)
        found = _spans[group] = len(set(names)) > 1
    return found


@dataclass(frozen=True)
class Wire:
    """``everywhere``: between all ranks; else only between hosts, after exact sums inside each."""

    name: str
    everywhere: bool = False

    @property
    def code(self) -> int:
        return _CODES[self.name]


_groups: dict[tuple[str, Wire], dist.ProcessGroup] = {}
_spans: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()


def group_with_wire(group: dist.ProcessGroup, wire: Wire) -> dist.ProcessGroup:
    """A group of the same ranks on whose links ``wire`` is used; made by the first call, which all its ranks make
    together."""
    key = (group.group_name, wire)
    known = _groups.get(key)
    if known is None or known not in dist.distributed_c10d._world.pg_map:
        register()
        known = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=timeout_of(group),
            backend=NAME,
            pg_options=wire,
            use_local_synchronization=True,
            group_desc=f"{wire.name} wire",
        )
        _groups[key] = known
    return known


def use_wire(param_groups: list[Any], wire: str, only_between_hosts: bool) -> list[str]:
    """Replaces the groups over which a module communicates, where their ranks are on several hosts, by groups with a
    wire, and returns which: "shard" for gathers and reduce-scatters, "replicate" for all-reduces."""
    # Within a host fp32_accumulate has strategies of its own, that use its memory.
    everywhere = wire == "int8" and not only_between_hosts
    used = []
    for param_group in param_groups:
        info = param_group.mesh_info
        for kind in ("shard", "replicate"):
            group = getattr(info, f"{kind}_process_group", None)
            if group is None or group.size() == 1 or not (everywhere or spans_hosts(group)):
                continue
            if wire == "int8":
                _require_quantisable(param_group)
            setattr(info, f"{kind}_process_group", group_with_wire(group, Wire(wire, everywhere)))
            used += [kind] if kind not in used else []
    return used


def _require_quantisable(param_group: Any) -> None:
    policy = param_group.mp_policy
    gathered = {policy.param_dtype or param.sharded_param.dtype for param in param_group.fsdp_params}
    reduced = {policy.reduce_dtype} if policy.reduce_dtype else gathered
    for dtypes, what in ((gathered, "parameters are gathered"), (reduced, "gradients are reduced")):
        if not dtypes <= set(DTYPES) or len(dtypes) > 1:
            names = ", ".join(sorted(str(each) for each in dtypes))
            raise ValueError(
                f"comm='int8' quantises {', '.join(map(str, DTYPES))}, one of them a module, but {what} as {names}"
            )
