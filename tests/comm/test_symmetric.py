"""If these fail, look in fsdp_tp/comm/symmetric.py, fsdp_tp/layers/fused.py and kernels/cuda.

No GPU is needed: torch's fused operators are replaced by what they are equal to, and kernels are emulated
(kernels/tests/cuda_emulation.h). What only a GPU can show is in bench/cuda_check.py.
"""

import json
import logging
import subprocess
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import library, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

import fsdp_tp
from bench import cuda_check
from fsdp_tp.comm import choose, symmetric
from fsdp_tp.layers import ColumnParallelLinear, RowParallelLinear, fused
from tests.ranks import run

BOUND = 1e-12  # fp64's rounding (1e-16) times the number of terms of a sum here (some hundred), with room
ROOT = Path(__file__).parents[2]


# --- Products that overlap with their collectives -----------------------------------------------


@contextmanager
def _fused_on_cpu(calls):
    """torch's own definitions of its operators, which it registers for tensors without data only."""
    operators = library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):

        def counted(*args, _name=name, **kwargs):
            calls.append(_name)
            return getattr(symm_mem, f"_{_name}_fallback")(*args, **kwargs)

        operators.impl(name, counted, "CPU")
    devices, fused._DEVICES = fused._DEVICES, ("cpu",)
    try:
        with symm_mem._test_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of collectives under names that torch 2.11 has
            yield
    finally:
        fused._DEVICES = devices
        operators._destroy()


def _gradients(module, x, generator):
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(torch.randn(y.shape, dtype=y.dtype, generator=generator.manual_seed(dist.get_rank())))
    gradients = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    return [y.detach(), x.grad, *(g.to_local() if hasattr(g, "to_local") else g for g in gradients)]


def _compare(module, x, calls_expected, compiled=False):
    """Everything that a module computes, with fused operators and without."""
    generator, calls = torch.Generator(), []
    expected = _gradients(module, x, generator)
    with _fused_on_cpu(calls):
        torch._dynamo.reset()
        chosen = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
        actual = _gradients(chosen, x, generator)
    assert sorted(calls) == sorted(calls_expected), (module, calls)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=BOUND)


GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"


