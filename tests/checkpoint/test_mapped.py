"""Mapped safetensors files against the library's own reader: fsdp_tp/checkpoint/mapped.py."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdp_tp.checkpoint.mapped import map_safetensors

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)


def _write(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def _entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"a": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


def test_every_dtype_and_shape_as_safetensors_reads_it(tmp_path):
    torch.manual_seed(0)
    tensors = {str(dtype): torch.randn(3, 5).to(dtype) for dtype in (*FLOATS, *FP8)}
    tensors |= {str(dtype): torch.randint(-100, 100, (7,)).to(dtype) for dtype in INTEGERS}
    tensors |= {
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "deep": torch.randn(2, 1, 3, 1),
    }
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    expected, found = load_file(tmp_path / "a.safetensors"), map_safetensors(tmp_path / "a.safetensors")
    assert found.keys() == expected.keys() == tensors.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        bytes_of = [each.flatten().view(torch.uint8) for each in (found[name].contiguous(), tensor)]
        assert torch.equal(*bytes_of), name


def test_bytes_that_are_not_aligned_to_the_dtype(tmp_path):
    values = torch.tensor([1.0, -2.0, 3.0])
    for padding in range(8):  # of the header, which is where the data begins
        data = b"\1" + values.numpy().tobytes()
        header = json.dumps(_entry(shape=(3,), offsets=(1, 13))).encode() + b" " * padding
        found = map_safetensors(_write(tmp_path / f"{padding}.safetensors", header, data))
        assert torch.equal(found["a"], values)


def test_what_is_written_to_a_tensor_stays_out_of_the_file(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(4)}, path)
    before = path.read_bytes()
    map_safetensors(path)["a"].zero_()
    assert path.read_bytes() == before


def _anonymous():
    """Bytes of this process that are no pages of a file."""
    with open("/proc/self/smaps_rollup") as file:
        return int(re.search(r"^Anonymous: +(\d+) kB", file.read(), re.MULTILINE)[1]) * 1024


def test_reading_takes_no_memory_but_that_of_the_file(tmp_path):
    size = 64 << 20
    save_file({"a": torch.ones(size // 4)}, tmp_path / "a.safetensors")
    before = _anonymous()
    found = map_safetensors(tmp_path / "a.safetensors")
    assert found["a"].sum() == size // 4
    assert _anonymous() - before < size // 8  # what the sum and the header took
    found["a"].add_(1)
    assert _anonymous() - before > size // 2, "this test would not see it if reading took memory"


@pytest.mark.parametrize(
    ("header", "data", "sentence"),
    [
        (b"{", b"", "not a safetensors file: its header cannot be read"),
        (b"\xff\xfe", b"", "not a safetensors file: its header cannot be read"),
        (b"[1]", b"", "not a safetensors file: its header cannot be read"),
        (b"[" * 100_000, b"", "not a safetensors file: its header cannot be read"),
        ({"a": 3}, b"", "a in .* has the entry 3"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"", "which is not one of a safetensors file"),
        (_entry(shape=(-2,)), b"12345678", "which is not one of a safetensors file"),
        (_entry(shape=(2.0,)), b"12345678", "which is not one of a safetensors file"),
        (_entry(offsets=(0, 4, 8)), b"12345678", "which is not one of a safetensors file"),
        (_entry(offsets=(-4, 4)), b"12345678", "which is not one of a safetensors file"),
        (_entry(dtype="F4"), b"1", "dtype='F4', which is none of F64, F32"),
        (_entry(shape=(3,)), b"12345678", r"has 8 bytes; its shape \[3\] in torch.float32 takes 12"),
        (_entry(offsets=(8, 0)), b"12345678", "has -8 bytes"),
        (_entry(), b"1234567", r"ends at byte \d+, the file at \d+: it is cut off"),
    ],
)
def test_damaged_files_are_errors_that_name_them(tmp_path, header, data, sentence):
    path = _write(tmp_path / "a.safetensors", header, data)
    with pytest.raises(ValueError, match=sentence) as caught:
        map_safetensors(path)
    assert str(path) in str(caught.value)


def test_a_file_cut_off_anywhere_is_an_error(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.int16)}, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=f"{re.escape(str(path))} is not a|: it is cut off"):
            map_safetensors(path)
