# Every target makes .venv and installs what it needs; a machine needs only python3, git and make.
PYTHON ?= python3
BIN := .venv/bin
MODEL ?=

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-all check docs package mutate format clean

help:  ## list the targets
	@grep -E '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

.venv/bin/pip:
	$(PYTHON) -m venv .venv

.venv/.installed-%: pyproject.toml constraints.txt | .venv/bin/pip
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

quickstart: .venv/.installed-quickstart  ## load, fine-tune, evaluate, export and ask a real model
	$(BIN)/python examples/quickstart.py $(if $(MODEL),--model $(MODEL))

test: .venv/.installed-test  ## the tests that are not marked slow (add ARGS="-k rope" to choose)
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal $(ARGS)

test-all: .venv/.installed-test  ## every test that runs on a CPU
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal --slow $(ARGS)

check: .venv/.installed-test  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: .venv/.installed-docs  ## build the manual in site/, and fail on a dead link
	$(BIN)/zensical build --strict --clean

package: .venv/.installed-release  ## build sdist and wheel, and try the wheel alone (PYTHON=python3.13 ARGS="torch==2.15.0")
	rm -rf dist && $(BIN)/python -m build && $(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv dist/env && dist/env/bin/pip install --quiet $(ARGS) dist/*.whl
	dist/env/bin/python -P tests/try_package.py

mutate: .venv/.installed-test  ## plant known mistakes: does a test notice each? (ARGS="3 17" to choose)
	$(BIN)/python -m tests.mutations $(ARGS)

format: .venv/.installed-test  ## format and fix what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the environment and everything built
	rm -rf .venv .assets .cache dist runs site .mypy_cache .pytest_cache .ruff_cache

bench-%: .venv/.installed-bench  ## a script of bench/ beside its peers, such as kernels or train_step (ARGS="--help")
	$(BIN)/python -m bench $* $(ARGS)
