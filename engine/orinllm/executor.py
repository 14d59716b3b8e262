"""The protocol of everything that runs a model, one sequence at a time."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class Executor(Protocol):
    """A model on a device. Keys and values of positions below the last one stay."""

    name: str  # fused, general or upstream
    context: int  # tokens of a sequence at most

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        ...

    def fill(self, tokens: Sequence[int], start: int, end: int) -> None:
        """Start keys and values of tokens[start:end] at their positions."""
        ...

    def step(self, token: int | None = None, position: int = 0) -> None:
        """Start one token more: the given one, or the one that `token` returns."""
        ...

    def token(self) -> int:
        """Wait for the most likely next token; -1 where logits are no numbers."""
        ...

    def logits(self) -> Floats:
        """Wait for the logits after the last token: (vocabulary)."""
        ...
