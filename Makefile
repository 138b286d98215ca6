# Every target sets up what it needs in .venv and does so once: a stamp file there is newer than what it was built from.
# Needed beforehand: make, git, and a python3 (3.10 or newer) that has the venv module.
#   PYTHON=python3.12 make test      another interpreter
#   PIP_EXTRA_INDEX_URL=... make test  e.g. an index of CPU-only torch wheels, which are much smaller

PYTHON ?= python3
VENV   := .venv
# The peer's wheel, unpacked: a program that finds it first on its path runs on it, with the libraries of .venv.
PEER   := .cache/peer/1.15.0
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
PYTEST := $(BIN)/python -m pytest
# Tests run in this many processes at a time; 0 runs them in pytest's own. One more than two cores, since tests wait for processes.
WORKERS ?= 3
# A test that stands still fails after this many seconds, with the stacks of its threads, and the others go on.
LIMIT_S ?= 300
# The releases that src/transformers_patch/registry.py says it is tested with, each in an environment of its own.
TRANSFORMERS_VERSIONS := 4.46.3 4.57.6 5.0.0 5.23.0 5.24.0
TRANSFORMERS_TESTS := tests/unit/transformers_patch \
	$(addprefix tests/interop/test_,transformers_patch.py trainer_checkpoints.py trainer_losses.py trainer_throughput.py libraries.py)
# The oldest torch that setup.py takes, one in the middle and the newest; by each, the transformers and torchao of its time.
TORCH_VERSIONS := 2.7.1 2.9.1 2.15.0
BESIDE_2.7.1   := transformers==4.57.6 torchao==0.11.0
BESIDE_2.9.1   := transformers==5.0.0 torchao==0.14.1
BESIDE_2.15.0  := transformers==5.23.0 torchao==0.18.0
# Every part of the package in one process, and each strategy, checkpoints and the launcher on several.
VERSIONS_TESTS := tests/unit tests/extensions tests/architecture $(addprefix tests/distributed/test_,conformance.py checkpoint.py launch.py self_check.py)
# Upstream's source distributions that the exported patches are proved on.
UPSTREAM_SOURCES := accelerate-1.12.0 accelerate-1.15.0 transformers-4.57.6 transformers-5.23.0 transformers-5.24.0
# Of the downstream libraries the only source distribution that carries the tests of its trainer.
SUITES := pytorch_accelerated-0.1.61
UPSTREAM_READY := $(VENV)/.ready-interop $(PEER)/.ready .venv-transformers-4.57.6/.ready \
	$(UPSTREAM_SOURCES:%=.cache/upstream/%/.ready)

# Two processes on two cores: one thread each, or they fight for the cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Hundreds of processes import the package: without compiled files each import takes three times as long.
export PYTHONDONTWRITEBYTECODE :=
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup demo quality style test test-fast coverage test-slow test-gpu test-interop test-transformers test-versions \
	test-deepspeed test-liger test-megatron test-ray test-trackers test-xla test-upstream test-site test-scale test-crash gpu-day bench bench-peer docs reference pictures release size interface clean
.DELETE_ON_ERROR:
# Stamps made by pattern rules are no intermediate files: without them every environment would be made again.
.PRECIOUS: .venv-transformers-%/.ready .venv-torch-%/.ready .cache/upstream/%/.ready

help: ## show this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 20

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

.venv-transformers-%/.ready: setup.py constraints.txt
	@echo "setting up .venv-transformers-$* (once)"
	$(PYTHON) -m venv .venv-transformers-$*
	grep -v '^transformers==' constraints.txt > .venv-transformers-$*/constraints.txt
	.venv-transformers-$*/bin/python -m pip --disable-pip-version-check install --quiet \
		-c .venv-transformers-$*/constraints.txt -e . transformers==$* 'pytest>=8' optuna
	@touch $@

.venv-torch-%/.ready: setup.py constraints.txt
	@echo "setting up .venv-torch-$* (once; several GiB)"
	$(PYTHON) -m venv .venv-torch-$*
	grep -vE '^(torch|torchao|transformers)==' constraints.txt > .venv-torch-$*/constraints.txt
	.venv-torch-$*/bin/python -m pip --disable-pip-version-check install --quiet \
		-c .venv-torch-$*/constraints.txt -e '.[testing]' torch==$* $(BESIDE_$*)
	@touch $@

.venv-deepspeed/.ready: setup.py constraints.txt
	@echo "setting up .venv-deepspeed (once)"
	$(PYTHON) -m venv .venv-deepspeed
	.venv-deepspeed/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt \
		-e '.[testing,transformers]' trl peft datasets setuptools wheel
	# Its build script looks for torch.
	.venv-deepspeed/bin/python -m pip --disable-pip-version-check install --quiet --no-build-isolation \
		-c constraints.txt -e '.[deepspeed]'
	@touch $@

.venv-megatron/.ready: setup.py constraints.txt
	@echo "setting up .venv-megatron (once)"
	$(PYTHON) -m venv .venv-megatron
	.venv-megatron/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt -e '.[testing,transformers]'
	# Without what it depends on: torch is there.
	.venv-megatron/bin/python -m pip --disable-pip-version-check install --quiet --no-deps megatron-core==0.16.1
	@touch $@

