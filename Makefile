# Two commands for a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEER ?= peer/bin/python  # an interpreter with llama-cpp-python: bench/README.md says how
SOURCES := pyproject.toml CMakeLists.txt $(wildcard quire/ops/csrc/*)

.PHONY: demo test test-all lint bench clean

demo: $(VENV)/installed
	$(BIN)/quire run "What is the capital of France? Answer in one sentence." -n 64

test: $(VENV)/installed-test lint
	$(BIN)/python -m pytest -q -m "not slow"

test-all: $(VENV)/installed-test lint
	$(BIN)/python -m pytest -q

lint: $(VENV)/installed-test
	$(BIN)/ruff check quire tests bench examples docs/make_cli.py
	$(BIN)/ruff format --check quire tests bench examples docs/make_cli.py
	$(BIN)/mypy

bench: $(VENV)/installed
	$(BIN)/python bench/peer_cpu.py --quick --peer-python $(PEER)

clean:
	rm -rf $(VENV) build

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Editable, so that a change in Python needs no install; a change in C++ builds anew.
$(VENV)/installed: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/installed-test: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet -e ".[test]"
	touch $(VENV)/installed $@
