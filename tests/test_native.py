"""The kernels library as installed. On a failure run the kernels' own tests first (make test, or ctest in build/)."""

import ctypes
from pathlib import Path

import pytest
import torch

import fsdp_tp

LIBRARY = Path(fsdp_tp.__file__).parent / "_lib" / "libfsdp_tp_shm.so"

# enum fsdp_tp_dtype in kernels/shm/reduce.h, and the type of the running sum.
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
SUM_DTYPES = {torch.float32: torch.float32, torch.float64: torch.float64, torch.bfloat16: torch.float32}
BITS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    if not LIBRARY.exists():
        pytest.fail(f"{LIBRARY} is missing; build it with `make setup` or `pip install -e . --no-build-isolation`")
    library = ctypes.CDLL(str(LIBRARY))
    library.fsdp_tp_reduce_sum.argtypes = [
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        ctypes.c_size_t,
        ctypes.c_int,
    ]
    library.fsdp_tp_reduce_sum.restype = ctypes.c_int
    return library


def reduce_sum(library: ctypes.CDLL, sources: list[torch.Tensor]) -> torch.Tensor:
    out = torch.empty_like(sources[0])
    pointers = (ctypes.c_void_p * len(sources))(*(source.data_ptr() for source in sources))
    status = library.fsdp_tp_reduce_sum(out.data_ptr(), pointers, len(sources), out.numel(), DTYPES[out.dtype])
    assert status == 0
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_sources", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 513, 100_003])
def test_sum_has_the_bits_of_a_sequential_torch_sum(
    library: ctypes.CDLL, dtype: torch.dtype, num_sources: int, count: int
) -> None:
    generator = torch.Generator().manual_seed(num_sources)
    shape = (num_sources, count)
    exponents = torch.randint(-12, 13, shape, generator=generator)
    values = torch.ldexp(torch.randn(shape, generator=generator, dtype=torch.float64), exponents)
    sources = list(values.to(dtype))

    expected = torch.zeros(count, dtype=SUM_DTYPES[dtype])
    for source in sources:
        expected += source.to(expected.dtype)

    out = reduce_sum(library, sources)
    assert torch.equal(out.view(BITS[dtype]), expected.to(dtype).view(BITS[dtype]))


def test_unknown_dtype_is_refused(library: ctypes.CDLL) -> None:
    assert library.fsdp_tp_reduce_sum(None, None, 1, 0, 99) == 1  # FSDP_TP_BAD_DTYPE
