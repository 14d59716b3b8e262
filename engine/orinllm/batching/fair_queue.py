"""The order in which requests that wait are admitted."""

from collections import OrderedDict, deque
from collections.abc import Callable

from orinllm.batching.sequence import Sequence


class FairQueue:
    """The requests that wait: each client's in order, clients in turns."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, deque[Sequence]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def push(self, sequence: Sequence) -> None:
        """Append to a client's requests."""
        self._of.setdefault(sequence.client, deque()).append(sequence)

    def peek(self) -> Sequence | None:
        """Return who is next."""
        return next(iter(self._of.values()))[0] if self._of else None

    def pop(self) -> None:
        """Remove who is next; its client's other requests are behind all other clients'."""
        client, waiting = self._of.popitem(last=False)
        waiting.popleft()
        if waiting:
            self._of[client] = waiting

    def remove(self, over: Callable[[Sequence], bool]) -> list[Sequence]:
        """Remove and return all of a kind."""
        gone = [s for waiting in self._of.values() for s in waiting if over(s)]
        for client, waiting in list(self._of.items()):
            kept = deque(s for s in waiting if not over(s))
            if kept:
                self._of[client] = kept
            else:
                del self._of[client]
        return gone
