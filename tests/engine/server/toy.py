"""A model without a network: its next token is a hash of all tokens before.

It keeps each token in the page and place that the scheduler gives it, and reads them back from
there: a page that was given away too early, or that holds something else, changes the answer.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from tests.engine.models import smollm2

from orinllm.batching.cache import SharedPageStore
from orinllm.batching.runner import StepRow
from orinllm.batching.scheduler import Scheduler
from orinllm.batching.sequence import SchedulerObserver
from orinllm.choose.pooling import Pooling
from orinllm.choose.sampling import DrawnTokens, DrawRequest, Floats, Logprobs, sample_masked_token
from orinllm.gpu.kernels.buffers import PAGE
from orinllm.model import ModelDescription
from orinllm.server.engine import ServedModel
from orinllm.text.grammar import GrammarCompiler
from orinllm.text.template import ChatTemplate

#: Number of tokens with a probability above zero.
CANDIDATES = 24


def toy_logits(tokens: Sequence[int], vocabulary: int) -> Floats:
    """Return the toy's logits after some tokens."""
    seed = hashlib.blake2b(np.array(tokens, np.int64).tobytes(), digest_size=8).digest()
    random = np.random.default_rng(int.from_bytes(seed, "little"))
    logits = np.full(vocabulary, -40, np.float32)
    # Not the first tokens of the vocabulary: they are control tokens.
    logits[random.integers(300, 20000, CANDIDATES)] = random.normal(size=CANDIDATES)
    return logits


@dataclass
class ToyRunner:
    """`Runner` of the toy. script: tokens of the answer, whatever the prompt, if there are any."""

    slots: int
    pages: int
    vocab_size: int
    chunk: int = 128
    prompt_tokens_per_step: int = 64
    step_seconds: float = 0.0
    pace: Callable[[], None] = lambda: None  # called before a step's tokens are there
    script: Callable[[int], int] | None = None
    computed: int = 0  # tokens of prompts
    steps: int = 0
    verified: int = 0  # steps that took several tokens of one sequence
    most_extra_tokens: int = 0
    name: str = "toy"
    context: int = 2048
    most_steps_in_flight: int = 2
    begun: int = 0  # prompts whose end was computed with the token behind it
    followed: int = 0  # steps that began before the tokens of the one before were collected
    widest: int = 0  # most rows of a step
    _cells: NDArray[np.int64] = field(init=False)
    _steps: deque[list[DrawnTokens]] = field(default_factory=deque)  # under way
    _texts: list[Sequence[int]] = field(default_factory=list)  # kept, so that no id comes again
    _first: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cells = np.full((self.pages, PAGE), -1)

    def fill_pages(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int) -> None:
        assert end - start <= self.chunk
        for position in range(start, end):
            self._cells[pages[position // PAGE], position % PAGE] = tokens[position]
        self.computed += end - start

    def save_states(self, pages: Sequence[int], checkpoint: int) -> None:
        """There are no recurrent states."""

    def restore_states(self, pages: Sequence[int], checkpoint: int) -> None:
        """There are none."""

    def prefill_for_hidden_states(
        self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int
    ) -> Floats:
        """Each state tells of its token, its place and the one before, as they lie in the pages."""
        self.fill_pages(pages, tokens, start, end)
        held = self._held(pages, end)
        return np.array([[held[i], i, held[max(0, i - 1)]] for i in range(start, end)], np.float32)

    def prefill_and_submit_token(self, row: StepRow, start: int) -> None:
        assert start <= row.position == len(row.draw.before) - 1
        self._steps.clear()  # what was not collected is not wanted
        self.fill_pages(row.pages, row.draw.before, start, row.position)
        self.begun += 1
        self.submit_step([row])

    def submit_step(self, rows: Sequence[StepRow]) -> None:
        assert 0 < len(rows) <= self.slots
        self.steps += 1
        self.widest = max(self.widest, len(rows))
        tokens = [row.token for row in rows if row.token is not None]
        if tokens:
            self._steps.clear()
        else:
            assert all(row.draw.is_token_only for row in rows)
            tokens = [drawn.token for drawn in self._steps[-1]]
            self.followed += 1
        pairs = zip(rows, tokens, strict=True)
        self._steps.append([self._token(row, token) for row, token in pairs])
        assert len(self._steps) <= self.most_steps_in_flight

    def wait_for_tokens(self) -> list[DrawnTokens]:
        time.sleep(self.step_seconds)
        self.pace()
        return self._steps.popleft()

    def last_logits(self) -> Floats:
        raise AssertionError("nobody checks the toy")

    @property
    def most_verified_tokens(self) -> int:
        return 5

    def tokens_after_guesses(self, row: StepRow, guesses: Sequence[int]) -> list[int]:
        """Each token is drawn from those before it, as they lie in the row's pages."""
        found, text = list[int](), list(row.draw.before)
        self.verified += 1
        for i, token in enumerate((text[-1], *guesses)):
            draw_like = DrawRequest(row.draw.sampling, [*text, *guesses[:i]])
            place = StepRow(token, row.position + i, row.pages, draw_like)
            found.append(self._token(place, token).token)
        return found

    def _token(self, row: StepRow, token: int) -> DrawnTokens:
        self._cells[row.pages[row.position // PAGE], row.position % PAGE] = token
        if self.script is not None:
            # An answer is known by its text, which grows in place.
            self._texts.append(row.draw.before)
            first = self._first.setdefault(id(row.draw.before), row.position)
            found = None if row.draw.top is None else Logprobs(0.0, ())
            return DrawnTokens(self.script(row.position - first), found)
        held = self._held(row.pages, row.position + 1)
        how = replace(row.draw, before=[*row.draw.before[: row.position], token])
        return sample_masked_token(toy_logits(held, self.vocab_size), how)

    def _held(self, pages: Sequence[int], end: int) -> list[int]:
        """Return the tokens of a sequence as they lie in its pages."""
        cells = self._cells[list(pages[: -(-end // PAGE)])]
        return list(cells.ravel()[:end].tolist())


DESCRIPTION: list[ModelDescription] = []


def description() -> ModelDescription:
    """The words of SmolLM2, which the toy speaks."""
    if not DESCRIPTION:
        DESCRIPTION.append(ModelDescription.read(smollm2(), 2048))
    return DESCRIPTION[0]


def toy(
    slots: int = 4,
    pages: int = 256,
    context: int = 2048,
    queue: int = 64,
    *,
    script: Sequence[int] | None = None,
    template: str | None = None,
    step_seconds: float = 0.0,
    reserve: bool = False,
    pooling: Pooling = "mean",
) -> Callable[[SchedulerObserver], ServedModel]:
    """Return what makes an engine of the toy."""
    words = description()
    ends = sorted(words.tokenizer.end_ids)

    def said(index: int) -> int:
        assert script is not None
        return script[index] if index < len(script) else ends[0]

    def load(watch: SchedulerObserver) -> ServedModel:
        size = words.network.config.vocab_size
        runner = ToyRunner(slots, pages, size, step_seconds=step_seconds)
        runner.script = None if script is None else said
        scheduler = Scheduler(runner, SharedPageStore(pages), watch, queue, reserve)
        chat = words.template if template is None else ChatTemplate(template, words.tokenizer)
        grammars = GrammarCompiler(words.tokenizer, size)
        return ServedModel(
            words.tokenizer, chat, grammars, scheduler, context, size, 3, pooling, "a toy"
        )

    return load
