# `make train` and `make test` work from a fresh clone: both create the environment on first use.
#
#   make setup    create .venv with the pinned dependencies (the CPU build of torch if there is no NVIDIA GPU)
#   make train    prepare the default corpus and train the demo under btp on 2 processes
#   make test     run the test suite, as on every commit (about 11 minutes on two cores)
#   make quick    run quick tests during development: every layout once, no subprocesses (two minutes)
#   make nightly  run the tests that are too slow for every commit, then make versions
#   make softgpu  install what the nightly GPU tests need on a machine without a GPU, in .softgpu/$TORCH (7 GB; once per version:
#                 `TORCH=2.15.0 make softgpu`; CUDA_VENV=PATH uses an environment that has a CUDA build of torch)
#   make versions run the test suite on the newest supported torch, in build/venv-newest, and what uses other libraries on the
#                 oldest supported versions, in build/venv-oldest
#   make check    check lint, format and types
#   make image    build the Dockerfile and run a command in the image (does nothing without docker or podman)
#   make docs     build the documentation site in build/site (strict: a broken link is an error)
#   make validate compare predicted and measured steps on this machine, in benchmarks/results/ (ten minutes; keep the machine idle)
#   make bench    run the paper's evaluation on this machine, and build the report of all results, benchmarks/report.html
#                 (about 2.4 hours; keep the machine idle; resumes after an interruption; `python -m benchmarks evaluation --list`
#                 shows what is left)
#   make report   rebuild the report from existing results
#   make release  build the sdist and the wheel, install the wheel in a fresh environment, and walk the pages' commands there

PYTHON ?= python3
SOFTGPU ?= .softgpu
VENV ?= .venv
# The newest version whose CPU build we can install: 2.2 GB, compared with 6.6 GB for the CUDA builds of 2.14 and 2.15.
# It is the oldest supported version. `make nightly` also runs the suite on the newest.
TORCH ?= 2.13.0
NEWEST ?= 2.15.0
CPU_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
READY := $(VENV)/.ready-$(TORCH)
CONSTRAINTS ?= constraints.txt

# Machines with a GPU use the default build; Linux without a GPU uses the CPU build, which is a tenth of its size but not on the
# default index.
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
SYSTEM := $(shell uname -s)
ifeq ($(SYSTEM)$(HAS_GPU),Linux)
TORCH_INSTALL = $(PIP) "torch==$(TORCH)+cpu" --extra-index-url $(CPU_INDEX) --retries 1 2>/dev/null \
	|| { echo "no CPU build of torch $(TORCH) at $(CPU_INDEX): installing the default build"; $(PIP) "torch==$(TORCH)"; }
else
TORCH_INSTALL = $(PIP) "torch==$(TORCH)"
endif

.PHONY: release setup train test quick nightly versions image softgpu guards soak recovery check docs verify validate bench report clean

setup: $(READY)

# Install torch first; otherwise, a package that depends on "torch" would pull in the CUDA build.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "boost needs Python 3.11 or newer: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
		|| { echo "python3 -m venv failed: install your system's python3-venv package" >&2; exit 1; }
	@echo "installing torch $(TORCH) into $(VENV) (a few minutes the first time)"
	@$(TORCH_INSTALL) || { echo "torch $(TORCH) could not be installed; is the network up?" >&2; exit 1; }
	@echo "installing boost and its pinned dependencies"
	@$(PIP) --constraint $(CONSTRAINTS) --editable '.[dev]'
	@rm -f $(VENV)/.ready-* && touch $@

# The demo runs on two processes. If each has a GPU, run `make train DEVICE=cuda`.
DEVICE ?= cpu

train: setup
	$(BIN)/boost prepare --stdlib --out data/stdlib
	$(BIN)/boost train demo --run.device $(DEVICE) --resume auto

# Test files run in parallel. A worker starts up to eight processes, so on two cores a third worker costs more time than it saves.
# On a larger machine, use more workers: make test WORKERS=8.
WORKERS ?= 2

PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test: setup
	$(PYTEST)

verify: setup
	$(BIN)/boost verify --nproc 2 --out build/verify.json

quick: setup
	$(PYTEST) -m 'not slow and not nightly'

nightly: setup
	$(PYTEST) -m nightly
	$(MAKE) versions

softgpu:
	$(PYTHON) tests/softgpu/setup.py $(SOFTGPU) $(if $(CUDA_VENV),--venv $(CUDA_VENV),--torch $(TORCH))

versions: setup
	$(MAKE) test VENV=build/venv-newest TORCH=$(NEWEST)
	mkdir -p build
	$(BIN)/python tests/oldest.py > build/oldest.txt
	$(MAKE) setup VENV=build/venv-oldest CONSTRAINTS=build/oldest.txt
	build/venv-oldest/bin/python -m pytest tests/convert tests/data tests/border tests/api tests/config

# Removes each guard in docs/reliability.md in turn, and runs the tests that must then fail.
guards: setup
	$(BIN)/python -m tests.guards

# Kills and resumes the demo 200 times (half an hour).
soak: setup
	$(BIN)/boost prepare --stdlib --out data/stdlib
	$(BIN)/python -m benchmarks.soak data/stdlib runs/soak

# Kills processes in runs with in-step recovery, 50 times per run (40 minutes).
recovery: setup
	$(BIN)/boost prepare --stdlib --out data/stdlib
	$(BIN)/python -m benchmarks.recovery data/stdlib runs/recovery

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The CPU build of torch: the image's other layers do not depend on it.
IMAGE_ARGS ?= --build-arg TORCH_INDEX=$(CPU_INDEX) --build-arg TORCH=$(TORCH)

image:
	@for docker in docker podman; do \
		if $$docker info >/dev/null 2>&1; then \
			$$docker build --tag boost:check $(IMAGE_ARGS) . && $$docker run --rm boost:check plan --model 7b --gpus 64 --gpu h100; \
			exit $$?; \
		fi; \
	done; echo "make image: neither docker nor podman runs here; the Dockerfile is not built"

# NO_MKDOCS_2_WARNING silences a notice about an unrelated program.
REPOSITORY_URL ?= $(shell git remote get-url origin 2>/dev/null | grep ^https:)

docs: setup
	$(BIN)/python -m benchmarks report
	$(BIN)/python docs/stage.py build/docs
	REPOSITORY_URL=$(REPOSITORY_URL) NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

validate: setup
	$(BIN)/boost plan calibrate --device cpu --nproc 2 --out runs/local.toml
	$(BIN)/python -m benchmarks validation --measure --hardware runs/local.toml

# Runs one experiment at a time, because concurrent runs would slow each other down.
bench: setup
	$(BIN)/python -m benchmarks evaluation

report: setup
	$(BIN)/python -m benchmarks modeled
	$(BIN)/python -m benchmarks record
	$(BIN)/python -m benchmarks report

release:
	PYTHON=$(PYTHON) TORCH=$(TORCH) CPU_INDEX=$(CPU_INDEX) .ci/release

clean:
	rm -rf .venv .venv-ci build *.egg-info .pytest_cache .mypy_cache .ruff_cache