.venv-trackers/.ready: setup.py constraints.txt
	@echo "setting up .venv-trackers (once)"
	$(PYTHON) -m venv .venv-trackers
	.venv-trackers/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt -e '.[testing,trackers]'
	@touch $@

.venv-ray/.ready: setup.py constraints.txt
	@echo "setting up .venv-ray (once)"
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt -e '.[testing,ray]'
	@touch $@

.venv-xla/.ready: setup.py constraints.txt
	@echo "setting up .venv-xla (once; several GiB)"
	$(PYTHON) -m venv .venv-xla
	grep -vE '^(torch|torchao|transformers)==' constraints.txt > .venv-xla/constraints.txt
	# The newest pair that there is: torch_xla has had no release since.
	.venv-xla/bin/python -m pip --disable-pip-version-check install --quiet \
		-c .venv-xla/constraints.txt -e '.[testing]' torch==2.9.0 torch_xla==2.9.0
	@touch $@

.venv-liger/.ready: setup.py constraints.txt
	@echo "setting up .venv-liger (once)"
	$(PYTHON) -m venv .venv-liger
	.venv-liger/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt \
		-e '.[testing,transformers]' liger-kernel triton
	@touch $@

.cache/upstream/%/.ready: $(VENV)/.ready
	$(BIN)/python tools/fetch_sources.py --out .cache/upstream $*
	@touch $@

$(VENV)/.ready-docs: $(VENV)/.ready
	$(PIP) -e '.[docs]'
	@touch $@

$(VENV)/.ready-release: $(VENV)/.ready
	$(PIP) -e '.[release]'
	touch $@

$(VENV)/.ready-site: $(VENV)/.ready
	$(PIP) -e '.[site]'
	@touch $@

$(VENV)/.ready-bench: $(VENV)/.ready
	$(PIP) -e '.[benchmarks]'
	@touch $@

$(PEER)/.ready: $(VENV)/.python
	$(PIP) --no-deps --target $(PEER) accelerate==$(notdir $(PEER))
	@touch $@

setup: $(VENV)/.ready ## make .venv with the package (editable) and the development tools

demo: $(VENV)/.ready-transformers ## both faults, a Trainer killed in a save, and a training on real data, with a table at the end
	$(BIN)/python examples/demo.py

quality: $(VENV)/.ready ## lint, format check, types, dead code, links and phrases of the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/dead_code.py
	$(BIN)/python tools/check_links.py
	$(BIN)/python tools/phrases.py --check
	$(BIN)/python tools/examples.py --check

style: $(VENV)/.ready ## let the linter and the formatter repair what they can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: $(VENV)/.ready-interop $(PEER)/.ready ## unit, architecture, distributed and interop tests
	$(PYTEST) -n $(WORKERS) --dist loadgroup --timeout $(LIMIT_S) -m 'not slow and not gpu' tests $(ARGS)

test-fast: $(VENV)/.ready ## unit and architecture tests alone
	$(PYTEST) -n $(WORKERS) --dist loadgroup --timeout $(LIMIT_S) -m 'not slow and not gpu' tests/unit tests/architecture $(ARGS)

coverage: $(VENV)/.ready-interop $(PEER)/.ready ## the same tests as `make test`, and which branches of src/ no test and no child process takes
	$(BIN)/coverage erase
	WARM=0 COVERAGE_ROOT=$(CURDIR) $(BIN)/coverage run -m pytest -n $(WORKERS) --dist loadgroup --timeout $(LIMIT_S) -m 'not slow and not gpu' tests $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

test-deepspeed: .venv-deepspeed/.ready ## DeepSpeed's tests, in an environment of its own: importing it changes torch
	PATH="$(CURDIR)/.venv-deepspeed/bin:$$PATH" .venv-deepspeed/bin/python -m pytest \
		-k deepspeed $(addprefix tests/distributed/test_,deepspeed.py conformance.py self_check.py) \
		$(addprefix tests/interop/test_,deepspeed.py trainer_arguments.py trainer_strategies.py examples.py) $(ARGS)

test-trackers: .venv-trackers/.ready ## a real run of each tracker, offline, in an environment of its own: their libraries patch what they meet
	.venv-trackers/bin/python -m pytest tests/interop/test_trackers.py $(ARGS)

test-ray: .venv-ray/.ready ## Ray Train with our Accelerator inside, a worker killed, in an environment of its own: it starts servers
	PATH="$(CURDIR)/.venv-ray/bin:$$PATH" .venv-ray/bin/python -m pytest -k ray tests/interop/test_examples.py $(ARGS)

test-xla: .venv-xla/.ready ## torch_xla on the processor, one device and two virtual ones, in an environment of its own: it needs torch 2.9
	PATH="$(CURDIR)/.venv-xla/bin:$$PATH" .venv-xla/bin/python -m pytest tests/interop/test_xla.py $(ARGS)

