# make help lists what there is. Everything runs in .venv, which appears when first needed.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
PIP_INSTALL := $(BIN)/python -m pip install -qq --constraint constraints.txt

# How long `make soak` lets the swarm run, from which seed on (fresh ones each time), and which of
# the long tests it runs; FUZZ: how many inputs each decoder gets.
SWARM_S ?= 600
SEED ?= $$(date +%s)
SOAK ?= tests
FUZZ ?= 100000

# Tests that start no trainer: the quick ones.
QUICK_TESTS := $(wildcard tests/architecture tests/config tests/model tests/core tests/coding)

# Which contenders `make bench-peers` has: all of benchmarks/peers/saver.py when it is empty. QUICK=1: the
# small state, one short round.
PEERS ?=
QUICK ?=

.PHONY: help install demo test soak swarm fuzz integrations browser check lint prose docs site bench bench-peers clean

help:
	@echo "make install  set up .venv: PyTorch (CPU), keepstep (editable), what the checks need"
	@echo "make demo     kill a training job and watch it go on: about a minute"
	@echo "make check    lint, types, prose and the quick tests: under a minute"
	@echo "make prose    what a linter for English, and the glossary, have to say about the documentation"
	@echo "make test     every test but the long ones: some 10 minutes on two cores"
	@echo "make soak     the long ones: most tests of real processes, planted bugs, and SWARM_S seconds of the swarm (600) from SEED on"
	@echo "make integrations  install other libraries (Hugging Face, Lightning) into .venv, and kill their loops"
	@echo "make browser  install what the dashboard's tests in a browser need: Playwright, and Chromium where there is none"
	@echo "make docs     write docs/configuration.md, docs/codes.md and docs/lost.md anew from their tables"
	@echo "make site     the documentation as a site, in build/site; links that lead nowhere are errors"
	@echo "make bench    what saving every step costs, what redundancy reaches, how long a killed rank is missed"
	@echo "make bench-peers  keepstep beside other projects' savers, each in an environment of its own; PEERS=\"torch_save keepstep\" QUICK=1"
	@echo "make clean    remove .venv and everything built"

install: $(INSTALLED)
	@echo ".venv is ready"

# torch comes first and alone: its pin admits only the CPU build, so nothing can pull in CUDA packages.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "setting up .venv: a minute or two"
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) torch || { \
	  echo >&2 "No CPU build of PyTorch at the version constraints.txt pins was found; CUDA builds are refused. See Setup in CONTRIBUTING.md."; \
	  exit 1; }
	@$(PIP_INSTALL) hatchling editables
	@$(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $@

demo: $(INSTALLED)
	@$(BIN)/python examples/demo.py

browser: $(INSTALLED)
	@$(PIP_INSTALL) --no-build-isolation --editable '.[browser]'
	@command -v chromium >/dev/null || $(BIN)/playwright install chromium || \
	  echo >&2 "Chromium could not be had: apt-get install chromium, or the tests that need it will skip"

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

prose: $(INSTALLED)
	@$(BIN)/python .ci/prose

check: lint prose
	@$(BIN)/python -m pytest -q --numprocesses auto $(QUICK_TESTS)

test: $(INSTALLED)
	@$(BIN)/python -m pytest -q --numprocesses auto --maxprocesses 4 --dist loadgroup

soak: swarm fuzz
	@$(BIN)/python -m pytest -q -m soak $(SOAK)

swarm: $(INSTALLED)
	@first=$(SEED) && $(BIN)/python -m keepstep.sim.protocol.swarm --seeds $$first:$$((first + 1000000)) --within-s $(SWARM_S)

fuzz: $(INSTALLED)
	@$(BIN)/python -m tests.fuzz --inputs $(FUZZ)

integrations: $(INSTALLED)
	@$(PIP_INSTALL) --no-build-isolation --editable '.[integrations]'
	@$(BIN)/python -m pytest -q -m "" tests/processes/test_integrations.py tests/edge/torch/test_loader.py

docs: $(INSTALLED)
	@$(BIN)/python -m keepstep.cli.configuration_page > docs/configuration.md
	@$(BIN)/python -m keepstep.cli.codes_page > docs/codes.md
	@$(BIN)/python -m keepstep.cli.lost_page > docs/lost.md

site: $(INSTALLED)
	@$(PIP_INSTALL) --no-build-isolation --editable '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: $(INSTALLED)
	@$(BIN)/python benchmarks/stall.py
	@$(BIN)/python benchmarks/redundancy.py --quick
	@$(BIN)/python benchmarks/recovery.py --quick

bench-peers: $(INSTALLED)
	@$(BIN)/python -m benchmarks.peers.environments $(PEERS)
	@$(BIN)/python -m benchmarks.peers $(if $(PEERS),--peers $(PEERS)) $(if $(QUICK),--quick)

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
