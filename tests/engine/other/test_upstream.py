"""Architectures that tinygrad.llm's own Transformer runs, against llama.cpp's logits (F32)."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from tests.engine.models import tokenizer
from tests.engine.other import upstream_models

from orinbench.measure.backends.timed_models import RunnerExecutor
from orinllm.choose.sampling import Sampling
from orinllm.gpu.host_compiler import compiler_environment
from orinllm.loader import Network, make_page_store, make_runner, plan_network
from orinllm.model import Model, ModelDescription

WANTED = json.loads(upstream_models.GOLDEN.read_text())


@pytest.fixture(autouse=True)
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in compiler_environment(tmp_path, os.environ).items():
        monkeypatch.setenv(key, value)


@pytest.mark.parametrize("name", upstream_models.MODELS)
def test_logits_are_llama_cpps(tmp_path: Path, name: str) -> None:
    """tinygrad.llm casts weights to halves, whence the tolerance; then the prompt a second time."""
    upstream_models.write(tmp_path / "m.gguf", name)
    network = Network.read(tmp_path / "m.gguf", upstream_models.CONTEXT)
    plan = plan_network(network, "CPU")
    # The gated delta net has two paths on a CPU, the other one in test_hybrid.py too.
    for general in [True] if not network.config.layers else [True, False]:
        _check(RunnerExecutor(make_runner(network, plan, general)), name)


def _check(executor: RunnerExecutor, name: str) -> None:
    tokens, want = list(upstream_models.PROMPT), np.array(WANTED[name])
    for _ in range(2):
        executor.fill_cache(tokens, 0, len(tokens) - 1)
        executor.submit_step(tokens[-1], len(tokens) - 1)
        error = executor.wait_for_logits().astype(np.float64) - want
        assert np.sqrt((error**2).mean()) < 1e-2 * want.std()
        assert executor.wait_for_token() == want.argmax()


def test_a_recurrent_state_does_not_go_back(tmp_path: Path) -> None:
    """A prompt that differs in the middle begins anew; one that goes on reads the rest alone."""
    upstream_models.write(tmp_path / "m.gguf", "qwen35")
    network = Network.read(tmp_path / "m.gguf", upstream_models.CONTEXT)
    plan, description = (
        plan_network(network, "CPU"),
        ModelDescription(network, tokenizer("gpt-2"), None),
    )
    runner = make_runner(network, plan, general=True)
    model = Model(description, plan, runner, make_page_store(runner, network))

    def answer(prompt: list[int]) -> tuple[list[int], int]:
        generation = model.generate(prompt, Sampling(temperature=0), max_tokens=3)
        list(generation)
        return generation.tokens, generation.n_cached

    first, prompt = list(upstream_models.PROMPT), [*upstream_models.PROMPT[:5], 9, 8]
    said, _ = answer(prompt)
    answer(first)
    assert answer(prompt) == (said, 0)
    assert answer([*prompt, *said, 7])[1] == len(prompt) + 2
