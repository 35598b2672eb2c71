# Every target makes its own environment in .venv first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp

# Another torch than the pinned one: make test TORCH='2.11.*'
TORCH ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-trainers check format coverage bench compare programs docs notebooks clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv with the pinned development tools

$(STAMP): pyproject.toml lab/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@grep -v $(if $(TORCH),-e '^torch==' -e '^triton==',-e '^$$') constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt \
		$(if $(TORCH),'torch==$(TORCH)') -e '.[dev]' -e './lab[dev]'
	@touch $@

demo: setup  ## train a CNN on embedded digits with six methods, forward-only first, write runs/demo/report.html
	$(BIN)/jetplane demo --out runs/demo

test: setup  ## run all tests and the examples in docstrings
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

test-all: setup  ## run everything, the slow tests too, and print the time of each room
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --rooms

test-trainers: setup  ## install transformers, Lightning and accelerate, and run what needs them
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[accelerate,lightning,transformers]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/integrations src/jetplane/integrations \
		tests/test_examples.py tests/test_documents.py

check: setup  ## formatting, lint, types, direction of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## format the code and apply safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

SINCE ?= HEAD
compare: setup  ## time the files as they are and a commit: make compare SINCE=main; fails if something is slower
	$(BIN)/jetplane bench --compare $(SINCE) . --out runs/compare

programs: setup  ## compare other people's programs with backprop; fails if one is wrong (some hours; installs packages)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		transformers timm diffusers peft torch_geometric gpytorch torchdiffeq e3nn zuko nflows normflows
	$(BIN)/python -m benchmarks.programs --out runs/programs.json

DOCS_STAMP := $(VENV)/.docs-stamp

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(DOCS_STAMP)  ## build the site into runs/site; a broken link ends it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: setup  ## run the examples that are notebooks, too, and keep their outputs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[notebooks]'
	$(BIN)/python docs/site/notebooks.py

coverage: setup  ## check every entry of PyTorch's operation database and rewrite docs/coverage.md
	$(BIN)/jetplane coverage --device cpu --out docs/coverage.md

bench: setup  ## time the projected Hessian of a CNN against other ways to compute it (runs/bench.json)
	@mkdir -p runs
	$(BIN)/python benchmarks/projected_hessian.py --out runs/bench.json

clean:  ## remove the environment, caches and build outputs
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache \
		src/*.egg-info lab/src/*.egg-info lab/build lab/dist
	find src tests lab -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
