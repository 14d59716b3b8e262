"""A choice of experts that rounding decides is told from an error of the kernels."""

from pathlib import Path

import pytest
from tests.engine.conftest import Load, Synthetic
from tests.engine.gpu import routing

from orinbench.check.reference import Reference
from orinbench.model import open_model

TOKENS = [(53 * i) % 1000 + 3 for i in range(8)]
HALVES = 0.005  # what halves leave in the logits, of their spread


@pytest.mark.parametrize("chunked", [True, False])
def test_a_tie_is_told_from_an_error(
    emulated: Load, synthetic: Synthetic, tmp_path: Path, chunked: bool
) -> None:
    """Two files differ by 2e-6 of a score: the kernels choose alike, in one of them otherwise."""
    differed = []
    for gap in (1e-6, -1e-6):
        path = tmp_path / f"{gap}.gguf"
        routing.plant_tie(synthetic("tiny-mixtral", "F16"), path, TOKENS, gap)
        executor, reference = emulated(path), Reference(open_model(path))
        found = routing.run(executor, TOKENS, chunked)
        own = routing.off(executor, reference.logits(TOKENS)[-1])
        flips = routing.flips(found, reference.routed)
        differed.append(any(position == len(TOKENS) - 1 for _, position, _ in flips))
        assert all(gap < 0.01 for *_, gap in flips)
        same = routing.off(executor, reference.logits(TOKENS, forced=routing.forced(found))[-1])
        assert same < HALVES
        assert own > 10 * HALVES if differed[-1] else own < HALVES
    assert sorted(differed) == [False, True]
