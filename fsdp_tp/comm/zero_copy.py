"""The ``zero_copy`` strategy: shards are slices of whole parameters that live in shared memory.

Every host of a shard group has one copy of its parameters. An all-gather moves nothing and only waits until all
ranks have written their shards; the unsharded parameter is a view of the whole one. In mixed precision the fp32
shards stay each rank's own, and the one copy is of 16 bits, into which each rank casts its shard.

Who writes while another rank still reads?

- An optimizer's step waits for all ranks, before and after (:func:`_meet`): a rank may still be in a
  forward or backward when another begins its step.
- Other writers (loading a state dict, swapping averaged weights in and back) come after a backward, whose
  last reduce-scatter no rank passes before the others have used all parameters; or after a forward without
  gradients, which ends with a barrier (choose.py). Only a write right after a forward with gradients and without a
  backward needs a barrier of its own.
- Nobody reads what others have not finished to write, since every all-gather is a barrier.
- A cast into the 16-bit copy is not protected itself: it changes nothing unless a shard has been written.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_tp.comm.shared import numel_of
from fsdp_tp.comm.shared_memory import SharedGroup

_ALIGNMENT = 64  # a cache line


class ZeroCopyAllGather(AllGather):
    """Of one parameter group of FSDP, whose parameters it keeps in shared memory.

    A parameter that is replaced later (``model.to(dtype)``, ``load_state_dict(assign=True)``, a meta parameter that
    gets memory) is copied into shared memory by :meth:`adopt`. Until then it goes through a shared output, as
    in the ``shared`` strategy.
    """

    def __init__(self, group: SharedGroup, param_group: Any) -> None:
        self.group = group
        self._param_group = param_group
        self._before: list[_BeforeAllGather] = []
        self._masters: list[Tensor] = []
        self._casts: list[Tensor] = []
        self._used_buffer = False

    @staticmethod
    def obstacle(param_group: Any) -> str | None:
        """Why the parameters of this group cannot live in shared memory, the same on all ranks."""
        for fsdp_param in param_group.fsdp_params:
            if fsdp_param.fsdp_placement.dim != 0:
                return "a parameter is sharded on another dim than 0, so that a shard is not one piece of the whole"
            if type(fsdp_param._sharded_local_tensor) is not torch.Tensor:
                return f"a parameter is a {type(fsdp_param._sharded_local_tensor).__name__}"
        return None

    @staticmethod
    def on_meta(param_group: Any) -> bool:
        return any(_registered(fsdp_param).is_meta for fsdp_param in param_group.fsdp_params)

    @torch.no_grad()
    def adopt(self) -> None:
        """Moves parameters into shared memory, unless they are there. All ranks of the group call it together."""
        fsdp_params = self._param_group.fsdp_params
        if not self._param_group.is_sharded or self._param_group._all_gather_result is not None or self._is_adopted():
            return
        if self.on_meta(self._param_group) or any(_has_gradient(each) for each in fsdp_params):
            return
        for fsdp_param in fsdp_params:
            fsdp_param.reset_sharded_param()  # FSDP learns only in its own time what has replaced a parameter
        dtypes = [_dtype_of(fsdp_param) for fsdp_param in fsdp_params]
        sizes = [
            _aligned(fsdp_param._sharded_param_data.numel() * dtype.itemsize * self.group.size)
            for fsdp_param, dtype in zip(fsdp_params, dtypes, strict=True)
        ]
        memory = self.group.map(sum(sizes))
        self._before, self._masters, self._casts = [], [], []
        start = 0
        for fsdp_param, dtype, size in zip(fsdp_params, dtypes, sizes, strict=True):
            own = fsdp_param._sharded_param_data
            whole, _ = memory.tensor(dtype, own.numel() * self.group.size, start)
            slot, _ = memory.tensor(dtype, own.numel(), start + self.group.rank * own.numel() * dtype.itemsize)
            start += size
            if dtype == own.dtype:
                _move(fsdp_param, slot)
            else:
                self._masters.append(own)
                self._casts.append(slot)
            self._attach(fsdp_param, whole)
        _watch_optimizers()

    def reshard(self) -> None:
        """Makes the next use of the parameters wait for what other ranks write until then."""
        if self._param_group.is_unsharded:
            self._param_group.reshard()

    def _attach(self, fsdp_param: Any, whole: Tensor) -> None:
        # FSDP needs at least one element to gather; the first parameter pretends to have one.
        inputs = () if self._before else (torch.zeros(1, dtype=whole.dtype),)
        local = fsdp_param._sharded_local_tensor
        local.fsdp_pre_all_gather = _BeforeAllGather(self.group, inputs)
        local.fsdp_post_all_gather = _AfterAllGather(whole)
        self._before.append(local.fsdp_pre_all_gather)
        fsdp_param._init_extensions()
        fsdp_param.all_gather_outputs = []
        if hasattr(fsdp_param, "_unsharded_param"):
            del fsdp_param._unsharded_param  # a view of other memory

    def _is_adopted(self) -> bool:
        return len(self._before) > 0 and all(
            getattr(_registered(fsdp_param)._local_tensor, "fsdp_pre_all_gather", None) is before
            for fsdp_param, before in zip(self._param_group.fsdp_params, self._before, strict=True)
        )

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        numel = numel_of(size)
        self._used_buffer = not self._is_adopted()
        if self._used_buffer:
            return self.group.buffers.take(self.group, numel, dtype)
        return torch.empty(numel, dtype=dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        if self._casts:
            torch._foreach_copy_(self._casts, self._masters)
        if self._used_buffer:
            self.group.buffers.rendezvous(self.group)
        else:
            self.group.barrier()


class _BeforeAllGather:
    """``fsdp_pre_all_gather`` of a parameter's local tensor: nothing to gather."""

    # FSDP reads the signature at each call.
    __signature__ = inspect.Signature([inspect.Parameter("mesh", inspect.Parameter.POSITIONAL_OR_KEYWORD)])

    def __init__(self, group: SharedGroup, inputs: tuple[Tensor, ...]) -> None:
        self.group, self._inputs = group, inputs

    def __call__(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        return self._inputs, None

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # copies of the tensor are ordinary memory


class _AfterAllGather:
    """``fsdp_post_all_gather``: the whole parameter is where it always is."""

    def __init__(self, whole: Tensor) -> None:
        self._whole = whole

    def __call__(
        self, outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        return (self._whole, ()) if out is None else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    return None


def _registered(fsdp_param: Any) -> Any:
    info = fsdp_param._module_info
    return info.module._parameters[info.param_name]


def _dtype_of(fsdp_param: Any) -> torch.dtype:
    """Of the unsharded parameter, as FSDP finds it in its init_dtype_attrs()."""
    dtype, asked = fsdp_param.sharded_param.dtype, fsdp_param.mp_policy.param_dtype
    return asked if asked is not None and dtype.is_floating_point else dtype


def _has_gradient(fsdp_param: Any) -> bool:
    unsharded = getattr(fsdp_param, "_unsharded_param", None)
    return fsdp_param.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None)


def _move(fsdp_param: Any, slot: Tensor) -> None:
    """Makes ``slot`` the shard's memory; the Parameter, which an optimizer may hold, stays the same object."""
    slot.copy_(fsdp_param._sharded_param_data)
    rows = fsdp_param._sharded_local_tensor.shape[0]
    fsdp_param._sharded_param_data = slot
    fsdp_param.sharded_param._local_tensor = slot.view(fsdp_param.padded_sharded_param_size).narrow(0, 0, rows)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


_watching: list[Any] = []


def _watch_optimizers() -> None:
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_meet))
        _watching.append(register_optimizer_step_post_hook(_meet))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _meet(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Waits for the ranks that share parameters of ``optimizer``: before its step until none reads them any more;
    after it because parameters that are still unsharded are read again without an all-gather."""
    for group in dict.fromkeys(_groups_of(optimizer)):
        group.barrier()


def _groups_of(optimizer: torch.optim.Optimizer) -> Iterator[SharedGroup]:
    for param_group in optimizer.param_groups:
        for parameter in param_group["params"]:
            if isinstance(parameter, DTensor):
                before = getattr(parameter._local_tensor, "fsdp_pre_all_gather", None)
                if isinstance(before, _BeforeAllGather):
                    yield before.group
