PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/installed
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

.PHONY: help quickstart test test-lowest check format
.PHONY: check-format check-lint check-types check-spelling check-architecture

help:
	@echo "make quickstart   train a small model on the CPU"
	@echo "make test         run the tests"
	@echo "make test-lowest  run the unit tests with the lowest versions that are allowed"
	@echo "make check        format, lint, types, spelling, import floors"
	@echo "make format       format the code and sort its imports"
	@echo "ARGS=\"...\" is handed on by quickstart and test; PYTHON=... makes .venv, where all of them work."

quickstart: $(INSTALLED)
	@$(BIN)/python -m lightning_boost fit --config recipes/quickstart.yaml $(ARGS)

# files start in the order of their names, so that the many short ones of tests/unit even out the end
test: $(INSTALLED)
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# the extra hf is left out: what it needs asks for newer ones
test-lowest:
	@$(PYTHON) -m venv .venv-lowest
	@sed -n '/^dependencies/,/^dev =/p' pyproject.toml | grep -oE '"[a-z-]+[0-9]?(\[[a-z]+\])?>=[0-9.]+' \
		| sed -E 's/"|\[[a-z]+\]//g; s/>=/==/' > .venv-lowest/constraints.txt
	@.venv-lowest/bin/python $(PIP_INSTALL) --editable ".[tokenizers,charts]" pytest pytest-xdist \
		--constraint .venv-lowest/constraints.txt
	@.venv-lowest/bin/python -m pytest --numprocesses 2 --dist loadfile tests/unit tests/kernels $(ARGS)

check: check-format check-lint check-types check-spelling check-architecture

format: $(INSTALLED)
	@$(BIN)/ruff check --quiet --select I --fix .
	@$(BIN)/ruff format .

check-format: $(INSTALLED)
	@$(BIN)/ruff format --check .

check-lint: $(INSTALLED)
	@$(BIN)/ruff check .

check-types: $(INSTALLED)
	@$(BIN)/mypy

check-spelling: $(INSTALLED)
	@$(BIN)/codespell

check-architecture: $(INSTALLED)
	@$(BIN)/python -m pytest --quiet --override-ini addopts=--import-mode=importlib tests/test_architecture.py

$(INSTALLED): pyproject.toml
	@echo "installing into .venv (the first time takes some minutes)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python $(PIP_INSTALL) --editable ".[dev]"
	@touch $@
