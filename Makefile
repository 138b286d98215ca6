# Every target sets up what it needs in .venv and does so once: a stamp file there is newer than what it was built from.
# Needed beforehand: make, git, and a python3 (3.10 or newer) that has the venv module.
#   PYTHON=python3.12 make test      another interpreter
#   PIP_EXTRA_INDEX_URL=... make test  e.g. an index of CPU-only torch wheels, which are much smaller

PYTHON ?= python3
VENV   := .venv
PEER   := .venv-peer-interop
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
PYTEST := $(BIN)/python -m pytest
PEER_VERSION := 1.15.0
INTEROP_LIBRARIES := transformers trl peft diffusers sentence-transformers datasets

# Two processes on two cores: one thread each, or they fight for the cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup demo quality style test test-slow test-gpu test-interop bench bench-peer docs interface clean
.DELETE_ON_ERROR:

help: ## show this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 16

$(VENV)/.python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.ready: $(VENV)/.python setup.py constraints.txt
	@echo "setting up $(VENV) (once)"
	$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.ready-transformers: $(VENV)/.ready
	$(PIP) -e '.[transformers]'
	@touch $@

$(VENV)/.ready-interop: $(VENV)/.ready
	$(PIP) -e '.[interop]'
	@touch $@

$(VENV)/.ready-docs: $(VENV)/.ready
	$(PIP) -e '.[docs]'
	@touch $@

$(VENV)/.ready-bench: $(VENV)/.ready
	$(PIP) -e '.[benchmarks]'
	@touch $@

$(PEER)/.ready: constraints.txt
	$(PYTHON) -m venv $(PEER)
	$(PEER)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt \
		accelerate==$(PEER_VERSION) $(INTEROP_LIBRARIES)
	@touch $@

setup: $(VENV)/.ready ## make .venv with the package (editable) and the development tools

demo: $(VENV)/.ready-transformers ## both faults and a training on real data, two processes, with a table at the end
	$(BIN)/python examples/demo.py

quality: $(VENV)/.ready ## lint, format check, links of the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_links.py

style: $(VENV)/.ready ## let the linter and the formatter repair what they can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: $(VENV)/.ready-interop ## unit, architecture, distributed and interop tests
	$(PYTEST) -m 'not slow and not gpu' tests $(ARGS)

test-slow: $(VENV)/.ready-interop $(PEER)/.ready ## the tests marked slow
	$(PYTEST) -m 'slow and not gpu' tests $(ARGS)

test-gpu: $(VENV)/.ready ## the tests marked gpu; needs one GPU, some need two
	$(PYTEST) -m gpu tests $(ARGS)

test-interop: $(VENV)/.ready-interop ## the interop tests alone
	$(PYTEST) -m 'not slow and not gpu' tests/interop $(ARGS)

bench: $(VENV)/.ready-bench ## measure this package and upstream's wheels, interleaved; writes docs/benchmarks.md
	$(BIN)/python benchmarks/run.py $(ARGS)

bench-peer: $(VENV)/.ready-interop $(PEER)/.ready ## train with downstream libraries on both packages: equal losses
	$(PYTEST) -m slow tests/interop $(ARGS)

docs: $(VENV)/.ready-docs ## build the documentation into site/
	$(BIN)/python -m mkdocs build --strict

interface: $(VENV)/.ready ## how much of the recorded interface is offered; ARGS=--missing lists the gaps
	$(BIN)/python tests/architecture/check_api.py $(ARGS)

clean: ## remove the environments and everything that was built
	rm -rf $(VENV) .venv-peer-* build dist site .demo .pytest_cache .ruff_cache .hypothesis src/*.egg-info
