# From The Pile's shards to a trained LLaMA. `make` alone lists the targets.
# Everything here is one call of `python -m pipeline` or `python -m trainer`.

# Variables, each with the option it becomes. ARGS is passed through to the command as it is.
DATA      ?= data/pile#          --data: where the shards are
SHARDS    ?= all#                --shards: 00-29, 00,02,05-07, names, or all
BINS      ?= bins/pile#          the dataset directory
TOKENIZER ?= $(patsubst %/,%,$(dir $(patsubst %/,%,$(BINS))))/tokenizer.json# --tokenizer
VOCAB     ?= 50257#              --vocab-size of a new tokenizer
WORKERS   ?=#                    --workers: processes; all cores if not set
CONFIG    ?= configs/125m.toml#  what to train
RUN       ?= runs/$(basename $(notdir $(CONFIG)))# the run directory
NGPU      ?=#                    --ngpu: ranks, on GPUs or, without one, on the CPU
STEPS     ?=#                    --set train.steps=
ARGS      ?=#                    anything else
TORCH     ?= torch==$(shell sed -n 's/^torch==//p' constraints.txt)# another build: a requirement or a wheel
SYSTEM_PYTHON ?= python3#        makes the virtual environment; 3.11 or newer

VENV_PYTHON := .venv/$(if $(filter Windows_NT,$(OS)),Scripts,bin)/python
PYTHON    ?= $(VENV_PYTHON)#     a Python of your own is used as it is
READY     := $(if $(filter $(VENV_PYTHON),$(PYTHON)),.venv/ready)

# An option is passed only when its variable was given, so that a config's own value stands.
option = $(if $($(1)),$(2) '$($(1))')

.DEFAULT_GOAL := help
.PHONY: help setup demo tokenizer tokenize verify train sample test test-slow accept check lint types format clean

help: ## list the targets and the variables
	@echo 'targets:'
	@sed -n 's/^\([a-z-]*\):.*## /  \1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-14s %s\n", $$1, $$2}'
	@echo 'variables (NAME ?= default# what it is):'
	@sed -n 's/^\([A-Z_]* *?=\)/  \1/p' $(MAKEFILE_LIST)

setup: ## virtual environment with the pinned packages, editable install
	@$(SYSTEM_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$$($(SYSTEM_PYTHON) --version) is too old: set SYSTEM_PYTHON to a Python >= 3.11"; exit 1; }
	@test -x $(VENV_PYTHON) || $(SYSTEM_PYTHON) -m venv .venv
	$(VENV_PYTHON) -m pip install --quiet '$(TORCH)'
	@grep -v '^torch==' constraints.txt > .venv/constraints.txt
	$(VENV_PYTHON) -m pip install --quiet --constraint .venv/constraints.txt --editable '.[dev]'
	@touch .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory setup

demo: $(READY) ## the whole way on the sample inside the repository, in a few minutes
	$(PYTHON) -m pipeline train-tokenizer --data tests/sample --vocab-size 4096 --out bins/demo/tokenizer.json
	$(PYTHON) -m pipeline tokenize --data tests/sample --tokenizer bins/demo/tokenizer.json --out bins/demo/pile
	$(PYTHON) -m pipeline verify bins/demo/pile
	$(PYTHON) -m trainer train configs/demo.toml --run runs/demo
	$(PYTHON) -m trainer sample runs/demo --prompt "The database"

tokenizer: $(READY) ## train a byte-level BPE: DATA SHARDS VOCAB TOKENIZER
	$(PYTHON) -m pipeline train-tokenizer --data '$(DATA)' --shards '$(SHARDS)' --vocab-size '$(VOCAB)' --out '$(TOKENIZER)' $(ARGS)

tokenize: $(READY) ## shards to token bins: DATA SHARDS TOKENIZER BINS WORKERS
	$(PYTHON) -m pipeline tokenize --data '$(DATA)' --shards '$(SHARDS)' --tokenizer '$(TOKENIZER)' --out '$(BINS)' $(call option,WORKERS,--workers) $(ARGS)

verify: $(READY) ## re-read every byte of the bins: BINS
	$(PYTHON) -m pipeline verify '$(BINS)' $(ARGS)

train: $(READY) ## train, or go on where it stopped: CONFIG RUN BINS NGPU STEPS
	$(PYTHON) -m trainer train '$(CONFIG)' --run '$(RUN)' $(call option,NGPU,--ngpu) $(if $(filter file,$(origin BINS)),,--set 'data.bins=$(BINS)') $(if $(STEPS),--set 'train.steps=$(STEPS)') $(ARGS)

sample: $(READY) ## text from a run's newest checkpoint: RUN
	$(PYTHON) -m trainer sample '$(RUN)' $(ARGS)

test: $(READY) ## the test suite, under 90 s on two cores
	$(PYTHON) -m pytest -m "not slow and not accept" $(ARGS)

test-slow: $(READY) ## the slow tests: kills, two ranks, end to end
	$(PYTHON) -m pytest -m "slow and not accept" --durations=5 $(ARGS)

accept: $(READY) ## the tests on the handed material in ../shared
	$(PYTHON) -m pytest -m accept --durations=5 $(ARGS)

check: lint types ## lint, format and types

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: $(READY)
	$(PYTHON) -m basedpyright

format: $(READY) ## format and fix the sources
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

clean: ## remove the demo's bins and run
	rm -rf bins/demo runs/demo
