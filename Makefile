# Everything is installed into .venv. `PYTHON=python3.12 make …` makes it with another Python.
BIN := .venv/bin
# A group is of tests that share what takes long to make: one process runs them all.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint parity bench cluster clean venv venv-test

define NEXT

What to type next:

  . .venv/bin/activate                     puts `trainkit` on your PATH
  trainkit status last                     how the run went
  trainkit logs last                       what it printed

Kill a run and go on from its newest checkpoint, this time on one node:

  trainkit submit configs/quickstart.yaml --nodes 2
  trainkit logs last -f                    until there is a checkpoint; Ctrl-C leaves it
  trainkit cancel last --now               kills it without saving
  trainkit resume last --nodes 1 --follow
endef
export NEXT

help: ## List what can be made.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

demo: venv ## Train a small model as a two-node job on this machine.
	$(BIN)/trainkit submit configs/quickstart.yaml --nodes 2 --follow
	$(BIN)/trainkit status last
	@echo "$$NEXT"

test: lint ## Everything that has to hold: style, types and all tests, on a real Slurm cluster too when root.
	$(BIN)/python -m tools.slurm_cluster install
	$(PYTEST)

test-fast: venv-test ## The tests that start no training, in less than two minutes.
	$(PYTEST) -m "not slow"

lint: venv-test ## Style and types.
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy

parity: venv-test ## One model on every kind of layout, each held against one process.
	$(BIN)/python -m benchmarks.parity

bench: venv ## What trainkit costs, measured against loops written by hand.
	$(BIN)/python benchmarks/training_loop.py
	$(BIN)/python benchmarks/checkpoint_stall.py
	$(BIN)/python benchmarks/startup.py

cluster: venv ## A shell in a Slurm cluster of four hosts on this machine, gone when you leave it.
	@$(BIN)/python -m tools.slurm_cluster install
	@$(BIN)/python -m tools.slurm_cluster shell

clean: ## Remove .venv, builds and caches; runs/ stays.
	rm -rf .venv build dist trainkit.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

venv:
	@.ci/make-venv

venv-test:
	@.ci/make-venv test
