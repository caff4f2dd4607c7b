# SPDX-License-Identifier: Apache-2.0
# `make run` and `make test` each do everything that is needed on a fresh clone; `make help` lists the rest.

.SHELLFLAGS := -euc
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Which locked set of envs/ to work with: cpu or cuda.
LOCK ?= cpu
# Handed on to Snakemake or pytest: make run ARGS="--dry-run report"
ARGS ?=
# Version managers leave names that answer only with an error, so each one is asked what it is. Plain python3 comes
# last: it may be newer than the locked packages have wheels for.
PYTHON ?= $(firstword $(foreach name,python3.13 python3.12 python3.11 python3,\
	$(shell $(name) -c 'import sys; sys.version_info < (3, 11) or print("$(name)")' 2>/dev/null)))

VENV := .venv
BIN := $(VENV)/bin
# Twice quiet: a machine with several package sources prints a warning for each of them and package.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
# The lock is complete, so nothing is resolved; torch is the exception (envs/torch.txt).
PIP_LOCKED := $(PIP) --require-hashes --no-deps --no-build-isolation --use-pep517

# What the workflow starts (python, trellisbank) is what was installed here.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: run
run: $(VENV)/installed-$(LOCK) ## the whole workflow, from the checkpoint to the report
	$(BIN)/snakemake --profile local $(ARGS)

# Tests of whole files keep the fixtures of a file in one worker.
.PHONY: test
test: lint ## lint, then all tests
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

.PHONY: lint
lint: $(VENV)/installed-dev ## formatting, types, import rules, the workflow's own lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/snakefmt --check Snakefile rules
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/snakemake --lint

.PHONY: check-tiny
check-tiny: $(VENV)/installed-$(LOCK) ## show that the shipped checkpoint has learnt
	$(BIN)/python resources/tiny/check.py

.PHONY: bench
bench: $(VENV)/installed-$(LOCK) ## speed of the encoder and the planner
	$(BIN)/python benchmarks/encode_cpu.py
	$(BIN)/python benchmarks/plan.py

.PHONY: clean
clean: ## remove the environment and caches; results and their records stay
	rm -rf $(VENV) build workflow/trellisbank.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -path ./results -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/bin/pip:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	"$(PYTHON)" -m venv --clear $(VENV)

$(VENV)/installed-cpu $(VENV)/installed-cuda: $(VENV)/installed-%: envs/%.txt envs/build.txt envs/torch.txt pyproject.toml | $(VENV)/bin/pip
	@echo "Installing envs/$*.txt and torch into $(VENV): minutes the first time"
	@$(PIP_LOCKED) -r envs/build.txt
	@$(PIP_LOCKED) -r envs/$*.txt
	@$(PIP) -r envs/torch.txt
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/installed-dev: envs/dev.txt $(VENV)/installed-$(LOCK)
	@echo "Installing envs/dev.txt into $(VENV)"
	@$(PIP_LOCKED) -r envs/dev.txt
	@touch $@

# Versions that are locked stay as they are while pyproject.toml allows them; ARGS=--upgrade renews them.
UV_COMPILE = $(BIN)/uv pip compile --quiet --universal --fork-strategy fewest --python-version 3.11 --generate-hashes \
	--no-emit-package torch --custom-compile-command "make lock" $(ARGS)

.PHONY: lock
lock: $(VENV)/installed-dev ## remake envs/*.txt from pyproject.toml
	$(UV_COMPILE) --group build -o envs/build.txt
	$(UV_COMPILE) --excludes envs/no-cuda.in -c envs/build.txt pyproject.toml -o envs/cpu.txt
	$(UV_COMPILE) --extra cuda -c envs/build.txt -c envs/cpu.txt pyproject.toml -o envs/cuda.txt
	$(UV_COMPILE) --group dev -c envs/build.txt -c envs/cpu.txt -c envs/cuda.txt -o envs/dev.txt
