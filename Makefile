# Everything is installed into .venv. Choose another Python with `PYTHON=python3.12 make …`.
BIN := .venv/bin
# Tests in one xdist_group share something slow to make, so one process runs them all.
PYTEST := $(BIN)/python -m pytest --second-try --dist loadgroup --no-loadscope-reorder --numprocesses
SLURM := $(BIN)/python -m tools.slurm_cluster

# Container images often set this; every command would then compile all its modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help dist docs docs-serve demo test test-all test-fast test-changed test-every test-smoke test-oldest test-newest lint parity bench gpu cluster lock clean programs slurm venv venv-test venv-rest .venv-docs .venv-dist

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

demo: venv ## Train a small model, kill it, resume it, and compare the losses.
	@$(BIN)/python -m tools.demo

# Side by side, since tests that wait leave a core to the type checker.
test: venv-test ## Style, types, all unit tests, and one real run of each kind.
	@$(MAKE) --no-print-directory --jobs 2 lint test-smoke

test-all: venv-rest ## Style, types, the documentation site and all tests, as continuous integration runs them (about 40 minutes on two cores).
	@$(MAKE) --no-print-directory --jobs 2 lint docs test-every

test-fast: venv-test ## Unit tests only.
	$(PYTEST) 2 -m "not slow"

test-changed: venv-test ## The unit tests that import what changed since `main`, or since the upstream of the branch.
	@$(BIN)/python -m tools.changed_tests

test-smoke: slurm programs
	$(PYTEST) 3 -m "not slow or smoke"

# Many of these wait for Slurm: more at a time than there are cores. `tests/conftest.py` has their order.
# Collected before: pytest compiles the assertions of all tests once then, not in each process.
test-every: slurm programs .venv-dist
	@$(SLURM) install --slurm 24.11
	@$(SLURM) install --slurm 26.05
	@-$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1
	$(PYTEST) 5 --durations 20

# Several GB each, so another disk may suit better: `make test-oldest OLDEST=/scratch/torch-2.11`
OLDEST := .venv-oldest
NEWEST := .venv-newest
TESTS_OF_TORCH := tests/trainer tests/plan/test_schedules.py tests/capabilities/bench/test_measure.py \
	tests/capabilities/simulation tests/capabilities/task_check tests/capabilities/transformers \
	tests/cli/test_check.py tests/launch/test_secrets.py

test-oldest: ## The tests of the trainer on torch 2.11, the oldest release that is accepted.
	@.ci/make-venv test "$(OLDEST)" constraints-oldest.txt
	"$(OLDEST)/bin/python" -m pytest --dist loadgroup --numprocesses 2 $(TESTS_OF_TORCH)

test-newest: ## The same on torch 2.15, the newest release that is accepted.
	@.ci/make-venv test "$(NEWEST)" constraints-newest.txt
	"$(NEWEST)/bin/python" -m pytest --dist loadgroup --numprocesses 2 $(TESTS_OF_TORCH)

# Material for MkDocs prints a notice about its successor otherwise.
MKDOCS := NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs

docs: .venv-docs ## Build the documentation site into site/; a broken link fails.
	$(MKDOCS) build --quiet

docs-serve: .venv-docs ## Show the documentation site on this machine.
	$(MKDOCS) serve

# The file .ready is made last, so that make repeats an interrupted installation.
.venv-docs/.ready: docs/requirements.txt
.venv-dist/.ready: tools/dist-requirements.txt
.venv-docs/.ready .venv-dist/.ready:
	python3 -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

.venv-docs: .venv-docs/.ready
.venv-dist: .venv-dist/.ready

dist: .venv-dist ## Build the source distribution, the wheel and the SBOM of a release into dist/, and check them.
	.venv-dist/bin/python tools/dist.py

lint: venv-test ## Style and types.
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy

parity: venv-test ## One model on every kind of layout, each compared with a single process.
	$(BIN)/python -m benchmarks.parity

bench: venv ## Measure trainkit against training loops written by hand.
	$(BIN)/python benchmarks/training_loop.py
	$(BIN)/python benchmarks/checkpoint_stall.py
	$(BIN)/python benchmarks/startup.py

gpu: ## Check and measure trainkit on one NVIDIA GPU (9 minutes), with the torch of its Python.
	@$${PYTHON:-python3} -m benchmarks.gpu $(if $(ONLY),--only $(ONLY)) $(if $(WHEELS),--wheels "$(WHEELS)")

cluster: venv ## Open a shell in a Slurm cluster of four hosts on this machine.
	@$(SLURM) install
	@$(SLURM) shell

lock: venv ## Write requirements-lock.txt, the packages that are tested with their hashes.
	$(BIN)/python -m tools.lock

clean: ## Remove .venv, builds and caches; keep runs/.
	rm -rf .venv .venv-dist .venv-docs .venv-oldest .venv-newest build dist site trainkit_hpc.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Without root or apt-get this only says why the tests on Slurm will be skipped; with CI=true it fails.
slurm: venv-test
	@$(SLURM) install

# As above: without them, tests are skipped.
programs:
	@.ci/install-programs

venv:
	@.ci/make-venv

venv-test:
	@.ci/make-venv test

# Not for `make test`: transformers and mlflow take longer to install than their unit tests to run.
venv-rest: venv-test
	@.ci/make-venv test,hf,peft,qlora,mlflow,wandb
