SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
export HF_HUB_OFFLINE ?= 1
# Set in some containers; every start of Python would then compile all that it imports anew.
unexport PYTHONDONTWRITEBYTECODE
# Threads of the single rank: four at most, since the bundled model's matrices are small.
RANK_THREADS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))

.PHONY: help env env-bench env-vllm env-sglang demo test test-all test-engines check format lock lock-engines clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

env:  ## make the environment .venv from the lock file
	@tools/setup_env.sh

# verl's own requirements do not go with the locked packages; the benchmark reads its loss modules alone.
env-bench: env  ## add the loss paths of other projects, which tools/benchmark_loss.py compares with
	@$(BIN)/uv pip install --quiet --system-certs --constraint requirements.lock --editable '.[bench]'
	@$(BIN)/uv pip install --quiet --system-certs --no-deps verl==0.9.1

env-vllm: env  ## make .venv-vllm, where the vLLM server for CPUs lives
	@tools/setup_engine.sh vllm

env-sglang: env  ## make .venv-sglang, where the SGLang server for CPUs lives
	@tools/setup_engine.sh sglang

demo: env  ## train the bundled model with DRPO in FP8 and show its reward rise
	OMP_NUM_THREADS=$(RANK_THREADS) $(BIN)/torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 1 \
		pretrain_rl.py --loss drpo --fp8-format e4m3 --run-dir runs/demo

test: env  ## run every test but the largest layouts
	$(BIN)/python -m pytest -m "not large"

test-all: env  ## run every test
	$(BIN)/python -m pytest

test-engines: env env-vllm env-sglang  ## run the tests on real vLLM and SGLang servers
	$(BIN)/python -m pytest tests/engine_tests

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

# Wheels of these engines are for one platform each; torch has to be named anew, since they ask for other builds of it.
lock-engines: env  ## resolve the packages of the servers for CPUs into tools/engines/*.lock
	for engine in vllm sglang; do $(BIN)/uv pip compile --quiet --python-version 3.12 \
		--python-platform x86_64-manylinux_2_34 --system-certs --generate-hashes --no-header --no-emit-index-url \
		--override tools/engines/$$engine.overrides tools/engines/$$engine.in \
		--output-file tools/engines/$$engine.lock || exit 1; done

clean:  ## remove the environment, caches and runs
	rm -rf .venv .venv-vllm .venv-sglang runs .pytest_cache .mypy_cache .ruff_cache
