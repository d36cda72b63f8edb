# On a fresh machine every target first installs into .venv; later calls skip that.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
WORKERS ?= 2
ARGS ?=

# tests start many processes: what they compile is worth keeping, whatever the shell says
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup replay quick test soak check fix

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):[^#]*## /  make \1\t/p' $(MAKEFILE_LIST)

setup: $(READY)  ## install into .venv (LOCKED=1: the versions of requirements-dev.txt)

# modules are compiled when they are first imported: pip would compile 17,000 of them, one by one
INSTALL := $(BIN)/pip install --quiet --no-compile
# takes a fraction of pip's processor time; keeps what is there, torch with it
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python

# torch goes first: what comes after keeps it. With a GPU it is the default (CUDA) build, without
# one the small CPU build, where its index answers within a few seconds.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else \
	    f"Python 3.11 or later is needed, but $(PYTHON) is {v[0]}.{v[1]}: use make PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if command -v nvidia-smi >/dev/null 2>&1; then \
	    set -x; $(INSTALL) torch; \
	elif $(BIN)/python -c 'from urllib.request import urlopen; \
	    urlopen("$(CPU_INDEX)/torch/", timeout=5)' >/dev/null 2>&1; then \
	    set -x; $(INSTALL) '$(TORCH)' --index-url $(CPU_INDEX); \
	else \
	    set -x; $(INSTALL) '$(TORCH)'; \
	fi
	$(INSTALL) uv
	$(if $(LOCKED),$(UV) --no-deps --require-hashes -r requirements-dev.txt)
	$(UV) -e '.[dev]'
	@touch $@

replay: $(READY)  ## replay the built-in workload: make replay ARGS="prefetch.stop=best_effort"
	@$(BIN)/hicache run $(ARGS)

quick: $(READY)  ## run the tests of a minute: cache, scheduler, engine, policies, examples
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope -q tests/cache tests/scheduler tests/engine \
	    tests/policies tests/test_examples.py $(ARGS)

test: $(READY)  ## run all tests except the long ones
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope $(ARGS)

soak: $(READY)  ## run the long tests
	-$(BIN)/pip install --quiet atheris  # for the fuzzer of trace readers; only Python 3.11 and 3.12 have it
	$(BIN)/python -m pytest -m soak $(ARGS)

check: $(READY)  ## check format, lint and types; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

fix: $(READY)  ## format, and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
