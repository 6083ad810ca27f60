"""Symmetric memory of GPUs: buffers that every rank of a group can address.

``comm="symmetric"`` lets FSDP's collectives run on it through torch and NCCL (:func:`use_for_fsdp`).
:class:`PeerMemory` calls our own kernels (kernels/cuda/fsdp_tp_cuda.h) over it. :func:`enable_products` prepares a
tensor group for torch's products that overlap with their collectives (fsdp_tp/layers/fused.py).
"""

from __future__ import annotations

import warnings
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from fsdp_tp.comm.native import DTYPES, Functions

_LIBRARIES = Path(__file__).parents[1] / "_lib"
SUMMED = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels sum. The result is of the same dtype, of fp32, or, where the input is fp32, of bf16."""


class _Group(Structure):
    """fsdp_tp_cuda_group"""

    _fields_ = [
        ("buffers", c_void_p),
        ("signals", c_void_p),
        ("signal_words", c_size_t),
        ("rank", c_int),
        ("world", c_int),
        ("max_blocks", c_int),
        ("timeout", c_double),
        ("report", c_void_p),
    ]


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "signal_words": (c_size_t, [c_int, c_int]),
    "all_gather": (c_int, [POINTER(_Group), c_void_p, c_size_t, c_size_t, c_void_p]),
    "reduce_scatter": (
        c_int,
        [POINTER(_Group), c_void_p, c_int, c_size_t, c_size_t, c_int, c_float, c_void_p],
    ),
    "all_reduce": (
        c_int,
        [POINTER(_Group), c_void_p, c_int, c_void_p, c_size_t, c_size_t, c_int, c_float, c_void_p],
    ),
    "available": (c_int, []),
    "error": (c_char_p, [c_int]),
}


class Kernels(Functions):
    """``kernels.signal_words(world, blocks)``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "fsdp_tp_cuda_", _FUNCTIONS)

    def sentence(self, status: int) -> str:
        return str(self.error(status).decode())


@cache
def load() -> Kernels | str:
    """The kernels, or a sentence that says why there are none."""
    path = _LIBRARIES / "libfsdp_tp_cuda.so"
    if not path.exists():
        recorded = _LIBRARIES / "unavailable_cuda.txt"  # setup.py wrote it
        reason = recorded.read_text().strip() if recorded.exists() else f"{path} is missing"
        return f"the CUDA kernels are not built: {reason}"
    try:
        return Kernels(path)
    except (OSError, AttributeError) as error:
        return f"the CUDA kernels cannot be used: {error}"


class PeerMemory:
    """A buffer on each rank that all ranks read, and the collectives over it.

    All ranks call the same ones in the same order. A call launches a kernel on the current stream; what that stream
    wrote into the buffer before is what others see, and it may be overwritten afterwards. Sums are of fp32, in the
    order of ranks.

    Args:
        buffers, signals: addresses of device memory with one pointer a rank: to the buffers, aligned to 16 bytes, and
            to signal pads of ``signal_bytes`` each, which are zero and nobody else's.
        timeout: seconds a kernel waits for the other ranks. A later call then raises.
        max_blocks: of a kernel, the same on all ranks; 0: as many as are of use.
    """

    def __init__(
        self,
        kernels: Kernels,
        *,
        buffers: int,
        signals: int,
        signal_bytes: int,
        rank: int,
        world: int,
        device: torch.device,
        timeout: float,
        max_blocks: int = 0,
    ) -> None:
        self.rank, self.world, self.device = rank, world, device
        self._kernels = kernels
        self._report = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._group = _Group(
            buffers, signals, signal_bytes // 4, rank, world, max_blocks, timeout, self._report.data_ptr()
        )

    def all_gather(self, out: Tensor, *, size: int, offset: int = 0) -> None:
        """``out``, ``size * world`` bytes: the ``size`` bytes at ``offset`` of every rank's buffer."""
        self._check_out(out, size * self.world / out.itemsize)
        self._call("all_gather", out.data_ptr(), offset, size)

    def reduce_scatter(self, out: Tensor, *, dtype: torch.dtype, offset: int = 0, scale: float = 1.0) -> None:
        """``out``: ``scale`` times the sum over ranks of elements [rank * n, (rank + 1) * n) of their buffers,
        n = ``out.numel()``, whose elements are of ``dtype`` and begin at ``offset`` bytes."""
        self._check_out(out, out.numel(), dtype)
        self._call(
            "reduce_scatter", out.data_ptr(), DTYPES[out.dtype], offset, out.numel(), DTYPES[dtype], scale
        )  # fmt: skip

    def all_reduce(
        self,
        out: Tensor,
        input: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        offset: int = 0,
        scale: float = 1.0,
    ) -> None:
        """``out``: ``scale`` times the sum over ranks of the first elements of their buffers, from ``offset`` on.

        ``input``, if given, is copied there first and may be ``out``; else the elements are of ``dtype`` (default:
        that of ``out``). Every rank reads everything: for small messages.
        """
        dtype = input.dtype if input is not None else dtype or out.dtype
        self._check_out(out, out.numel() if input is None else input.numel(), dtype)
        if input is not None and not input.is_contiguous():
            raise ValueError(f"input of strides {input.stride()} must be contiguous")
        start = None if input is None else input.data_ptr()
        self._call(
            "all_reduce", out.data_ptr(), DTYPES[out.dtype], start, offset, out.numel(), DTYPES[dtype], scale
        )  # fmt: skip

    def raise_if_failed(self) -> None:
        """Raises if a kernel that has run waited in vain for a rank."""
        if late := int(self._report.item()):
            raise dist.DistBackendError(
                f"rank {late - 1} of {self.world} did not come to a collective within {self._group.timeout:g} s"
            )

    def _check_out(self, out: Tensor, numel: float, dtype: torch.dtype | None = None) -> None:
        if not out.is_contiguous() or out.numel() != numel or out.device.type != self.device.type:
            raise ValueError(
                f"out of {out.numel()} elements on {out.device} must be contiguous, of {numel:g} elements, "
                f"on {self.device}"
            )
        if dtype is None:
            return
        legal = (dtype, torch.float32, torch.bfloat16) if dtype == torch.float32 else (dtype, torch.float32)
        if dtype not in SUMMED or out.dtype not in legal:
            raise ValueError(
                f"sums of {dtype} as {out.dtype}: legal are sums of {', '.join(map(str, SUMMED))} as the same dtype "
                "or as torch.float32, and of torch.float32 as torch.bfloat16"
            )

    def _call(self, name: str, *arguments: Any) -> None:
        self.raise_if_failed()
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else None
        status = getattr(self._kernels, name)(byref(self._group), *arguments, stream)
        if status != 0:
            raise RuntimeError(f"{name} on symmetric memory: {self._kernels.sentence(status)}")


