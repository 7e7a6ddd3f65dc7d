# One command each. Every target installs what it needs into .venv first; the second time it installs nothing.

PYTHON ?= python3
# pypi: Open MPI from PyPI, no root needed. system: the MPI whose mpicc is on PATH.
JDISTGRAD_MPI ?= pypi
# The CUDA toolkit to build mpi4jax's GPU part with; empty: without it.
CUDA_ROOT ?=

BIN := .venv/bin
RUN := $(BIN)/jdistgrad run
export JDISTGRAD_MPI CUDA_ROOT
EXTRA := $(BIN)/python -m pip install --quiet --no-build-isolation --config-settings editable_mode=compat --editable .

.PHONY: demo quick test test-all test-gradients test-worlds test-jobs test-examples test-install test-unruly test-machines \
	torture faults lint bench bench-gpu docs doctor clean

demo: .venv/installed
	$(RUN) -n 3 examples/training.py

# What each change must pass: every test once, in a world of threads, and on three ranks what depends on that.
# `make test-all`: every test in every world, and those that are marked as long.
# A folder of temporary files for each: suites that end together would clear pytest's common one under each other.
# Three suites at a time, since jobs often wait, each printed when it is done; the longest first, and ranks after worlds
# of threads, which have compiled most of the same programs by then.
SUITES := test-jobs test-gradients test-worlds test-examples test-mpi-3 test-devices-3 test-install docs
test test-all: .venv/installed-test .venv/installed-docs
	$(MAKE) --jobs=3 --output-sync=target $(SUITES)
test-all: SUITES := test-gradients test-worlds test-jobs test-examples test-devices-3 test-mpi-2 test-mpi-3 test-mpi-4 test-mpi-1 \
	test-devices-4 test-install test-devices-2 docs
test-all: export EVERYWHERE := yes

# What depends on the number of workers: exchanges among all, stages, owners and holders beside those of a call.
OF_NUMBERS := tests/pipeline tests/optim/test_sharding.py \
	tests/autograd/test_passes.py tests/autograd/test_contexts.py tests/autograd/test_context_ends.py \
	tests/autograd/test_graph.py tests/rpc/test_worlds.py tests/rpc/test_ends.py tests/rpc/test_lifetimes.py \
	tests/rpc/test_references.py tests/rpc/test_reference_arguments.py tests/rpc/test_rpc_all.py tests/rpc/test_mapping.py
# What depends on the kind of collectives.
OF_COLLECTIVES := tests/data_parallel/test_collectives.py tests/data_parallel/test_exchanges.py tests/optim/test_sharding.py

# What a transport and the collectives of processes must do: all else runs once, in worlds of threads, where no message is
# pickled. `make test-all` runs everything on ranks too.
OF_STEPS := $(if $(EVERYWHERE),tests/data_parallel, \
	tests/data_parallel/test_steps.py tests/data_parallel/test_training.py $(OF_COLLECTIVES))
CONFORMANCE := $(sort tests/rpc tests/wire $(filter-out tests/rpc/%,$(OF_NUMBERS)) $(OF_STEPS) \
	tests/autograd/test_reference_gradients.py tests/autograd/test_reference_leaves.py tests/modules tests/saving)

# Ranks, jobs and suites compile the same programs: the first to come compiles each, the others read it.
test-% faults: export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/build/compiled
test-% faults: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 0
test-% faults: export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES := -1
# One that reads what another is just writing says so, and compiles.
test-% faults: export PYTHONWARNINGS := ignore:Error reading persistent compilation cache entry:UserWarning

# A fresh clone has no bytecode, and hundreds of processes load its modules.
unexport PYTHONDONTWRITEBYTECODE

# Compiling was more than half of the suites' time, and most code runs only once: without fusion emitters and LLVM's
# optimizations it is a third of that. Two ranks, also over devices, compile as users' programs do.
# jaxlib 0.12 has no switch for the emitters, and ends a process that names one.
EMITTERS = $(shell $(BIN)/python -c "from importlib.metadata import version; \
	print('--xla_cpu_use_fusion_emitters=false' * (version('jaxlib') < '0.11'))")
