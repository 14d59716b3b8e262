"""Answers of a model on the fused kernels: what is kept, where they end, which path is taken."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engine.conftest import Load
from tests.engine.models import tokenizer

from orinllm.compiler import compiler_path
from orinllm.errors import BadInput
from orinllm.fused import FusedExecutor
from orinllm.model import Header, Model
from orinllm.network import Network, make_executor, plan_network
from orinllm.sampling import Sampling

PROMPT = [(37 * i) % 1000 + 3 for i in range(70)]
Synthetic = Callable[[str, str], Path]


def model(path: Path, executor: FusedExecutor, context: int) -> Model:
    """A model whose file has no words: those of another vocabulary stand for them."""
    network = Network.read(path, context)
    plan = plan_network(network, "EMU")
    assert plan.fused
    return Model(Header(network, tokenizer("gpt-2"), None), plan, executor)


def tokens(model: Model, prompt: list[int], n: int | None = None, **sampling: float) -> list[int]:
    answer = model.generate(prompt, Sampling(**sampling), max_tokens=n)  # type: ignore[arg-type]
    return [piece.token for piece in answer if piece.token >= 0]


def test_a_prompt_that_continues_reuses_the_cache(emulated: Load, synthetic: Synthetic) -> None:
    path = synthetic("tiny", "Q8_0")
    executor = emulated(path)
    one = model(path, executor, 128)
    first = tokens(one, PROMPT[:20], 3, temperature=0.0)
    longer = [*PROMPT[:20], *first, *PROMPT[20:33]]
    answer = one.generate(longer, Sampling(temperature=0.0), max_tokens=3)
    again = [piece.token for piece in answer if piece.token >= 0]
    # The last token was said and not read.
    assert (answer.n_prompt, answer.n_cached) == (36, 22)
    assert tokens(model(path, executor, 128), longer, 3, temperature=0.0) == again


def test_an_answer_ends_with_the_context(emulated: Load, synthetic: Synthetic) -> None:
    path = synthetic("tiny", "Q8_0")
    one = model(path, emulated(path, context=64), 64)
    answer = one.generate(PROMPT[:61], Sampling(temperature=0.0))
    assert len([piece for piece in answer if piece.token >= 0]) == 3
    assert answer.finish_reason == "length"
    with pytest.raises(BadInput, match="64 tokens and leaves no room in a context of 64"):
        one.generate(PROMPT[:64])


def test_temperature_samples(emulated: Load, synthetic: Synthetic) -> None:
    path = synthetic("tiny", "Q8_0")
    one = model(path, emulated(path), 128)
    drawn = tokens(one, PROMPT[:4], 6, temperature=30.0)
    assert all(0 <= token < 1024 for token in drawn)
    assert drawn != tokens(one, PROMPT[:4], 6, temperature=0.0)


def test_greedy_tokens_are_those_of_the_general_path(
    emulated: Load, synthetic: Synthetic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in compiler_path(tmp_path, os.environ).items():
        monkeypatch.setenv(name, value)
    path = synthetic("tiny", "Q6_K")
    fused = model(path, emulated(path), 128)
    network = Network.read(path, 128)
    plan = plan_network(network, "EMU")
    general = Model(fused.header, plan, make_executor(network, plan, general=True))
    want = tokens(general, PROMPT[:9], 6, temperature=0.0)
    assert tokens(fused, PROMPT[:9], 6, temperature=0.0) == want


def test_other_devices_take_the_general_path(
    synthetic: Synthetic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in compiler_path(tmp_path, os.environ).items():
        monkeypatch.setenv(name, value)
    network = Network.read(synthetic("tiny", "Q6_K"), 32)
    plan = plan_network(network, "CPU")
    assert not plan.fused
    assert plan.obstacles == {"device": "CPU is neither CUDA nor NV"}
    executor = make_executor(network, plan)
    assert executor.name == "general" and not isinstance(executor, FusedExecutor)
