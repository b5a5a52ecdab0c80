# Two commands do all set-up: `make run` answers a question, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= smollm2:135m
PROMPT ?= Name the capital of France.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: setup run test lint types compile redline bench peers prove docs models compare clean

setup: $(VENV)/.dev

$(VENV)/.run: pyproject.toml constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "setting up $(VENV) (the first time takes a few minutes)" >&2
	$(PIP) torch
	$(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) --editable '.[dev]'
	@touch $@

# the main job: fetch a real model if need be, and answer
run: $(VENV)/.run
	$(BIN)/hipfire run $(MODEL) --temp 0 "$(PROMPT)"

test: lint types models
	$(BIN)/python -m pytest -n 2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

# every GPU kernel, compiled for AMD and NVIDIA where no GPU is: no spills, and the instructions that were meant
compile: setup
	$(BIN)/python scripts/compile_kernels.py

# proof that replayed decode steps change no byte, on the CPU: panels are how it holds weights
redline: models
	$(BIN)/python -m hipfire.validate.redline_harness --model $(MODEL) --weights panels --batch 1 2 --measures 0

# real models for the tests marked `real`; without a network those tests are reported as not run
models: setup
	-@$(BIN)/hipfire pull smollm2:135m
	-@$(BIN)/hipfire pull gemma3:270m

# logits of real models against transformers, in float32: prints the figures that docs/formats.md quotes
compare: models
	$(BIN)/python scripts/compare_with_transformers.py smollm2:135m --tokens 200
	$(BIN)/python scripts/compare_with_transformers.py gemma3:270m --tokens 700

# encode and decode rates of the weight formats on this machine
bench: setup
	$(BIN)/python benchmarks/formats.py

# decode, prefill and serving against llama.cpp, which is built once in an environment of its own (needs a C++ compiler)
peers: models
	$(PIP) --editable '.[bench]'
	$(BIN)/python benchmarks/cpu_peers.py --write-docs
	$(BIN)/python benchmarks/serve_peers.py --write-docs

# proofs of a served model: five related turns, and hundreds of requests of every kind while its engine is killed
prove: models
	$(BIN)/python scripts/serve_harness.py --model $(MODEL) --mode chain --thinking off --sampling greedy --kv q8 \
	  --max-seq 4096 --max-tokens 256
	$(BIN)/python scripts/serve_load.py --model $(MODEL) --clients 32 --requests 600 --kills 3

# the pages under docs/ are plain Markdown; this checks that their links lead somewhere
docs: setup
	$(BIN)/python -m pytest tests/pure/test_docs.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
