SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
export HF_HUB_OFFLINE ?= 1
# Set in some containers; every start of Python would then compile all that it imports anew.
unexport PYTHONDONTWRITEBYTECODE
# Threads of the single rank: four at most, since the bundled model's matrices are small.
RANK_THREADS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))

.PHONY: help env env-bench demo test test-all check format lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

env:  ## make the environment .venv from the lock file
	@tools/setup_env.sh

# verl's own requirements do not go with the locked packages; the benchmark reads its loss modules alone.
env-bench: env  ## add the loss paths of other projects, which tools/benchmark_loss.py compares with
	@$(BIN)/uv pip install --quiet --system-certs --constraint requirements.lock --editable '.[bench]'
	@$(BIN)/uv pip install --quiet --system-certs --no-deps verl==0.9.1

demo: env  ## train the bundled model with DRPO in FP8 and show its reward rise
	OMP_NUM_THREADS=$(RANK_THREADS) $(BIN)/torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 1 \
		pretrain_rl.py --loss drpo --fp8-format e4m3 --run-dir runs/demo

test: env  ## run every test but the largest layouts
	$(BIN)/python -m pytest -m "not large"

test-all: env  ## run every test
	$(BIN)/python -m pytest

check: env  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy megatron/rl pretrain_rl.py tools

format: env  ## mend lint and format where it can be done by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: env  ## resolve pyproject.toml anew into requirements.lock
	$(BIN)/uv pip compile --quiet --universal --python-version 3.12 --system-certs --generate-hashes --no-header \
		--no-emit-index-url --extra dev pyproject.toml --output-file requirements.lock

clean:  ## remove the environment, caches and runs
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache
