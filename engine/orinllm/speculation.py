"""Speculation: tokens that are proposed by something cheap, and computed together by the model.

A proposal never changes the text. The model computes the proposed tokens in one pass and draws
after each the token that it would have drawn anyway (the draw depends on seed and position alone);
those that were proposed right are kept, and the first one that was not ends the pass. So greedy
text is the same, and drawn text too.
"""

import itertools
from collections.abc import Sequence
from typing import Protocol

from orinllm.executor import SamplingExecutor
from orinllm.sampling import Sampling

# Tokens that must have come before for what followed them to be proposed, the longest first.
_GRAMS = (4, 3, 2)


class Proposer(Protocol):
    """A guesser of the next tokens of a text."""

    def begin(self, how: Sampling) -> None:
        """Begin an answer that is drawn like this."""
        ...

    def propose(self, text: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens that may follow a text, which grows from call to call."""
        ...


class Lookup:
    """Proposes what followed the same few tokens earlier in the text."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # tokens -> where what follows them begins

    def begin(self, how: Sampling) -> None:
        """Forget the last text."""
        self._text, self._after = [], {}

    def propose(self, text: Sequence[int], most: int) -> list[int]:
        """Return what followed the text's last four, three or two tokens the last time."""
        for end in range(len(self._text), len(text)):
            # The tokens before this one have it behind them, from now on.
            for n in _GRAMS:
                if end >= n:
                    self._after[tuple(text[end - n : end])] = end
        self._text = list(text)
        for n in _GRAMS:
            start = self._after.get(tuple(text[-n:]))
            if start is not None and len(text) >= n:
                return list(text[start : start + most])
        return []


class Draft:
    """Proposes what a smaller model of the same vocabulary says."""

    def __init__(self, executor: SamplingExecutor) -> None:
        self._executor = executor
        self._held: list[int] = []  # tokens whose keys and values it has

    def begin(self, how: Sampling) -> None:
        """Draw as the answer is drawn: by the same numbers, the same token is often drawn."""
        self._executor.sample(how, ())

    def propose(self, text: Sequence[int], most: int) -> list[int]:
        """Return the smaller model's next tokens, as far as its context goes."""
        executor = self._executor
        room = min(most, executor.context - len(text))
        if room <= 0:
            return []
        same = 0
        while same < min(len(self._held), len(text) - 1) and self._held[same] == text[same]:
            same += 1
        if len(text) - same > executor.most_verified:  # a prompt, and the answer's first token
            executor.begin(text[:-1], same)
        else:
            executor.fill(text, same, len(text) - 1)
        executor.step(text[-1], len(text) - 1)
        proposed = list(itertools.takewhile(lambda token: token >= 0, executor.follow(room)))
        self._held = [*text, *proposed[:-1]]
        return proposed
