"""Counters of what the scheduler does, such as the server's metrics."""

import time

from orinllm.batching.sequence import Sequence


class Watch:
    """A counter of the scheduler's events; this one counts nothing."""

    def began(self, sequence: Sequence, waited: float) -> None:
        """A sequence left the queue after so many seconds."""

    def token(self, sequence: Sequence, gap: float, first: bool) -> None:
        """A token came, `gap` seconds after the last one, or after the request."""

    def ended(self, sequence: Sequence, reason: str, seconds: float) -> None:
        """A sequence ended, so many seconds after it was asked for."""

    def preempted(self) -> None:
        """A sequence gave its memory up and waits again."""

    def worked(self, phase: str, seconds: float) -> None:
        """The device worked on `prefill` or `decode`."""

    def speculated(self, guessed: int, right: int) -> None:
        """So many tokens were guessed, of which the first ones were right."""


class Stopwatch:
    """Tells a watch prompts' time from tokens'. `filled`: prompts were computed since a step."""

    def __init__(self, watch: Watch) -> None:
        self.filled = False
        self._watch = watch
        self._mark = 0.0  # when the last step ended, or work began
        self._step_seconds = 0.0  # of a step without prompts, on average

    def begin(self) -> None:
        """Work begins behind a rest."""
        self._mark = time.monotonic()

    def count(self, stepped: bool = True) -> None:
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
        self._watch.worked("prefill", passed - decode)
        self._watch.worked("decode", decode)
