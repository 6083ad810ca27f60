"""Which ranks of a process group share a host."""

from __future__ import annotations

import torch.distributed as dist

from fsdp_tp.comm.native import load


def hosts_of(group: dist.ProcessGroup) -> list[int] | None:
    """The host of each rank, as a number: ranks with equal numbers can share memory. None where some rank cannot tell,
    for want of the kernels library. All ranks of the group call it together.

    Hosts are counted in the order of their first ranks.
    """
    library = load()
    names: list[str | None] = [None] * group.size()
    dist.all_gather_object(names, None if isinstance(library, str) else library.host_text(), group=group)
    if None in names:
        return None
    order = list(dict.fromkeys(names))
    return [order.index(name) for name in names]