QUICKLY = --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true $(EMITTERS)
QUICK := test-gradients test-worlds test-jobs test-examples test-mpi-1 test-mpi-3 test-mpi-4 test-devices-3 test-devices-4
USERS_FLAGS := $(XLA_FLAGS)
$(QUICK): export XLA_FLAGS = $(strip $(USERS_FLAGS) $(QUICKLY))

# XLA keeps programs by the number of a process's devices: with as many as in a world of threads (tests/conftest.py),
# three ranks read what that has compiled. One, two and four ranks have one device each, as most programs of users.
test-mpi-3: export JAX_NUM_CPU_DEVICES := 8

# Nor do hundreds of processes look through the modules of JAX for garbage. Two ranks do, as users' programs.
USERS_PATH := $(PYTHONPATH)
$(QUICK): export PYTHONPATH = $(CURDIR)/tests/startup$(addprefix :,$(USERS_PATH))

SHORT := $(if $(EVERYWHERE),,-m "not long")
OF_GRADIENTS := tests/autograd tests/torture tests/faults
test-gradients: .venv/installed-test
	@mkdir -p build
	$(BIN)/python -m pytest $(SHORT) $(OF_GRADIENTS) --basetemp build/files-of-gradients

test-worlds: .venv/installed-test
	@mkdir -p build
	$(BIN)/python -m pytest $(SHORT) --ignore tests/jobs --ignore tests/cli --ignore tests/installing \
		$(addprefix --ignore ,$(OF_GRADIENTS)) --basetemp build/files-of-worlds

# What needs no world and compiles nothing, or little: plans, tables and state machines, a minute at most.
OF_NO_WORLD := $(wildcard $(addprefix tests/,autograd/test_ledger.py autograd/staged/test_bundling.py \
	data_parallel/test_planning.py data_parallel/test_rank_devices.py \
	data_parallel/test_static_parts.py observe/test_chrome.py pipeline/test_schedules.py pipeline/test_reports.py \
	$(addprefix rpc/test_,accounts.py claims.py codec.py directory.py fingerprints.py likeness.py owned.py peers.py \
	pending.py scopes.py termination.py) wire))
quick: .venv/installed-test
	$(BIN)/python -m pytest -q $(OF_NO_WORLD)

test-install: .venv/installed-test
	@mkdir -p build
	$(BIN)/python -m pytest tests/installing --basetemp build/files-of-install

# What the docs and the examples show, and the command line; and other whole programs: processes that die, for example.
SHOWN := tests/cli tests/jobs/test_notebooks.py tests/jobs/test_pages.py tests/jobs/test_docs.py \
	tests/jobs/test_docstrings.py $(wildcard tests/jobs/test_*examples.py)
test-examples: .venv/installed-test
	@mkdir -p build
	$(BIN)/python -m pytest $(SHOWN) --basetemp build/files-of-examples

test-jobs: .venv/installed-test
	@mkdir -p build
	$(BIN)/python -m pytest tests/jobs $(addprefix --ignore ,$(SHOWN)) --basetemp build/files-of-jobs

# One rank runs everything, and three do for `make test-all`.
OF_RANKS := --ignore tests/jobs --ignore tests/cli --ignore tests/installing
test-mpi-3: OF_RANKS := $(if $(EVERYWHERE),$(OF_RANKS),$(CONFORMANCE))
test-mpi-2 test-mpi-4: OF_RANKS := $(sort $(OF_STEPS) $(OF_NUMBERS))
test-mpi-%: .venv/installed-test
	$(RUN) -n $* -m pytest $(SHORT) $(OF_RANKS)

# Calls and gradients over transports that deliver some messages late, drawn from SEED.
OVER_UNRULY := tests/rpc tests/autograd tests/pipeline
test-unruly: .venv/installed-test
	$(BIN)/python -m pytest --unruly $(SEED) $(OVER_UNRULY)
	$(RUN) -n 3 -m pytest --unruly $(SEED) $(OVER_UNRULY)

