# make lab and make test are all that is needed; `make help` lists the rest.
SHELL := /bin/bash
.DEFAULT_GOAL := help
# The newest that really runs and can make a venv: a version manager's shim may stand there with no Python behind it.
USABLE = import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for python in $$(type -ap python3.13 python3.12 python3.11 python3); do \
  "$$python" -c '$(USABLE)' 2>/dev/null && echo "$$python" && break; done)
BIN := .venv/bin
PORT ?=
BROWSER ?= yes

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*  ## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

lab: .venv/lab  ## set up what is missing and open JupyterLab on the course (PORT=… BROWSER=no for servers)
	@$(BIN)/labkit lab $(if $(PORT),--port $(PORT)) $(if $(filter no,$(BROWSER)),--no-browser)

setup: .venv/lab  ## set up what is missing, start nothing
	@echo "ready: make lab"

test: check .venv/test  ## set up what is missing and run every test
	$(BIN)/python -m pytest tests/integration tests/notebooks tests/browser

check: .venv/test  ## the quick part: lint, types, unit tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit

soak: .venv/test  ## the long runs: hours of killing and load
	$(BIN)/python -m pytest tests -m soak -o addopts= -v

bench: .venv/test  ## measure, side by side in one run
	$(BIN)/python -m pytest tests/bench -o addopts= -s

notebooks: .venv/test  ## execute every source notebook and store its outputs
	$(BIN)/python -m tests.notebooks.execute

screenshots: .venv/test  ## make the README's picture anew, from the real thing
	$(BIN)/python -m tests.browser.screenshots

lock: .venv/test  ## pin the newest versions that pyproject.toml allows
	$(BIN)/pip install -q uv
	$(call COMPILE,) -o requirements.lock
	$(call COMPILE,--extra test -c requirements.lock) -o requirements-test.lock \
	  $$(sed -n 's/^\([a-z0-9.-]*\)==.*/--no-emit-package \1/p' requirements.lock)
	$(BIN)/python -m tests.unit.test_lock > environment.yml

clean:  ## remove all that make made; your workspace stays
	rm -rf .venv build labkit.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@test ! -d workspace || echo "your work in workspace/ was left alone"

COMPILE = $(BIN)/uv pip compile pyproject.toml $(1) --universal --python-version 3.11 --upgrade \
  --generate-hashes --no-emit-index-url --no-header --no-annotate -q

.venv/bin/python:
	@"$(PYTHON)" -c '$(USABLE)' 2>/dev/null || \
	  { echo "labkit needs Python 3.11, 3.12 or 3.13 with venv, and found: $(or $(PYTHON),none)"; \
	    echo "install one, or name it: make lab PYTHON=/path/to/python3.12"; exit 1; }
	"$(PYTHON)" -m venv .venv

.venv/lab: requirements.lock pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps -e .
	$(BIN)/python -m labkit.runtime
	@touch $@

.venv/test: requirements-test.lock .venv/lab
	$(BIN)/python -m pip install --disable-pip-version-check --require-hashes \
	  -r requirements.lock -r requirements-test.lock
	@touch $@

.PHONY: help lab setup test check soak bench notebooks screenshots lock clean
