import os
import re
import subprocess
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext


class CMakeBuild(build_ext):
    """Builds kernels/ with CMake into fsdp_tp/_lib/, from where the package loads it with ctypes."""

    def get_ext_filename(self, fullname: str) -> str:
        # Not an importable module, so without the suffix of a Python version.
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        # cmake and ninja come from pip, perhaps into an environment that is not activated.
        path = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
        out = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        for arguments in (
            ["-S", ".", "-B", self.build_temp, "-G", "Ninja", f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={out}"],
            ["--build", self.build_temp, "--target", "fsdp_tp_shm"],
        ):
            subprocess.run(["cmake", *arguments], check=True, env=os.environ | {"PATH": path})

    def copy_extensions_to_source(self) -> None:
        Path("fsdp_tp/_lib").mkdir(exist_ok=True)
        super().copy_extensions_to_source()


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
    ext_modules=[Extension("fsdp_tp._lib.libfsdp_tp_shm", ["CMakeLists.txt", *sorted(glob("kernels/*/*.*"))])],
    cmdclass={"build_ext": CMakeBuild},
    install_requires=["torch>=2.11", "einops", "jinja2", "numpy", "rich", "safetensors", "tyro"],
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
            "tensorboard",
        ],
    },
)
