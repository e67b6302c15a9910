# Every target works from a fresh clone: it sets up .venv first, and skips that when nothing changed.
PYTHON ?= python3
TORCH_INDEX_URL ?= https://download.pytorch.org/whl/cpu
ROUNDS ?=
WORKERS ?= 2
MODEL ?=
DEMO_OPTIONS = $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(HELDOUT),--heldout $(HELDOUT))
BIN := .venv/bin
SETUP := .venv/setup-done
AGENTS := .venv-agents/setup-done
export PYTHON TORCH_INDEX_URL
export MAKE_GOAL := $(firstword $(MAKECMDGOALS))
export HF_HUB_DISABLE_TELEMETRY := 1
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Images of containers often turn bytecode off. Tests start hundreds of processes: without it each compiles all its modules.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo demo-control demo-tiny setup test test-ci test-slow check format collector serve dataset train bench bench-guard wheel clean
.DEFAULT_GOAL := help

help:
	@echo "make demo          train a pretrained model (SmolLM2, 135 million weights; MODEL=… takes another) until it is better"
	@echo "make demo-control  the demo with random rewards: success must stay within .10"
	@echo "make demo-tiny     the demo with a model of 0.6 million weights made from scratch (about 8 minutes on 2 cores)"
	@echo "make test          run the tests, including the end-to-end test with a real vLLM server"
	@echo "make check         ruff, mypy, pyright;  make test-ci: the tests that take longer (20 minutes);  make test-slow: the longest"
	@echo "make bench         measurements;  make bench-guard: whether a part is slower than the last stored measurement (6 minutes)"
	@echo "make collector | serve | dataset | train   one process of the loop, like the command of that name"
	@echo "make wheel         build dist/trainspan-*.whl, for the environments of agents"
	@echo "make setup         only install into .venv;  make clean: remove .venv, .venv-agents and caches (never .trainspan)"

$(SETUP): pyproject.toml constraints/cpu.txt constraints/gpu.txt tools/setup.sh tools/preflight.py
	@tools/setup.sh
	@touch $@

# The environment of the agents in tests: frameworks, and trainspan's base install only.
$(AGENTS): pyproject.toml constraints/agents.txt tools/agents.sh | $(SETUP)
	@tools/agents.sh
	@touch $@

setup: $(SETUP)

demo: $(SETUP)
	@$(BIN)/python examples/shop/demo.py $(DEMO_OPTIONS) $(if $(MODEL),--model $(MODEL))

demo-control: $(SETUP)
	@$(BIN)/python examples/shop/demo.py --control $(DEMO_OPTIONS) $(if $(MODEL),--model $(MODEL))

demo-tiny: $(SETUP)
	@$(BIN)/python examples/calculator/demo.py $(DEMO_OPTIONS)

test: $(SETUP) $(AGENTS)
	@$(BIN)/pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder -m "not ci and not slow and not gpu"

test-ci: $(SETUP) $(AGENTS)
	@$(BIN)/pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder -m "ci and not slow and not gpu"

test-slow: $(SETUP) $(AGENTS)
	@$(BIN)/pytest -m "slow and not gpu"

check: $(SETUP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/pyright

format: $(SETUP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

collector serve dataset train: $(SETUP)
	@$(BIN)/trainspan $@ $(ARGS)

bench: $(SETUP) $(AGENTS)
	@$(BIN)/python -m benchmarks

bench-guard: $(SETUP)
	@$(BIN)/python -m benchmarks.guard

wheel: $(SETUP)
	@$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf .venv .venv-agents .pytest_cache .mypy_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