def _layers():
    world = dist.get_world_size()
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=world)
    torch.manual_seed(0)
    options = {"mesh": mesh, "sequence_parallel": True, "dtype": torch.float64}
    for rows in (1, 3):
        x = torch.randn(rows, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
        for bias in (False, True):
            for gather_output in (False, True):
                column = ColumnParallelLinear(24, 21, bias, gather_output=gather_output, **options)
                _compare(column, x, [GATHER, SCATTER])
            whole = torch.cat([x] * world, 1)[..., : 24 // world].contiguous()
            _compare(RowParallelLinear(24, 10, bias, **options), whole, [SCATTER, GATHER])
        for gated in (False, True):
            mlp = fsdp_tp.ParallelMLP(24, 30, gated=gated, bias=gated, **options)
            _compare(mlp, x, [GATHER, SCATTER] * 2, compiled=gated and (rows, world) == (3, 2))
        attention = fsdp_tp.ParallelAttention(24, 6, num_kv_heads=2, qk_norm=True, rotary_base=100.0, **options)
        _compare(attention, x, [GATHER, SCATTER] * 2)
    # What needs no gradient is not computed.
    frozen = ColumnParallelLinear(24, 21, **options).requires_grad_(False)
    _compare(nn.Sequential(frozen), x, [GATHER, SCATTER])
    with torch.no_grad(), _fused_on_cpu(calls := []):
        frozen(x)
    assert calls == [GATHER]


@pytest.mark.parametrize("tensor", [2, 4])
def test_fused_layers_equal_plain_ones(tensor):
    run(tensor, _layers)


@contextmanager
def _log():
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(f"{record.levelname} {record.getMessage()}")
    logger = logging.getLogger("fsdp_tp")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    fused._log_once.cache_clear()
    choose._say.cache_clear()
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _not_fused():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    options = {"mesh": mesh, "sequence_parallel": True, "dtype": torch.float64}
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    with _log() as said:
        _compare(RowParallelLinear(16, 4, **options), x, [])  # a sequence of 3
        _compare(ColumnParallelLinear(8, 4, **options), x.transpose(0, 1), [GATHER, SCATTER])
        with torch.autocast("cpu", torch.bfloat16):
            _compare(ColumnParallelLinear(8, 4, **options), x, [])
        mlp = fsdp_tp.ParallelMLP(8, 8, **options)
        mlp.up_proj.register_forward_hook(lambda module, args, output: seen.append(output.shape))
        seen = []
        _compare(mlp, x, [SCATTER, GATHER])  # of the row layer
        assert len(seen) == 2
    prefix = "INFO some tensor-parallel products do not overlap with their collectives: "
    assert dist.get_rank() > 0 or said == [
        prefix + "a sequence of 3 does not divide by 2",
        prefix + "autocast, or weights of another dtype than their input",
    ]
    # Without symmetric memory, or on another device, nothing is said or done.
    calls = []
    with _log() as said, _fused_on_cpu(calls), symm_mem._test_mode(set()):
        mlp(x)
    assert not calls
    assert not said


def test_what_does_not_fit_uses_plain_collectives_and_says_so_once():
    run(2, _not_fused)


# --- comm="symmetric" ---------------------------------------------------------------------------


def _on_cpu():
    why = "symmetric memory is that of GPUs, and the parameters are on cpu"
    with _log() as said:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for module in (*model, model):
            fsdp_tp.fully_shard(module, comm="symmetric")
        kind = type(model[0]._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm).__name__
    assert kind == "ZeroCopyAllGather"
    on_one_host = "the 2 ranks of the shard group share the memory of one host"
    warning = f"WARNING comm='symmetric' uses 'zero_copy': {why}; {on_one_host}"
    assert [line for line in said if "comm=" in line] == ([warning] if dist.get_rank() == 0 else [])


def test_on_a_cpu_symmetric_is_auto_with_one_warning():
    run(2, _on_cpu)


def _tensor_group_on_cpu():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with _log() as said:
        fsdp_tp.wrap(model, mesh, plan={"0": "column", "2": "row"}, comm="symmetric", sequence_parallel=True)
    assert dist.get_rank() > 0 or [line for line in said if "overlap" in line] == [
        "WARNING tensor-parallel products do not overlap with their collectives: symmetric memory is that of GPUs, and "
        "the model is on cpu"
    ]


def test_wrap_says_that_products_do_not_overlap():
    run(2, _tensor_group_on_cpu)


class _Module:
    def __init__(self):
        self.calls = 0

    def set_symm_mem_for_comm(self):
        self.calls += 1


def _param_group(device="cuda", mesh_info=FSDPMeshInfo):
    info = mesh_info.__new__(mesh_info)
    info.shard_process_group = "a group"
    return SimpleNamespace(device=torch.device(device), mesh_info=info)


def test_on_gpus_symmetric_is_torchs_own(monkeypatch):
    module = _Module()
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    assert symmetric.use_for_fsdp(module, [_param_group(), _param_group()]) is None
    assert module.calls == 1
    older = symmetric.use_for_fsdp(SimpleNamespace(), [_param_group()])
    assert older == f"torch {torch.__version__} has no FSDPModule.set_symm_mem_for_comm"
    assert symmetric.use_for_fsdp(module, [_param_group(mesh_info=SimpleNamespace)]) == "nothing is sharded"
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    assert "the process group's backend is 'gloo'" in symmetric.use_for_fsdp(module, [_param_group()])
    assert module.calls == 1


# --- Kernels ------------------------------------------------------------------------------------


def _peer_memory(kernels, size=64):
    """Of one rank, on the CPU."""
    memory = torch.zeros(size, dtype=torch.uint8)
    pad = torch.zeros(kernels.signal_words(1, 4), dtype=torch.int32)
    pointers = torch.tensor([[memory.data_ptr()], [pad.data_ptr()]])
    peers = symmetric.PeerMemory(
        kernels,
        buffers=pointers[0].data_ptr(),
        signals=pointers[1].data_ptr(),
        signal_bytes=pad.nbytes,
        rank=0,
        world=1,
        device=torch.device("cpu"),
        timeout=5,
    )
    peers.kept = memory, pad, pointers
    return peers


def _built():
    if isinstance(kernels := symmetric.load(), str):
        pytest.skip(kernels)
    return kernels


def test_the_library_loads_where_there_is_no_gpu_and_says_what_is_missing():
    kernels = _built()
    assert kernels.signal_words(8, 3) == 1 + 3 * 9
    assert kernels.sentence(34) == "the signal pads are too small"
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: bench/cuda_check.py shows more")
    assert kernels.available() >= 1000
    with pytest.raises(RuntimeError, match="all_reduce on symmetric memory: .*(driver|device)"):
        _peer_memory(kernels).all_reduce(torch.zeros(4))


def test_a_library_that_is_missing_is_a_sentence(monkeypatch, tmp_path):
    symmetric.load.cache_clear()
    monkeypatch.setattr(symmetric, "_LIBRARIES", tmp_path)
    try:
        assert symmetric.load() == f"the CUDA kernels are not built: {tmp_path / 'libfsdp_tp_cuda.so'} is missing"
        symmetric.load.cache_clear()
        (tmp_path / "unavailable_cuda.txt").write_text("no nvcc\n")
        assert symmetric.load() == "the CUDA kernels are not built: no nvcc"
        symmetric.load.cache_clear()
        (tmp_path / "libfsdp_tp_cuda.so").write_text("no library")
        assert symmetric.load().startswith("the CUDA kernels cannot be used: ")
    finally:
        symmetric.load.cache_clear()


@pytest.fixture(scope="module")
def emulation(tmp_path_factory):
    """As `make test` has built it before; compiled here if there is none, or an older one."""
    sources = [*ROOT.glob("kernels/cuda/*.h"), *ROOT.glob("kernels/tests/cuda_emulation.*")]
    built = ROOT / "build/kernels/libfsdp_tp_cuda_emulation.so"
    if built.exists() and built.stat().st_mtime > max(source.stat().st_mtime for source in sources):
        return built
    path = tmp_path_factory.mktemp("emulation") / "emulation.so"
    source = ROOT / "kernels/tests/cuda_emulation.cpp"
    command = ["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", f"-I{ROOT / 'kernels'}"]
    subprocess.run([*command, "-o", str(path), str(source)], check=True)
    return path


def test_calls_check_their_arguments(emulation):
    peers = _peer_memory(symmetric.Kernels(emulation))
    memory = peers.kept[0]
    memory.view(torch.float32)[:4] = torch.tensor([1.0, 2, 3, 4])
    out = torch.zeros(3)
    peers.all_reduce(out, offset=4, scale=0.5)
    assert out.tolist() == [1, 1.5, 2]
    peers.reduce_scatter(half := torch.zeros(2, dtype=torch.bfloat16), dtype=torch.float32)
    assert half.tolist() == [1, 2]
    peers.all_gather(out, size=12, offset=4)
    assert out.tolist() == [2, 3, 4]
    with pytest.raises(ValueError, match="out of 3 elements on cpu must be contiguous, of 4 elements, on cpu"):
        peers.all_gather(out, size=16)
    with pytest.raises(ValueError, match="must be contiguous"):
        peers.all_reduce(torch.zeros(4, 2)[:, 0])
    with pytest.raises(ValueError, match="input of strides"):
        peers.all_reduce(torch.zeros(4), torch.zeros(4, 2)[:, 0])
    with pytest.raises(ValueError, match="sums of torch.float64 as torch.float64: legal are sums of torch.float32"):
        peers.all_reduce(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="sums of torch.float16 as torch.bfloat16"):
        peers.all_reduce(half, torch.zeros(2, dtype=torch.float16))
    peers._report[0] = 1 + 5
    with pytest.raises(dist.DistBackendError, match="rank 5 of 1 did not come to a collective within 5 s"):
        peers.all_reduce(out)


def test_a_buffer_takes_its_pointers_from_torch(emulation):
    """By the names that torch's symmetric memory has."""
    names = ("buffer_ptrs_dev", "signal_pad_ptrs_dev", "signal_pad_size", "rank", "world_size", "get_signal_pad")
    for name in names:
        assert hasattr(symm_mem._SymmetricMemory, name)
    kernels = symmetric.Kernels(emulation)
    own = _peer_memory(kernels)
    memory, pad, pointers = own.kept
    handle = SimpleNamespace(
        buffer_ptrs_dev=pointers[0].data_ptr(),
        signal_pad_ptrs_dev=pointers[1].data_ptr(),
        signal_pad_size=pad.nbytes,
        rank=0,
        world_size=1,
    )
    buffer = symmetric.SymmetricBuffer._over(handle, memory, kernels, timeout=5.0)
    buffer.tensor.view(torch.float32)[0] = 3
    buffer.all_reduce(out := torch.zeros(1))
    assert out.item() == 3


def test_the_check_of_the_kernels_finds_nothing_wrong_with_the_emulation(emulation, tmp_path):
    assert cuda_check.main(["--emulation", str(emulation), "--json", str(tmp_path / "x")]) == 0
    rows = json.loads((tmp_path / "x").read_text())["checks"]
    assert {row["op"] for row in rows} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert {row["world"] for row in rows} == {2, 4, 8}
    assert all(row["cases"] > 0 and row["wrong"] == 0 for row in rows)


def test_the_check_of_the_kernels_finds_a_wrong_result(emulation, monkeypatch):
    right = symmetric.PeerMemory.reduce_scatter

    def wrong(peers, out, **options):
        right(peers, out, **options)
        if peers.rank == 1 and out.numel() > 8:
            out[8] += 2e-6 * out[8].abs() + 1e-6  # a few last places of fp32, at one element of one rank

    monkeypatch.setattr(symmetric.PeerMemory, "reduce_scatter", wrong)
    found = list(cuda_check.checks(symmetric.Kernels(emulation), torch.device("cpu"), (2,), (1, 9)))
    assert all(check.wrong == (check.op == "reduce_scatter" and check.out_dtype == "float32") for check in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_check_of_the_kernels_ends_well_without_a_gpu(capsys):
    assert cuda_check.main([]) == 0
    assert capsys.readouterr().out == "no GPU\n"
