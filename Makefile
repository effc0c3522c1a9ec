# Development commands. Each sets itself up: a virtual environment with the pins of requirements/, then the build.
#   PYTHON=/path/to/python   interpreter to make the environment with (default: the first usable one)
#   VENV=dir                 where the environment is (default: .venv)
#   SYSTEM=1                 no environment: use python3 (or PYTHON) and the torch that is installed there
#   BACKEND=cpu|cuda         build this backend alone (default: what this machine can build)
#   BUILD_ARGS=...           more arguments for tools/build.py, for example --cuda-from-pypi
#   PYTEST_ARGS=...          more arguments for pytest, for example "-k rope -x"
#   MODEL=...                handed to examples/demo.py
#   N=50000                  how many calls `make fuzz` makes

VENV ?= .venv
TEST_JOBS ?= 2
N ?= 50000

ifdef SYSTEM
  PYTHON ?= python3
  PY := $(PYTHON)
  CLANG_FORMAT := clang-format
  READY :=
  XDIST := $(shell $(PY) -c 'import xdist' 2>/dev/null && echo "-n $(TEST_JOBS)")
else
  PY := $(VENV)/bin/python
  CLANG_FORMAT := $(VENV)/bin/clang-format
  # Named after the pins: other pins, another file, and the set-up is done again.
  READY := $(VENV)/.ready-$(shell cat requirements/*.txt | cksum | cut -d' ' -f1)
  XDIST := -n $(TEST_JOBS)
endif

BACKEND_ARG := $(if $(BACKEND),--backend $(BACKEND))
RUN := LOCAL_KERNELS=org/ltx-kernels=$(CURDIR)/build HF_HUB_DISABLE_TELEMETRY=1 $(PY)
CXX_FILES = $(shell git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

.PHONY: help setup build test test-all fuzz sanitize demo lint format check-all clean distclean
.DEFAULT_GOAL := help

help:  ## show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14
	@sed -n '2,/^$$/s/^#//p' Makefile

setup: $(READY)  ## make the virtual environment

ifndef SYSTEM
$(READY):
	PYTHON="$(PYTHON)" tools/venv.sh $(VENV)
	@rm -f $(VENV)/.ready-*
	@touch $@
endif

build: $(READY)  ## build every variant this machine can into build/
	$(PY) tools/build.py $(BACKEND_ARG) $(BUILD_ARGS)

test: build  ## build, then run the tests but the slow ones
	$(RUN) -m pytest $(XDIST) -m "not slow" $(PYTEST_ARGS)

test-all: build  ## build, then run all tests
	$(RUN) -m pytest $(XDIST) $(PYTEST_ARGS)

fuzz: build  ## build, then run N random calls (50000) and write what they measured to benchmarks/results/
	$(RUN) tests/fuzz.py --cases $(N) $(FUZZ_ARGS)

sanitize: build  ## every tool of compute-sanitizer over tests/test_sanitize.py, own kernels only; needs a GPU
	$(RUN) tests/sanitize.py $(SANITIZE_ARGS)

demo: build  ## build, then run examples/demo.py (MODEL=...)
	$(if $(MODEL),MODEL="$(MODEL)") $(RUN) examples/demo.py

lint: $(READY)  ## check formatting, lint and types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(CLANG_FORMAT) --dry-run --Werror $(CXX_FILES)

format: $(READY)  ## format Python, C++ and CUDA sources
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix-only .
	$(CLANG_FORMAT) -i $(CXX_FILES)

check-all: lint test-all  ## lint and all tests

clean:  ## remove what was built
	rm -rf build dist torch-ext/*/_ops.py torch-ext/*/*.so
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean  ## also the virtual environment and the downloaded CUDA compiler
	rm -rf $(VENV) .cuda
