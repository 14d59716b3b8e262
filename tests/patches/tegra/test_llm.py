"""0001-0005, 0015: a model decodes the CPU device's tokens whatever the hardware may do."""

from pathlib import Path

import pytest
from tests.patches.probes.seeds import LOGITS_OFF, Runner, complaints, write_model

COUNT = 8


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeds")
    write_model(folder / "model.gguf", 64, "Q8_0")  # as many launches, of less work
    return folder


def test_tokens_and_logits_under_every_adversary(state: Path) -> None:
    # Through TinyJit and graphs, six tokens by replay of the graph that the first two capture;
    # `python -m tests.patches.probes.seeds` runs a larger model, 32 tokens, more seeds, both paths.
    runner = Runner(state, "general", COUNT)
    tokens, off = runner.expected()
    assert len(tokens) == COUNT and len(set(tokens)) > COUNT // 2
    limit = LOGITS_OFF["general"]
    assert off < limit
    (result,) = runner.run([1])
    assert complaints(result, tokens, limit) == []
    # The device's logits are those of float16, as the CPU device's are: no further away.
    assert result["off"] < 2 * off
    assert result["launches"] > 50 * COUNT


def test_a_difference_is_told() -> None:
    right = {"seed": 3, "tokens": [1, 2], "wrong": {}}
    assert complaints(right, [1, 2], 0.1) == []
    assert complaints(right, [1, 3], 0.1) == ["seed 3: other tokens: [1, 2]"]
    far = complaints({"seed": 2, "tokens": [1], "off": 0.2}, [1], 0.1)
    assert far == ["seed 2: logits off by 2.0e-01 of their spread"]
    fault = complaints({"seed": 4, "tokens": [1], "wrong": {"faults": ["MMU"]}}, [1], 0.1)
    assert fault == ['seed 4: {"faults": ["MMU"]}']
