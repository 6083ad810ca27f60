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

from fsdp_tp.comm.backend import NAME, register, unavailable
from fsdp_tp.comm.hosts import hosts_of
from fsdp_tp.comm.shared_memory import timeout_of

_CODES = {"fp32_accumulate": 1, "int8": 2}  # enum fsdp_tp_wire
WIRES = tuple(_CODES)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ON_LINK = {
    "fp32_accumulate": "sums bf16 values in fp32",
    "int8": "quantises what it sends to int8",
}


@dataclass(frozen=True)
class Wire:
    """``everywhere``: between all ranks; else only between hosts, after exact sums inside each."""

    name: str
    everywhere: bool = False

    @property
    def code(self) -> int:
        return _CODES[self.name]


# By the group whose ranks they have. The values must not refer to the keys, or neither would ever go.
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[Wire, dist.ProcessGroup]] = WeakKeyDictionary()
_spans: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()


def group_with_wire(group: dist.ProcessGroup, wire: Wire) -> dist.ProcessGroup:
    """A group of the same ranks on whose links ``wire`` is used; made by the first call, which all its ranks make
    together."""
    made = _groups.setdefault(group, {})
    if wire not in made:
        register()
        made[wire] = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=timeout_of(group),
            backend=NAME,
            pg_options=wire,
            use_local_synchronization=True,
            group_desc=f"{wire.name} wire",
        )
    return made[wire]


def _spans_hosts(group: dist.ProcessGroup) -> bool:
    if group not in _spans:
        _spans[group] = len(set(hosts_of(group) or ())) > 1
    return _spans[group]


def with_wire(group: dist.ProcessGroup, comm: str) -> dist.ProcessGroup:
    """The group over which a module with this ``comm=`` communicates in place of ``group``: itself, where its values
    stay exact. All its ranks call it together."""
    name, _, only_between_hosts = comm.partition(":")
    if name not in WIRES or unavailable() or group.size() == 1:
        return group
    # Within a host fp32_accumulate has strategies of its own, that use its memory.
    everywhere = name == "int8" and not only_between_hosts
    return group_with_wire(group, Wire(name, everywhere)) if everywhere or _spans_hosts(group) else group


def use_wire(param_groups: list[Any], comm: str) -> list[str]:
    """Replaces the groups over which a module communicates by those of :func:`with_wire`, and returns which: "shard"
    for gathers and reduce-scatters, "replicate" for all-reduces."""
    used = []
    for param_group in param_groups:
        info = param_group.mesh_info
        for kind in ("shard", "replicate"):
            group = getattr(info, f"{kind}_process_group", None)
            if group is None or (wired := with_wire(group, comm)) is group:
                continue
            if comm.startswith("int8"):
                _require_quantisable(param_group)
            setattr(info, f"{kind}_process_group", wired)
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