class SymmetricBuffer(PeerMemory):
    """:class:`PeerMemory` of torch's symmetric memory: ``tensor`` is this rank's buffer, bytes."""

    tensor: Tensor

    @classmethod
    def of(cls, group: dist.ProcessGroup, size: int, *, timeout: float = 600.0) -> Self:
        """All ranks of ``group`` call it together, with the same ``size`` in bytes, on their current GPUs.

        Raises:
            RuntimeError: the kernels are not built, or the GPUs cannot read each other's memory.
        """
        kernels = load()
        if isinstance(kernels, str):
            raise RuntimeError(kernels)
        device = torch.device("cuda", torch.cuda.current_device())
        # An allocation of its own, and so a signal pad of its own: torch's barriers count otherwise than our kernels.
        tensor = symm_mem._SymmetricMemory.empty_strided_p2p((size,), [1], torch.uint8, device)
        handle = symm_mem.rendezvous(tensor, group.group_name)
        handle.get_signal_pad(handle.rank, (handle.signal_pad_size // 4,), torch.int32).zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group)
        return cls._over(handle, tensor, kernels, timeout)

    @classmethod
    def _over(cls, handle: Any, tensor: Tensor, kernels: Kernels, timeout: float) -> Self:
        buffer = cls(
            kernels,
            buffers=handle.buffer_ptrs_dev,
            signals=handle.signal_pad_ptrs_dev,
            signal_bytes=handle.signal_pad_size,
            rank=handle.rank,
            world=handle.world_size,
            device=tensor.device,
            timeout=timeout,
        )
        buffer.tensor, buffer._handle = tensor, handle
        return buffer

    _handle: Any


def use_for_fsdp(module: Any, param_groups: list[Any]) -> str | None:
    """Lets torch allocate what FSDP gathers and reduces in NCCL's symmetric memory; or says why it cannot.

    All ranks call it together. Before, FSDP must have been told to divide gradients itself (``reduce_by_sums``): NCCL's
    symmetric reduce-scatter only sums.
    """
    for param_group in param_groups:
        if (device := param_group.device.type) != "cuda":
            return f"symmetric memory is that of GPUs, and the parameters are on {device}"
        if not isinstance(param_group.mesh_info, FSDPMeshInfo):
            return "nothing is sharded"
        if (backend := dist.get_backend(param_group.mesh_info.shard_process_group)) != "nccl":
            return f"torch gathers in symmetric memory with NCCL, and the process group's backend is {backend!r}"
    if not hasattr(module, "set_symm_mem_for_comm"):
        return f"torch {torch.__version__} has no FSDPModule.set_symm_mem_for_comm"
    module.set_symm_mem_for_comm()
    return None


def enable_products(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Enables symmetric memory for a tensor group, after a trial; or says why it cannot. All its ranks call it
    together."""
    if device.type != "cuda":
        return f"symmetric memory is that of GPUs, and the model is on {device.type}"
    problem = None
    try:
        symm_mem.get_symm_mem_workspace(group.group_name, min_size=1 << 20)
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
    problems: list[str | None] = [None] * group.size()
    dist.all_gather_object(problems, problem, group=group)
    for rank, each in enumerate(problems):
        if each is not None:
            return f"rank {rank} of the tensor group has no symmetric memory: {each}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer torch needs no enabling, but asks what is enabled
        symm_mem.enable_symm_mem_for_group(group.group_name)
    return None
