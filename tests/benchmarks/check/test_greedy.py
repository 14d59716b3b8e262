"""The passes of the gate's greedy decoding, on an executor that notes them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from orinbench.check.greedy import decode_greedily


class FakeExecutor:
    """An executor whose logits are token and position, and whose tokens count from 100."""

    name, context, vocab_size = "fused", 64, 2

    def __init__(self) -> None:
        self.steps: list[tuple[int | None, int]] = []
        self.filled: list[int] = []
        self.watched: list[tuple[int, int]] = []

    def fill_cache(self, tokens: Sequence[int], start: int, end: int) -> None:
        self.filled += tokens[start:end]

    def prefill_and_submit_token(self, tokens: Sequence[int], start: int) -> None:
        self.filled += tokens[start:-1]
        self.steps.append((tokens[-1], len(tokens) - 1))

    def submit_step(self, token: int | None = None, position: int = 0) -> None:
        self.steps.append((token, position))

    def wait_for_token(self) -> int:
        return 99 + len(self.steps)

    def wait_for_logits(self) -> Any:
        return np.array(self.steps[-1], np.float32)

    def watch_layer_inputs(self, positions: int) -> Any:
        self.watched.append((positions, len(self.steps)))
        return np.zeros((1, positions, 1))


def test_logits_are_those_of_the_tokens_kernels() -> None:
    executor = FakeExecutor()
    found = decode_greedily(executor, [7, 8, 9], 3)
    assert found.fused and found.tokens == [100, 101, 102]
    # each time, because recurrent states cannot go back to the prompt's end
    assert executor.filled == [7, 8] * 3
    # the last token of the prompt and the decoded ones
    assert executor.steps[:3] == [(9, 2), (None, 0), (None, 0)]
    assert executor.steps[3:6] == executor.steps[6:] == [(9, 2), (100, 3), (101, 4)]
    # Layers are seen in the third replay alone: what is timed, and the logits', goes as a whole.
    assert executor.watched == [(5, 6), (0, 9)] and found.layers is not None
    assert found.logits.tolist() == [[9, 2], [100, 3], [101, 4]]
