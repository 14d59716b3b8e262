"""0001-0005, 0015: a model decodes the CPU device's tokens whatever the hardware may do."""

from pathlib import Path

import pytest
from tests.patches.seeds import LOGITS_OFF, TOKENS, Runner, complaints


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeds")


def test_tokens_and_logits_under_every_adversary(state: Path) -> None:
    # Through TinyJit and graphs; `python -m tests.patches.seeds` runs more seeds and both paths.
    runner = Runner(state, "general")
    tokens, off = runner.expected()
    assert len(tokens) == TOKENS and len(set(tokens)) > TOKENS // 2
    assert off < LOGITS_OFF
    results = list(runner.warm_and_run([1]))
    assert [entry["seed"] for entry in results] == [None, 1]
    assert [c for entry in results for c in complaints(entry, tokens)] == []
    # The device's logits are those of float16, as the CPU device's are: no further away.
    assert results[0]["off"] < 2 * off
    assert all(entry["launches"] > 500 for entry in results[1:])


def test_a_difference_is_told() -> None:
    right = {"seed": 3, "tokens": [1, 2], "wrong": {}}
    assert complaints(right, [1, 2]) == []
    assert complaints(right, [1, 3]) == ["seed 3: other tokens: [1, 2]"]
    far = complaints({"seed": None, "tokens": [1], "off": 2 * LOGITS_OFF}, [1])
    assert far == [f"warm-up: logits off by {2 * LOGITS_OFF:.1e} of their spread"]
    fault = complaints({"seed": 4, "tokens": [1], "wrong": {"faults": ["MMU"]}}, [1])
    assert fault == ['seed 4: {"faults": ["MMU"]}']
