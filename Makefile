# dsched: `make run` and `make test` are all the set-up there is.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
DEV := requirements/dev.txt

.DEFAULT_GOAL := help
.PHONY: help run check test test-fast test-slow test-engines lint types bench clean
# Python keeps compiled tests also where the machine says not to: rewriting the assertions of all of
# them takes each process some 5 s.
export PYTHONDONTWRITEBYTECODE :=

help: ## Show what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/.ready: pyproject.toml $(DEV)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r $(DEV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

# Once a version of the kernels: numba keeps what it compiled beside them.
$(VENV)/.kernels: tools/compile_kernels.py $(shell grep -rl numba dsched --include=*.py) | $(VENV)/.ready
	$(BIN)/python $<
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

FAST := not vllm and not sglang and not gpu and not slow
SLOW := not vllm and not sglang and not gpu and slow
# Many fast tests wait more than they compute.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 2)

test-fast: $(VENV)/.kernels ## Tests without real engines that take less than a second
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m "$(FAST)"

test-slow: $(VENV)/.kernels ## The other tests without real engines
	$(BIN)/pytest -q -n auto --dist worksteal -m "$(SLOW)"

test-engines: engines $(VENV)/.kernels ## Tests of real engines, one after the other
	$(BIN)/pytest -q -m "(vllm or sglang) and not gpu"

test: test-fast test-slow test-engines ## The whole suite, real engines included

include $(wildcard make/*.mk)

.PHONY: engines
engines: .venv-vllm/.ready ## Make the environments of the real engines

clean: ## Remove what was made, environments included
	rm -rf $(VENV) .venv-vllm .venv-sglang .dsched build *.egg-info
