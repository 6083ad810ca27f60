"""The kernels library (kernels/shm/fsdp_tp_shm.h) as Python sees it: its functions, and memory of it as tensors."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping
from ctypes import POINTER, c_char_p, c_double, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# enum fsdp_tp_dtype, and what of enum fsdp_tp_op is used here.
DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int32: 4,
    torch.int64: 5,
}
SUM, AVG = 0, 1
MEMFD, NAMED = 0, 1  # enum fsdp_tp_segment_kind

_PATH = Path(__file__).parents[1] / "_lib" / "libfsdp_tp_shm.so"
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "host": (c_size_t, [c_char_p, c_size_t]),
    "segment_create": (c_int, [c_size_t, c_int, POINTER(c_void_p)]),
    "segment_attach": (c_int, [c_char_p, POINTER(c_void_p)]),
    "segment_handle": (c_char_p, [c_void_p]),
    "segment_data": (c_void_p, [c_void_p]),
    "segment_unlink": (None, [c_void_p]),
    "segment_close": (None, [c_void_p]),
    "last_error": (c_char_p, []),
    "alloc": (c_void_p, [c_size_t]),
    "free": (None, [c_void_p]),
    "trim": (None, []),
    "group_bytes": (c_size_t, [c_int]),
    "group_join": (c_int, [c_void_p, c_int, c_int, c_double, POINTER(c_void_p), c_char_p, c_size_t]),
    "group_leave": (None, [c_void_p]),
    "group_error": (c_char_p, [c_void_p]),
    "group_map": (c_int, [c_void_p, c_size_t, POINTER(c_void_p)]),
    "barrier": (c_int, [c_void_p]),
    "all_gather": (c_int, [c_void_p, POINTER(c_void_p), c_void_p, c_size_t]),
    "reduce_scatter": (c_int, [c_void_p, c_void_p, c_int, POINTER(c_void_p), c_size_t, c_int, c_int, c_double]),
}


class Functions:
    """Those of a C library, without their common prefix."""

    def __init__(self, path: Path, prefix: str, declared: Mapping[str, tuple[Any, list[Any]]]) -> None:
        shared = ctypes.CDLL(str(path))
        self._prefix = prefix
        for name, (result, arguments) in declared.items():
            function = getattr(shared, prefix + name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"{self._prefix}{name} is not declared in {type(self).__module__}")


class Library(Functions):
    """``library.barrier(group)``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "fsdp_tp_", _FUNCTIONS)

    def host_text(self) -> str:
        """Equal for processes that can share memory."""
        text = ctypes.create_string_buffer(512)
        self.host(text, len(text))
        return text.value.decode()


@cache
def load() -> Library | str:
    """The library, or a sentence that says why there is none."""
    if not _PATH.exists():
        return f"the kernels library is not built ({_PATH} is missing)"
    try:
        return Library(_PATH)
    except (OSError, AttributeError) as error:
        return f"the kernels library cannot be used: {error}"


class Memory:
    """A mapped segment. It stays mapped for as long as this object or a tensor of it lives."""

    def __init__(self, library: Library, segment: c_void_p, size: int) -> None:
        self.bytes = size
        self._address: int = library.segment_data(segment)
        weakref.finalize(self, library.segment_close, segment).atexit = False

    def tensor(self, dtype: torch.dtype, numel: int, offset: int = 0) -> tuple[Tensor, Any]:
        """1-D, from ``offset`` bytes on, with a storage of exactly its size; and what lives as long as that storage."""
        assert offset + numel * dtype.itemsize <= self.bytes
        return tensor_at(self._address + offset, dtype, numel, keep=self)


def tensor_at(address: int, dtype: torch.dtype, numel: int, keep: Any = None) -> tuple[Tensor, Any]:
    """A 1-D tensor over memory that ``keep`` owns, and the object that dies with the tensor's storage."""
    buffer: Any = (ctypes.c_char * max(numel * dtype.itemsize, 1)).from_address(address)
    buffer.keep = keep
    return torch.frombuffer(buffer, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype), buffer
