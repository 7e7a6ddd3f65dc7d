# One command each. Every target installs what it needs into .venv first; the second time it installs nothing.

PYTHON ?= python3
# pypi: Open MPI from PyPI, no root needed. system: the MPI whose mpicc is on PATH.
JDISTGRAD_MPI ?= pypi
# The CUDA toolkit to build mpi4jax's GPU part with; empty: without it.
CUDA_ROOT ?=

BIN := .venv/bin
RUN := $(BIN)/jdistgrad run
export JDISTGRAD_MPI CUDA_ROOT

.PHONY: demo test test-local test-mpi lint bench doctor clean

demo: .venv/installed
	$(RUN) -n 3 examples/training.py

test: test-local test-mpi

test-local: .venv/installed-test
	$(BIN)/python -m pytest

test-mpi: .venv/installed-test
	for n in 1 2 3 4; do $(RUN) -n $$n -m pytest -m "not one_process" || exit 1; done

lint: .venv/installed-lint
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

bench: .venv/installed-bench
	$(BIN)/python benchmarks/calls.py
	$(BIN)/python benchmarks/local.py
	$(BIN)/python benchmarks/gradients.py

doctor: .venv/installed
	$(BIN)/jdistgrad doctor

clean:
	rm -rf .venv

# How things get installed: .ci/install.sh, which says why.
.venv/installed: pyproject.toml .ci/install.sh
	PYTHON=$(PYTHON) sh .ci/install.sh

.venv/installed-test: .venv/installed
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable .[test] && touch $@

.venv/installed-lint: .venv/installed-test
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable .[lint] && touch $@

.venv/installed-bench: .venv/installed
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable .[bench] && touch $@
