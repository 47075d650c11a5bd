# Two commands for a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEER ?= peer/bin/python  # an interpreter with llama-cpp-python: bench/README.md says how
SOURCES := pyproject.toml CMakeLists.txt $(wildcard quire/ops/csrc/*)

.PHONY: demo test test-all test-cuda test-aarch64 test-kernels sanitize sanitize-cuda lint bench clean

demo: $(VENV)/installed
	$(BIN)/quire run "What is the capital of France? Answer in one sentence." -n 64

# Two at a time, each file's tests in one process. Tests start a hundred processes: with bytecode kept,
# each of them starts in half the time.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile

test: $(VENV)/installed-test lint
	$(PYTEST) -m "not slow"

test-all: $(VENV)/installed-test-all lint
	$(PYTEST)

# The extension built anew with sanitizers, and the tests of the operations with it. Python has to be
# told of their libraries, and of the C++ one, before it starts; its own leaks are not ours.
SANITIZED := build/sanitize
RUNTIMES = $(foreach name,asan ubsan stdc++,$(shell $(CXX) -print-file-name=lib$(name).so))

sanitize: $(VENV)/installed-sanitize
	$(BIN)/cmake -S . -B $(SANITIZED) -DQUIRE_SANITIZE=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir)
	$(BIN)/cmake --build $(SANITIZED) --parallel
	LD_PRELOAD="$(RUNTIMES)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  PYTHONMALLOC=malloc $(BIN)/python -m pytest -q --capture=sys -p tests.ops.sanitized -m "not slow" tests/ops \
	  && echo "sanitize: passed" || { echo "sanitize: FAILED"; exit 1; }

# The GPU's kernels without a GPU: Triton's in its interpreter, CUDA C++ and Triton's compiled for
# every architecture. In a venv of its own, since PyTorch is large and its CPU build will do.
test-kernels: $(VENV)-kernels/installed
	TRITON_INTERPRET=1 $(VENV)-kernels/bin/python -m pytest -q -p no:cacheprovider tests/cuda

$(VENV)-kernels/installed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)-kernels
	$(VENV)-kernels/bin/python -m pip install --quiet -e . "torch==2.13.0" triton nvidia-cuda-nvrtc "numpy<2.3" pytest hypothesis
	touch $@

# On a machine with a GPU: PyTorch and Triton are taken from its own Python.
test-cuda:
	sh tests/cuda/run.sh

# There too: every kernel at small shapes under compute-sanitizer, which has to find planted faults.
sanitize-cuda:
	sh tests/cuda/sanitize.sh

# On Debian: the operations on an emulated aarch64.
test-aarch64: $(VENV)/installed-sanitize
	PYTHON=$(BIN)/python sh tests/aarch64/run.sh

lint: $(VENV)/installed-test
	$(BIN)/ruff check quire tests bench examples docs/make_cli.py
	$(BIN)/ruff format --check quire tests bench examples docs/make_cli.py
	$(BIN)/mypy

bench: $(VENV)/installed
	$(BIN)/python bench/peer_cpu.py --quick --peer-python $(PEER)

clean:
	rm -rf $(VENV) $(VENV)-kernels build

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Editable, so that a change in Python needs no install; a change in C++ builds anew.
$(VENV)/installed: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/installed-test: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet -e ".[test]"
	touch $(VENV)/installed $@

$(VENV)/installed-test-all: $(VENV)/installed-test
	$(BIN)/python -m pip install --quiet -e ".[test-all]"
	touch $(VENV)/installed $(VENV)/installed-test $@

$(VENV)/installed-sanitize: $(VENV)/installed-test
	$(BIN)/python -m pip install --quiet cmake nanobind
	touch $@
