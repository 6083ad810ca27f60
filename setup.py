import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

# Why there are no kernels, for fsdp_tp.comm.backend and .symmetric to say at run time.
REASON, REASON_CUDA = "unavailable.txt", "unavailable_cuda.txt"


class CMakeBuild(build_ext):
    """Builds kernels/ with CMake into fsdp_tp/_lib/: what the package loads with ctypes, and the c10d backend.

    Both are optional: without a compiler, or torch for the backend, the package installs all the same and communicates
    over gloo.
    FSDP_TP_REQUIRE_KERNELS=1 makes that an error. Kernels for GPUs need nvcc; a machine without it goes without them.
    """

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"  # without the suffix of a Python version

    def build_extension(self, ext: Extension) -> None:
        out = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        target = ext.name.split(".")[-1]
        is_cuda = target == "libfsdp_tp_cuda"
        recorded = out / (REASON_CUDA if is_cuda else REASON)
        (out / f"{target}.so").unlink(missing_ok=True)
        try:
            options = torch_options() if target == "fsdp_tp_torch" else []
            self._run_cmake("-S", ".", "-B", self.build_temp, "-G", "Ninja", *options, output=out)
            self._run_cmake("--build", self.build_temp, "--target", target.removeprefix("lib"), output=out)
        except (ImportError, OSError, subprocess.CalledProcessError) as error:
            reason = f"{target} was not built: {error}"
            if os.environ.get("FSDP_TP_REQUIRE_KERNELS") == "1":
                raise
            out.mkdir(parents=True, exist_ok=True)
            recorded.write_text(reason + "\n")
            raise CompileError(reason + ("" if is_cuda else "; fsdp_tp will communicate over gloo")) from error
        recorded.unlink(missing_ok=True)
        if is_cuda and not (out / f"{target}.so").exists():
            recorded.write_text("no CUDA compiler (nvcc) was found when fsdp_tp was built\n")

    def _run_cmake(self, *arguments: str, output: Path) -> None:
        # cmake and ninja come from pip, perhaps into an environment that is not activated.
        path = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
        cmake = shutil.which("cmake", path=path)
        if cmake is None:
            raise FileNotFoundError("there is no cmake")
        options = [] if "--build" in arguments else [f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={output}"]
        subprocess.run([cmake, *arguments, *options], check=True, env=os.environ | {"PATH": path})

    def copy_extensions_to_source(self) -> None:
        source = Path("fsdp_tp/_lib")
        source.mkdir(exist_ok=True)
        super().copy_extensions_to_source()
        for name in (REASON, REASON_CUDA):
            reason = Path(self.build_lib) / source / name
            if reason.exists():
                shutil.copy(reason, source)
            else:
                (source / name).unlink(missing_ok=True)


def torch_options() -> list[str]:
    # Found, not imported: importing torch needs packages that come after it.
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise ImportError("torch is not installed where this is built (pip install torch, then --no-build-isolation)")
    torch = Path(found.submodule_search_locations[0])
    torch_version = re.search(r"^__version__ = '(.+)'$", (torch / "version.py").read_text(), re.MULTILINE)
    assert torch_version, "torch/version.py has no __version__"
    include = torch / "include"
    lists = {
        "INCLUDES": [str(include), str(include / "torch/csrc/api/include"), sysconfig.get_path("include")],
        "LIBRARIES": [str(torch / "lib" / name) for name in ("libc10.so", "libtorch_cpu.so")],
        "DEFINITIONS": [f'FSDP_TP_TORCH_VERSION="{torch_version[1]}"'],
    }
    return [f"-DFSDP_TP_TORCH_{name}={';'.join(values)}" for name, values in lists.items()]


def version() -> str:
    # Read, not imported: importing fsdp_tp needs torch.
    found = re.search(r'^__version__ = "(.+)"$', Path("fsdp_tp/__init__.py").read_text(), re.MULTILINE)
    assert found, "fsdp_tp/__init__.py has no __version__"
    return found[1]


setup(
    name="fsdp_tp",
    version=version(),
    description="Tensor parallelism and hybrid sharding for PyTorch FSDP scripts, in three lines.",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["fsdp_tp*"]),
    package_data={"fsdp_tp": ["py.typed"], "fsdp_tp.parity": ["*.jinja"]},
    # The sources are listed for the sdist and never compiled one by one.
    ext_modules=[
        Extension(f"fsdp_tp._lib.{name}", ["CMakeLists.txt", *sorted(glob("kernels/*/*.*"))], optional=True)
        for name in ("libfsdp_tp_shm", "fsdp_tp_torch", "libfsdp_tp_cuda")
    ],
    cmdclass={"build_ext": CMakeBuild},
    install_requires=["torch>=2.11", "einops", "jinja2", "numpy", "rich", "tyro", "xxhash"],
    extras_require={
        "hf": ["transformers"],
        "data": ["torchdata", "datasets"],
        "parity": ["matplotlib", "spmd_types>=0.3.1"],
        # For GGUF files, of which transformers reads weights and tokenizer.
        "pretrained": ["accelerate", "gguf", "transformers"],
        "dev": [
            "clang-format",
            "cmake",
            "hypothesis",
            "mypy",
            "ninja",
            "pre-commit",
            "pytest",
            "pytest-timeout",
            "ruff",
            "safetensors",
            "tensorboard",
        ],
    },
)
