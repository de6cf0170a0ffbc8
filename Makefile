# dsched: `make run` and `make test` are all the set-up there is.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
DEV := requirements/dev.txt

.DEFAULT_GOAL := help
.PHONY: help run check test test-fast test-engines lint types bench clean

help: ## Show what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/.ready: pyproject.toml $(DEV)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r $(DEV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

run: $(VENV)/.ready ## Start the control plane on simulated engines; ARGS="..." adds flags
	$(BIN)/dsched run $(ARGS)

check: lint types test-fast ## Lint, types and the tests that need no engine

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell --quiet-level=3 dsched docs README.md Makefile make

types: $(VENV)/.ready
	$(BIN)/mypy

test-fast: $(VENV)/.ready ## Tests without real engines
	$(BIN)/pytest -q -n 2 --dist loadfile -m "not vllm and not sglang and not gpu and not slow"

test: $(VENV)/.ready engines ## The whole suite, real engines included
	$(BIN)/pytest -q -m "not gpu"

include $(wildcard make/*.mk)

.PHONY: engines
engines: .venv-vllm/.ready ## Make the environments of the real engines

clean: ## Remove what was made, environments included
	rm -rf $(VENV) .venv-vllm .venv-sglang .dsched build *.egg-info
