"""Counters of what the scheduler does, such as the server's metrics."""

from typing import Protocol

from orinllm.batching.sequence import Sequence


class Watch(Protocol):
    """A counter of the scheduler's events."""

    def began(self, sequence: Sequence, waited: float) -> None:
        """A sequence left the queue after so many seconds."""
        ...

    def token(self, sequence: Sequence, gap: float, first: bool) -> None:
        """A token came, `gap` seconds after the last one, or after the request."""
        ...

    def ended(self, sequence: Sequence, reason: str, seconds: float) -> None:
        """A sequence ended, so many seconds after it was asked for."""
        ...

    def preempted(self) -> None:
        """A sequence gave its memory up and waits again."""
        ...

    def worked(self, phase: str, seconds: float) -> None:
        """The device worked on `prefill` or `decode`."""
        ...

    def speculated(self, guessed: int, right: int) -> None:
        """So many tokens were guessed, of which the first ones were right."""
        ...


class Unwatched:
    """`Watch` that counts nothing."""

    def began(self, sequence: Sequence, waited: float) -> None:
        """See `Watch`."""

    def token(self, sequence: Sequence, gap: float, first: bool) -> None:
        """See `Watch`."""

    def ended(self, sequence: Sequence, reason: str, seconds: float) -> None:
        """See `Watch`."""

    def preempted(self) -> None:
        """See `Watch`."""

    def worked(self, phase: str, seconds: float) -> None:
        """See `Watch`."""

    def speculated(self, guessed: int, right: int) -> None:
        """See `Watch`."""