# Data-parallel training over the devices of processes: XLA's collectives, which on CPUs are gloo's. Two and four ranks
# run what depends on these, three also steps in one program, or EVERYWHERE all of it.
OVER_DEVICES := $(OF_COLLECTIVES)
test-devices-3: OVER_DEVICES := $(if $(EVERYWHERE),tests/data_parallel tests/optim/test_sharding.py, \
	tests/data_parallel/test_over_devices.py $(OF_COLLECTIVES))
test-devices-%: .venv/installed-test
	JDISTGRAD_DEVICES=1 JDISTGRAD_COLLECTIVES=devices $(RUN) -n $* -m pytest $(OVER_DEVICES)

# Random programs, each compared with the serial one: so many in each world, from this seed on. The exit status is 1
# unless there were no mismatches, crashes and hangs.
PROGRAMS ?= 500
SEED ?= 0
WORLDS ?= local-2 local-3 local-4 mpi-2 mpi-3 mpi-4
torture: .venv/installed-test
	PYTHONPATH=tests $(BIN)/python -m torture --programs $(PROGRAMS) --seed $(SEED) --worlds $(WORLDS)

# The faults of docs/fault-model.md, as often as tests/faults/rows.py says; SHARE=0.1: a tenth. The exit status is 1 unless each was
# named or survived.
SHARE ?= 1
faults: .venv/installed-test
	PYTHONPATH=tests $(BIN)/python -m faults --share $(SHARE) --seed $(SEED)

# Ranks on machines that this one plays: their messages go by TCP, and nothing rings. Takes Linux and root.
OF_ONE_MACHINE := --ignore tests/wire/test_doorbell.py --ignore tests/wire/test_memory.py
OVER_MACHINES := tests/wire tests/rpc tests/autograd tests/pipeline tests/optim tests/modules tests/data_parallel
test-machines: .venv/installed-test
	PYTHONPATH=tests $(BIN)/python -m machines -n 3 -- -m pytest $(OVER_MACHINES) $(OF_ONE_MACHINE)
	PYTHONPATH=tests JDISTGRAD_DEVICES=1 JDISTGRAD_COLLECTIVES=devices $(BIN)/python -m machines -n 3 -- -m pytest \
		tests/data_parallel/test_collectives.py tests/data_parallel/test_exchanges.py

lint: .venv/installed-lint
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports
	$(BIN)/mypy tests/typing/user_code.py && $(BIN)/basedpyright && $(BIN)/python .ci/ratchet.py

# ROUNDS=1: jobs of each kind; a quarter of an hour. The exit status is 1 if some rows are missing, which are named.
ROUNDS ?= 5
bench: .venv/installed-bench
	$(BIN)/python benchmarks/table.py --rounds $(ROUNDS)

# On a machine with NVIDIA GPUs, with a GPU build of JAX in .venv. Elsewhere it only shows that it runs.
bench-gpu: .venv/installed
	$(BIN)/python benchmarks/gpu/table.py --rounds 3

docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

doctor: .venv/installed
	$(BIN)/jdistgrad doctor

clean:
	rm -rf .venv

# Another MPI or toolkit that is asked for is installed. Not asked for, what there is stays.
ifeq ($(MAKELEVEL),0)
ifneq ($(filter environment command,$(origin JDISTGRAD_MPI) $(origin CUDA_ROOT)),)
ifneq ($(strip $(shell cat .venv/choice 2>/dev/null)),$(strip $(JDISTGRAD_MPI) $(CUDA_ROOT)))
.PHONY: .venv/installed
endif
endif
endif

# How things get installed: .ci/install.sh, which says why.
.venv/installed: pyproject.toml .ci/install.sh
	PYTHON=$(PYTHON) sh .ci/install.sh

.venv/installed-test: .venv/installed
	$(EXTRA)[test] && touch $@

.venv/installed-lint: .venv/installed-test
	$(EXTRA)[lint] && touch $@

.venv/installed-bench: .venv/installed
	$(EXTRA)[bench] && touch $@

.venv/installed-docs: .venv/installed
	$(EXTRA)[docs] && touch $@
