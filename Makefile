# Everything that a person or CI runs. Each target makes the environment that it needs: Python 3.11+ and make suffice.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# To choose another interpreter, folder or number of test workers: make test PYTHON=python3.12 WORKERS=4
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 4
# Passed on by `demo`, `test` and `bench`: make test ARGS='tests/planning -n 0 -v', make demo ARGS=--json
ARGS ?=

# Both names, since newer versions of pip keep the constraints of a package's build apart.
PIP := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
       $(VENV)/bin/python -m pip
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help venv demo test lint format docs bench package clean

help: ## Show what there is
	@awk 'BEGIN { FS = ":.*## " } /^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP) ## Make the virtual environment, anew where pyproject.toml or constraints.txt changed

# Messages go to stderr: `make demo ARGS=--json` prints one JSON document and nothing else, on a fresh machine too.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'Python 3.11 or newer is needed: give one with PYTHON=/path/to/python' >&2; exit 1; }
	@echo 'making $(VENV) (some minutes where packages must be downloaded) ...' >&2
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) \
	  || { echo 'The venv module is missing: on Debian install python3-venv' >&2; exit 1; }
	@$(PIP) install -qq -e '.[dev]' >&2
	@touch $@

demo: $(STAMP) ## Make a small checkpoint and load it, target and draft, on two ranks
	@$(BIN)/loader-service demo $(ARGS)

test: $(STAMP) ## Run all tests
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: $(STAMP) ## Check style, types and the direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(STAMP) ## Rewrite the code in the project's style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(STAMP) ## Make the reference pages and pictures in docs/ anew, from the code
	@$(BIN)/python -m tools.docs

bench: $(STAMP) ## Measure catalog, plan, streaming, tables, drafts and agreement, and print the tables
	@$(BIN)/python -m benchmarks $(ARGS)

# The second environment borrows the first one's dependencies, but not its editable install of this project.
package: $(STAMP) ## Build the wheel into dist/ and try it in an environment of its own
	@rm -rf dist build/package
	@$(PIP) wheel -qq --no-deps --wheel-dir dist . >&2
	@$(PYTHON) -m venv --without-pip build/package
	@$(PIP) --python build/package/bin/python install -qq --no-deps dist/*.whl >&2
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$(build/package/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
	@cd build/package && bin/loader-service --help > /dev/null
	@cd build/package && bin/python -c 'import importlib.resources as r; f = r.files("loader_service"); assert "build/package" in str(f) and (f / "py.typed").is_file(), f'
	@rm -rf build/package
	@echo "built and tried: $$(echo dist/*.whl)"

clean: ## Remove the environment and everything that was made
	rm -rf $(VENV) .demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find loader_service tests tools -name __pycache__ -prune -exec rm -rf {} +
