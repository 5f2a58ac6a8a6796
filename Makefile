# Every target works from a fresh checkout and may be run again at any time.
SHELL := /bin/bash
# Debian keeps mke2fs and others out of a plain user's PATH.
export PATH := $(PATH):/usr/local/sbin:/usr/sbin:/sbin
BIN := .venv/bin

.PHONY: help demo test check format setup dev clean

help:  ## say what the targets do
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

demo: setup  ## build, sign, push, pull, verify and fork examples/notes-service
	$(BIN)/python scripts/demo.py

test: check  ## every check and every test, the ones that boot machines too
	$(BIN)/python -m pytest

check: dev  ## formatting, lint, types and layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: dev  ## rewrite the Python files in the project's style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup:  ## install what `make demo` needs
	@scripts/setup.sh

dev:  ## install what `make test` needs
	@scripts/setup.sh --dev

clean:  ## remove what the targets above left in the checkout; system packages stay
	rm -rf .venv .demo build dist *.egg-info tests/trust/node/node_modules
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
