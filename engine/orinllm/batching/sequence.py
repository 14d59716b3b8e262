"""A request for one answer as the scheduler keeps it, who hears of it, and how those wait.

Its `TokenSink` hears its tokens; a `SchedulerObserver` hears of all, as the server's metrics do.
"""

import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from orinllm.batching.cache import Lease
from orinllm.choose.sampling import DrawRequest, Floats, Logprobs, Sampling, Words
from orinllm.network.vision.pictures import Picture, pictures_in, position_shift


class TokenSink(Protocol):
    """The taker of a sequence's tokens, in the scheduler's thread. Neither call may wait."""

    def take_token_and_check_done(self, token: int, logprobs: Logprobs | None) -> bool:
        """Take a token; True ends the answer here."""
        ...

    def on_end(self, reason: str, error: str | None) -> None:
        """Learn that it is over: stop, length, cut or error; `error` says why for the last."""
        ...


@runtime_checkable
class TokenConstraint(Protocol):
    """Limits of an answer's text."""

    @property
    def is_complete(self) -> bool:
        """Say whether the answer ends behind the tokens that were taken."""
        ...

    def allowed_mask(self) -> Words:
        """Return a bit for each token that is allowed now."""
        ...

    def take_token(self, token: int) -> None:
        """Go on behind a token of the answer, which may complete it."""
        ...


@dataclass(eq=False)
class ScheduledSequence:
    """A request for one answer.

    ids: prompt, then prompt and answer so far; numbers below 0 are rows of pictures, which it keeps
      (network/vision/pictures.py). most: tokens of the answer at most.
    client: whose turn it is in the queue. after: begins once that one's prompt is computed.
    hidden_states: takes the first position and the states of neighbours of the prompt, which has
      no answer then; it hears position 0 again where memory ran out meanwhile.
    """

    ids: list[int]
    sampling: Sampling
    most: int
    end_ids: frozenset[int]
    sink: TokenSink
    constraint: TokenConstraint | None = None
    top: int | None = None
    reuse: bool = True
    client: str = ""
    after: "ScheduledSequence | None" = None
    hidden_states: Callable[[int, Floats], None] | None = None
    n_prompt: int = field(init=False)
    draw: DrawRequest = field(init=False)
    pictures: tuple[Picture, ...] = field(init=False)
    behind: int = field(init=False)  # of the answer's tokens (StepRow.behind)
    n_cached: int = 0  # tokens of the prompt that were known when it began
    n_guessed: int = 0  # tokens that were guessed, and those of them that were right
    n_right: int = 0
    asked: float = field(default_factory=time.monotonic)
    last: float = 0.0  # when its last token came
    lease: Lease | None = None
    filled: int = 0  # tokens whose keys and values are computed, or under way
    began: bool = False
    over: bool = False

    def __post_init__(self) -> None:
        self.n_prompt, sees = len(self.ids), min(self.ids, default=0) < 0
        self.pictures = pictures_in(self.ids) if sees else ()
        self.behind = position_shift(self.ids) if sees else 0
        mask = None if self.constraint is None else self.constraint.allowed_mask
        self.draw = DrawRequest(self.sampling, self.ids, mask, self.top)

    @property
    def n_answer_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.ids) - self.n_prompt

    @property
    def has_finite_pictures(self) -> bool:
        """Say whether all rows of its pictures are numbers."""
        return all(np.isfinite(picture.encoded_rows).all() for picture in self.pictures)

    @property
    def is_ready_to_decode(self) -> bool:
        """Say whether all but its last token is computed, and it goes on by tokens."""
        return self.hidden_states is None and self.filled >= len(self.ids) - 1


def tell_sink_of_failure(sequence: ScheduledSequence, why: str) -> None:
    """Tell a sink that its answer failed; where it cannot hear that, all others still do."""
    try:
        sequence.sink.on_end("error", why)
    except Exception as bug:
        traceback.print_exception(bug)


def log_and_describe_failure(bug: Exception) -> str:
    """Write a sink's failure down; return one line for its client."""
    traceback.print_exception(bug)
    return " ".join(f"the answer could not be read: {type(bug).__name__}: {bug}".split())


class FairQueue:
    """The requests that wait: each client's in order, clients in turns."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, deque[ScheduledSequence]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def push(self, sequence: ScheduledSequence) -> None:
        """Append to a client's requests."""
        self._of.setdefault(sequence.client, deque()).append(sequence)

    def peek(self) -> ScheduledSequence | None:
        """Return who is next."""
        return next(iter(self._of.values()))[0] if self._of else None

    def remove_next(self) -> None:
        """Remove who is next; its client's other requests are behind all other clients'."""
        client, waiting = self._of.popitem(last=False)
        waiting.popleft()
        if waiting:
            self._of[client] = waiting

    def remove_where(self, over: Callable[[ScheduledSequence], bool]) -> list[ScheduledSequence]:
        """Remove and return all of a kind."""
        gone = [s for waiting in self._of.values() for s in waiting if over(s)]
        for client, waiting in list(self._of.items()):
            kept = deque(s for s in waiting if not over(s))
            if kept:
                self._of[client] = kept
            else:
                del self._of[client]
        return gone


class SchedulerObserver:
    """Hears of the scheduler's events; this one does nothing."""

    def on_sequence_begin(self, sequence: ScheduledSequence, waited: float) -> None:
        """A sequence left the queue after so many seconds."""

    def on_token(self, sequence: ScheduledSequence, gap: float, first: bool) -> None:
        """A token came, `gap` seconds after the last one, or after the request."""

    def on_sequence_end(self, sequence: ScheduledSequence, reason: str, seconds: float) -> None:
        """A sequence ended, so many seconds after it was asked for."""

    def on_preemption(self) -> None:
        """A sequence gave its memory up and waits again."""

    def on_phase_work(self, phase: str, seconds: float) -> None:
        """The device worked on `prefill` or `decode`."""

    def on_speculation(self, guessed: int, right: int) -> None:
        """So many tokens were guessed, of which the first ones were right."""


class PhaseStopwatch:
    """Tells a watch prompts' time from tokens'. `filled`: prompts were computed since a step."""

    def __init__(self, watch: SchedulerObserver) -> None:
        self.filled = False
        self._watch = watch
        self._mark = 0.0  # when the last step ended, or work began
        self._step_seconds = 0.0  # of a step without prompts, on average

    def restart(self) -> None:
        """Work begins behind a rest."""
        self._mark = time.monotonic()

    def count_elapsed(self, stepped: bool = True) -> None:
        """Count what passed since the last time.

        The device is waited for once a turn, so a turn with a prompt is taken to be a step without
        one, and the rest the prompt's; all of it where nothing `stepped`.
        """
        now = time.monotonic()
        passed, self._mark = now - self._mark, now
        decode = min(passed, self._step_seconds or passed) if self.filled else passed
        decode *= stepped
        if not self.filled:
            mean = self._step_seconds or passed
            self._step_seconds = mean + 0.1 * (passed - mean)
        self.filled = False
        self._watch.on_phase_work("prefill", passed - decode)
        self._watch.on_phase_work("decode", decode)
