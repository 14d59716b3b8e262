"""The protocol of everything that runs a model, one sequence at a time."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from orinllm.sampling import Sampling

Floats = NDArray[np.float32]


class Executor(Protocol):
    """A model on a device. Keys and values of positions below the last one stay."""

    name: str  # fused or general
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
        """Wait for the next token; -1 where logits are no numbers."""
        ...

    def logits(self) -> Floats:
        """Wait for the logits after the last token: (vocabulary)."""
        ...


class SamplingExecutor(Executor, Protocol):
    """An executor whose tokens may be drawn; it takes the most likely ones until `sample`."""

    def sample(self, how: Sampling, text: Sequence[int]) -> None:
        """Draw tokens like this from now on; `text` is the sequence so far."""
        ...

    def begin(self, tokens: Sequence[int], start: int) -> None:
        """Start keys and values of tokens[start:], and the token that follows the last of them."""
        ...

    def follow(self, most: int) -> Iterator[int]:
        """Yield the token that was started and those behind it, `most` at most."""
        ...

    def states(self, tokens: Sequence[int], start: int, end: int) -> Floats:
        """Compute tokens[start:end]; return their states before the logits: (tokens, width)."""
        ...

    @property
    def most_verified(self) -> int:
        """Tokens that `verify` takes at most; 1: there is nothing to be gained by it."""
        ...

    def verify(self, tokens: Sequence[int], position: int) -> list[int]:
        """Compute neighbours from `position` on; return the token that follows each.

        The sampling must have no penalties: those would depend on the tokens before.
        """
        ...