test-megatron: .venv-megatron/.ready ## Megatron core on CPU processes, in an environment of its own
	PATH="$(CURDIR)/.venv-megatron/bin:$$PATH" .venv-megatron/bin/python -m pytest tests/distributed/test_megatron.py $(ARGS)

test-liger: .venv-liger/.ready ## Liger's kernels by Triton's interpreter, in an environment of its own: its Triton would be torch's compiler
	PATH="$(CURDIR)/.venv-liger/bin:$$PATH" .venv-liger/bin/python -m pytest -k liger tests/interop/test_examples.py $(ARGS)

test-slow: test-deepspeed $(VENV)/.ready-interop $(PEER)/.ready ## the tests marked slow, each process with a new interpreter
	WARM=0 $(PYTEST) -m 'slow and not gpu' tests $(ARGS)

test-gpu: $(VENV)/.ready ## the tests marked gpu; needs one GPU, some need two
	$(PYTEST) -m gpu tests $(ARGS)

gpu-day: $(VENV)/.ready-transformers $(PEER)/.ready ## on a machine with GPUs: tests, conformance, precisions, benchmarks, docs/gpu.md
	$(BIN)/python benchmarks/gpu_day.py $(ARGS)

test-interop: $(VENV)/.ready-interop $(PEER)/.ready ## the interop tests alone
	$(PYTEST) -m 'not slow and not gpu' tests/interop $(ARGS)

test-transformers: $(TRANSFORMERS_VERSIONS:%=test-transformers-%) ## the shim against each release of transformers it supports

test-transformers-%: .venv-transformers-%/.ready
	PATH="$(CURDIR)/.venv-transformers-$*/bin:$$PATH" .venv-transformers-$*/bin/python -m pytest -m 'not slow and not gpu' $(TRANSFORMERS_TESTS) $(ARGS)

test-versions: $(TORCH_VERSIONS:%=test-versions-%) ## the quick tests on the oldest, a middle and the newest torch; several GiB each

test-versions-%: .venv-torch-%/.ready
	PATH="$(CURDIR)/.venv-torch-$*/bin:$$PATH" .venv-torch-$*/bin/python -m pytest -n $(WORKERS) --dist loadgroup \
		--timeout $(LIMIT_S) -m 'not slow and not gpu' $(VERSIONS_TESTS) $(ARGS)

test-upstream: $(UPSTREAM_READY) ## the exported patches, on upstream's source distributions
	$(PYTEST) tests/interop/test_upstream.py $(ARGS)

test-site: $(VENV)/.ready-site ## the site in headless Chromium: links, navigation, search, copy buttons, console, phone; needs chromium and chromedriver
	$(PYTEST) -m slow tests/interop/test_site.py $(ARGS)

test-scale: $(VENV)/.ready-bench ## what many ranks cost: store traffic, sampling, manifests, object stores; writes docs/scale.md
	$(BIN)/python tests/scale/run.py $(ARGS)

test-crash: $(VENV)/.ready ## kill runs and break disks while they save and load, and damage checkpoints; CRASH_SEED and FUZZ_SEED choose
	$(PYTEST) -m slow -s tests/distributed/test_crash.py tests/unit/checkpoint/test_fuzz.py $(ARGS)

bench: $(VENV)/.ready-bench $(PEER)/.ready ## measure this package and upstream's wheels, interleaved; writes docs/benchmarks.md
	$(BIN)/python benchmarks/run.py $(ARGS)

bench-peer: $(VENV)/.ready-interop $(PEER)/.ready $(SUITES:%=.cache/upstream/%/.ready) ## train with downstream libraries, and run their suites, on both packages: equal losses, equal outcomes
	$(PYTEST) -m slow tests/interop $(ARGS)

docs: $(VENV)/.ready-docs ## build the documentation into site/
	$(BIN)/python -m mkdocs build --strict

reference: $(VENV)/.ready ## write docs/reference/cli.md from the option table and the parsers, docs/reference.md and examples/README.md from the docstrings
	$(BIN)/python tools/examples.py
	$(BIN)/python tools/cli_reference.py
	$(BIN)/python tools/api_reference.py

release: $(VENV)/.ready-release ## build the sdist and the wheel, prove the wheel in a fresh environment, write checksums and an SBOM into dist/
	$(BIN)/python tools/release.py --out dist

pictures: $(VENV)/.ready-bench ## draw the pictures of the pages, light and dark, into docs/img
	$(BIN)/python tools/pictures.py

size: $(VENV)/.ready ## lines of code of each folder, and the calls and files of the usual walks
	$(BIN)/python tools/size.py $(ARGS)

interface: $(VENV)/.ready ## how much of the recorded interface is offered; ARGS=--missing lists the gaps
	$(BIN)/python tests/architecture/check_api.py $(ARGS)

clean: ## remove the environments and everything that was built
	rm -rf $(VENV) .venv-deepspeed .venv-megatron .venv-peer-* .venv-ray .venv-torch-* .venv-trackers .venv-transformers-* .venv-xla .cache build dist site .demo .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
