"""The general path as an executor."""

from collections.abc import Iterator, Sequence

import numpy as np

from orinllm.cpu_executor import MOST_ROWS, CpuExecutor
from orinllm.executor import Floats
from orinllm.general import GeneralExecutor
from orinllm.sampling import Sampling, sample


class Sequential:
    """The general path as an executor: every call waits for its result."""

    def __init__(self, path: GeneralExecutor) -> None:
        self._path, self.name, self.context = path, path.name, path.context
        self._logits: Floats = np.empty(0, np.float32)
        self._next = 0
        self._how = Sampling(temperature=0)
        self._text: list[int] = []  # the sequence so far
        self._token: int | None = None  # what was drawn from the logits, if anything was

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self._path.config.vocab_size

    def fill(self, tokens: Sequence[int], start: int, end: int) -> None:
        """Compute keys and values of tokens[start:end] at their positions."""
        if end > start:
            self._computed(self._path.prefill(tokens[start:end], start), end)

    def begin(self, tokens: Sequence[int], start: int) -> None:
        """Compute keys and values of tokens[start:], and the token that follows the last one."""
        end = len(tokens)
        self.fill(tokens, start, end - 1)
        self.step(tokens[-1], end - 1)

    def follow(self, most: int) -> Iterator[int]:
        """Yield the token that was computed and those behind it, `most` at most."""
        for index in range(most):
            if index:
                self.step()
            yield self.token()

    def states(self, tokens: Sequence[int], start: int, end: int) -> Floats:
        """Compute tokens[start:end]; return their states before the logits: (tokens, width)."""
        return self._path.states(tokens[start:end], start)

    def step(self, token: int | None = None, position: int = 0) -> None:
        """Compute one token more: the given one, or the one that `token` returns."""
        if token is None:
            token, position = self.token(), self._next
        self._text[position:] = [token]
        self._computed(self._path.decode(token, position), position + 1)

    def _computed(self, logits: Floats, end: int) -> None:
        self._logits, self._next, self._token = logits, end, None

    def sample(self, how: Sampling, text: Sequence[int]) -> None:
        """Draw tokens like this from now on; `text` is the sequence so far."""
        self._how, self._text, self._token = how, list(text), None

    @property
    def most_verified(self) -> int:
        """Tokens that `verify` takes at most: one, but on a CPU."""
        return MOST_ROWS if isinstance(self._path, CpuExecutor) else 1

    def verify(self, tokens: Sequence[int], position: int) -> list[int]:
        """Compute neighbours from `position` on; return the token that follows each."""
        if len(tokens) == 1 or not isinstance(self._path, CpuExecutor):
            (token,) = tokens
            self.step(token, position)
            return [self.token()]
        rows = self._path.rows(tokens, position)
        self._computed(rows[-1], position + len(tokens))
        return [sample(row, self._how, (), at) for at, row in enumerate(rows, position + 1)]

    def token(self) -> int:
        """Return the next token, drawn as `sample` says; -1 where logits are no numbers."""
        if self._token is None:
            self._token = sample(self._logits, self._how, self._text, self._next)
        return self._token

    def logits(self) -> Floats:
        """Return the logits after the last token: (vocabulary)."""
        return self._logits
