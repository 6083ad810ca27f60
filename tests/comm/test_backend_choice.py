"""Which backend a CPU job runs on. If these fail, look in fsdp_tp/comm/backend.py, fsdp_tp/mesh.py and setup.py."""

import logging
import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import fsdp_tp
from fsdp_tp.comm import backend
from tests.ranks import run

ROOT = Path(fsdp_tp.__file__).parents[1]


class _Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def _mesh_over(name, store):
    """The backends of a mesh's axes where the script has started `name`, and what init_mesh says of them."""
    dist.barrier()  # gloo does not like others to leave while it joins
    dist.destroy_process_group()
    store = dist.FileStore(store, 4)
    dist.init_process_group(name, store=store, rank=int(os.environ["RANK"]), world_size=4)
    records, logger = _Records(), logging.getLogger("fsdp_tp")
    level = logger.level
    logger.addHandler(records)
    logger.setLevel(logging.INFO)
    fsdp_tp.mesh._log_once.cache_clear()
    fsdp_tp.init_mesh()
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2, timeout=timedelta(seconds=40))
    logger.removeHandler(records)
    logger.setLevel(level)
    groups = [mesh.tensor.get_group(), mesh.shard.get_group(), mesh.data.get_group()]
    return [backend.backend_of(group) for group in groups], records.messages


def _meshes(directory):
    found = [_mesh_over(backend.NAME, f"{directory}/1"), _mesh_over("gloo", f"{directory}/2")]
    os.environ["FSDP_TP_BACKEND"] = "gloo"
    found.append(_mesh_over("gloo", f"{directory}/3"))
    del os.environ["FSDP_TP_BACKEND"]
    return found


def test_the_axes_of_a_mesh_share_memory_and_init_mesh_says_so(tmp_path):
    results = run(4, _meshes, str(tmp_path))
    ours = [backend.NAME] * 3
    for result in results:
        assert [names for names, _ in result] == [ours, ours, ["gloo"] * 3]
    said = "collectives on the CPU go over fsdp_tp_shm (shared memory)"
    assert [messages for _, messages in results[0]] == [
        [said],
        [f"{said}; the default group is of gloo"],
        ["collectives on the CPU go over gloo"],
    ]
    assert [messages for _, messages in results[1]] == [[], [], []]


def test_an_unknown_backend_in_the_environment_is_an_error(monkeypatch):
    monkeypatch.setenv("FSDP_TP_BACKEND", "mpi")
    with pytest.raises(ValueError, match="FSDP_TP_BACKEND='mpi' in the environment: legal are fsdp_tp_shm and gloo"):
        backend.cpu_backend()


def test_without_kernels_gloo_is_used_and_the_reason_said_once(monkeypatch, tmp_path, caplog):
    (tmp_path / "unavailable.txt").write_text("fsdp_tp_torch was not built: there is no cmake\n")
    monkeypatch.setattr(backend, "_LIBRARIES", tmp_path)
    monkeypatch.setitem(sys.modules, "fsdp_tp._lib.fsdp_tp_torch", None)  # an ImportError
    backend._native.cache_clear()
    try:
        assert backend.cpu_backend() == "gloo"
        assert backend.cpu_backend() == "gloo"
    finally:
        backend._native.cache_clear()
    expected = "communication on the CPU goes over gloo: fsdp_tp_torch was not built: there is no cmake"
    assert caplog.messages == [expected]


def test_kernels_of_another_torch_are_not_used(monkeypatch):
    monkeypatch.setattr(backend.torch, "__version__", "2.99.0")
    backend._native.cache_clear()
    try:
        assert "and this is 2.99.0; install fsdp_tp again" in backend.unavailable()
    finally:
        backend._native.cache_clear()


@pytest.mark.parametrize("missing", ["compiler", "cmake"])
def test_it_installs_without_a_compiler_or_cmake(tmp_path, missing):
    for name in ("CMakeLists.txt", "setup.py", "LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    (tmp_path / "fsdp_tp").mkdir()
    shutil.copy(ROOT / "fsdp_tp" / "__init__.py", tmp_path / "fsdp_tp")
    environment = {"PATH": os.environ["PATH"], "CXX": "/bin/false"}
    program = "import runpy, sys; sys.argv = ['setup.py', '-q', 'build_ext', '--inplace']; "
    if missing == "cmake":
        program += "import shutil; shutil.which = lambda *_, **__: None; "
    program += "runpy.run_path('setup.py', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "fsdp_tp will communicate over gloo" in done.stdout + done.stderr
    reason = (tmp_path / "fsdp_tp" / "_lib" / "unavailable.txt").read_text()
    assert reason.startswith("fsdp_tp_torch was not built: ")
    if missing == "cmake":
        assert "there is no cmake" in reason
