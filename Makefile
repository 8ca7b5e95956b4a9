# Everything starts here: `make demo` and `make test` need nothing but git, make and Python 3.11 or newer.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
STAMP := .venv/.installed

# Byte code must be kept: without it every command pays a second of compiling.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-slurm lint bench clean
.DEFAULT_GOAL := help

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1|/' | column -t -s '|' 2>/dev/null \
		|| grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with all that demo, tests and benchmarks need

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; install one, or say make PYTHON=/path/to/python" >&2; exit 1; }
	@sh tools/make-venv.sh "$(PYTHON)" .venv
	@echo "installing areal_sky and what it needs into .venv (some minutes the first time)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[sky,dev]'
	@touch $@

demo: setup ## the whole loop on this machine in about a minute
	@$(BIN)/areal-sky demo

lint: setup ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/pyright

test: lint ## lint, then every test that needs no Slurm
	$(BIN)/python -m pytest -q -m 'not slurm'

test-slurm: setup ## end-to-end tests with real SkyPilot on a local Slurm cluster (root on Debian: installs what it needs)
	@tests/testbed/packages.sh
	$(BIN)/python -m pytest -q -m slurm tests/slurm

bench: setup ## every benchmark against benchmarks/bounds.yaml; docs/benchmarks.md tells the figures
	$(BIN)/python -m benchmarks --check --keep

clean: ## remove .venv and caches
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
