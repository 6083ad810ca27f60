"""The kernels library as installed. On a failure run the kernels' own tests first (make test, or ctest in build/)."""

import ctypes
import functools
from pathlib import Path

import pytest
import torch

import fsdp_tp
from fsdp_tp.comm.native import DTYPES

LIBRARY = Path(fsdp_tp.__file__).parent / "_lib" / "libfsdp_tp_shm.so"

# enum fsdp_tp_op in kernels/shm/reduce.h.
SUM, AVG, MAX, MIN, PREMUL_SUM = range(5)
FACTOR = 0.3


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    if not LIBRARY.exists():
        pytest.fail(f"{LIBRARY} is missing; build it with `make setup` or `pip install -e . --no-build-isolation`")
    library = ctypes.CDLL(str(LIBRARY))
    library.fsdp_tp_reduce.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_double,
    ]
    library.fsdp_tp_cast.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    library.fsdp_tp_instruction_set.restype = ctypes.c_char_p
    return library


def computed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize == 2 else dtype


def reduce(library: ctypes.CDLL, sources: list[torch.Tensor], op: int) -> torch.Tensor:
    out = torch.empty_like(sources[0])
    dtype = DTYPES[out.dtype]
    pointers = (ctypes.c_void_p * len(sources))(*(source.data_ptr() for source in sources))
    assert library.fsdp_tp_reduce(out.data_ptr(), dtype, pointers, len(sources), out.numel(), dtype, op, FACTOR) == 0
    return out


def torch_reduce(sources: list[torch.Tensor], op: int) -> torch.Tensor:
    terms = [source.to(computed_in(source.dtype)) for source in sources]
    if op == PREMUL_SUM:
        terms = [FACTOR * term for term in terms]
    combine = {MAX: torch.maximum, MIN: torch.minimum}.get(op, torch.add)
    result = functools.reduce(combine, terms)
    return (result / len(sources) if op == AVG else result).to(sources[0].dtype)


def random_values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    exponents = torch.randint(-12, 13, shape, generator=generator)
    return torch.ldexp(torch.randn(shape, generator=generator, dtype=torch.float64), exponents).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (dtype, op)
        for dtype in DTYPES
        for op in (SUM, AVG, MAX, MIN, PREMUL_SUM)
        if dtype.is_floating_point or op in (SUM, MAX, MIN)
    ],
)
@pytest.mark.parametrize("num_sources", [1, 3, 8])
@pytest.mark.parametrize("count", [0, 513, 10_007])
def test_reduce_has_the_bits_of_torch_ops_in_sequence(
    library: ctypes.CDLL, dtype: torch.dtype, op: int, num_sources: int, count: int
) -> None:
    sources = list(random_values(dtype, num_sources, count))
    assert torch.equal(reduce(library, sources, op).view(torch.uint8), torch_reduce(sources, op).view(torch.uint8))


@pytest.mark.parametrize("op", [MAX, MIN])
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.is_floating_point])
def test_nan_wins_as_in_torch(library: ctypes.CDLL, dtype: torch.dtype, op: int) -> None:
    sources = random_values(dtype, 3, 100)
    for rank in range(3):
        sources[rank, rank * 10 : rank * 10 + 5] = float("nan")
    out, expected = reduce(library, list(sources), op), torch_reduce(list(sources), op)
    assert expected.isnan().sum() == 15
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_has_the_bits_of_torch(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    wide = random_values(torch.float32, 100_003)
    narrow, back = torch.empty_like(wide, dtype=dtype), torch.empty_like(wide)
    for out, source in [(narrow, wide), (back, narrow)]:
        assert (
            library.fsdp_tp_cast(
                out.data_ptr(), DTYPES[out.dtype], source.data_ptr(), DTYPES[source.dtype], out.numel()
            )
            == 0
        )
    assert torch.equal(narrow.view(torch.int16), wide.to(dtype).view(torch.int16))
    assert torch.equal(back, narrow.float())


def test_instruction_set_is_named(library: ctypes.CDLL) -> None:
    assert library.fsdp_tp_instruction_set() in (b"avx512", b"avx2", b"scalar")


def test_unknown_dtype_is_refused(library: ctypes.CDLL) -> None:
    assert library.fsdp_tp_reduce(None, 99, None, 1, 0, 99, SUM, 1) == 1  # FSDP_TP_BAD_DTYPE
