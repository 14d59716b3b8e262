"""Who has which pages of keys and values, and which of them a new prompt finds done already.

A full page is known by its tokens and by all before them (a chain of hashes). It stays when the
last sequence that uses it ends, until a page is needed: then the one that was used longest ago
goes.
"""

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from orinllm.launches.buffers import PAGE
from orinllm.memory import pages_of


@dataclass
class Lease:
    """The pages of a running sequence.

    cached: tokens whose keys and values were there when it began.
    """

    pages: list[int]
    cached: int
    names: list[bytes] = field(default_factory=list)  # of its full pages, as far as they are known


class Store(Protocol):
    """Memory for keys and values of several sequences."""

    total: int  # pages

    @property
    def used(self) -> int:
        """Pages that running sequences have."""
        ...

    @property
    def free(self) -> int:
        """Pages that a sequence can get, those that are kept for later prompts among them."""
        ...

    def begin(self, ids: Sequence[int], tokens: int, reuse: bool = True) -> Lease | None:
        """Lease room for `tokens` tokens to a sequence that begins with `ids`; None: no room.

        The last of `ids` is never cached: its logits are wanted. `reuse` False looks up nothing.
        """
        ...

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Make room for so many tokens; False: there is none."""
        ...

    def commit(self, lease: Lease, ids: Sequence[int], done: int) -> None:
        """Say that keys and values of ids[:done] are computed, or will be before anything else."""
        ...

    def end(self, lease: Lease) -> None:
        """Give the pages back."""
        ...


class PagedStore:
    """`Store` of pages that sequences share."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._users = [0] * total
        self._name_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # known, of no sequence; oldest first

    @property
    def used(self) -> int:
        """See `Store`."""
        return self.total - self.free

    @property
    def free(self) -> int:
        """See `Store`."""
        return len(self._free) + len(self._idle)

    def begin(self, ids: Sequence[int], tokens: int, reuse: bool = True) -> Lease | None:
        """See `Store`."""
        lease = Lease([], 0)
        for name in _names(ids, (len(ids) - 1) // PAGE) if reuse else ():
            if (page := self._page_of.get(name)) is None:
                break
            self._use(page)
            lease.pages.append(page)
            lease.names.append(name)
        lease.cached = len(lease.pages) * PAGE
        if self.grow(lease, tokens):
            return lease
        self.end(lease)
        return None

    def grow(self, lease: Lease, tokens: int) -> bool:
        """See `Store`."""
        missing = pages_of(tokens) - len(lease.pages)
        if missing > self.free:
            return False
        for _ in range(missing):
            page = self._free.pop() if self._free else self._forget()
            self._users[page] = 1
            lease.pages.append(page)
        return True

    def commit(self, lease: Lease, ids: Sequence[int], done: int) -> None:
        """See `Store`."""
        known = len(lease.names)
        if done // PAGE == known:
            return
        last = lease.names[-1] if lease.names else b""
        for name in _names(ids, done // PAGE, known, last):
            page = lease.pages[len(lease.names)]
            lease.names.append(name)
            # Two that began together have a page each; the first one's is found.
            if name not in self._page_of:
                self._page_of[name], self._name_of[page] = page, name

    def end(self, lease: Lease) -> None:
        """See `Store`; the sequence's last pages are the first to go."""
        for page in reversed(lease.pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._name_of:
                self._idle[page] = None
            else:
                self._free.append(page)
        lease.pages.clear()

    def _use(self, page: int) -> None:
        self._idle.pop(page, None)
        self._users[page] += 1

    def _forget(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._name_of.pop(page)]
        return page


class OneStore:
    """`Store` of one sequence at a time, which keeps what the last one left.

    `resumable`: a prompt may go on anywhere in it; else only behind all of it (recurrent states do
    not go back).
    """

    def __init__(self, context: int, resumable: bool = True) -> None:
        self.total = pages_of(context)
        self._context, self._resumable = context, resumable
        self._held: list[int] = []
        self._lease: Lease | None = None

    @property
    def used(self) -> int:
        """See `Store`."""
        return self.total - self.free

    @property
    def free(self) -> int:
        """See `Store`."""
        return 0 if self._lease else self.total

    def begin(self, ids: Sequence[int], tokens: int, reuse: bool = True) -> Lease | None:
        """See `Store`."""
        if self._lease or tokens > self._context:
            return None
        pairs = zip(ids, self._held, strict=False) if reuse else iter(())
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        cached = min(same, len(ids) - 1)
        if not self._resumable and cached < len(self._held):
            cached = 0
        del self._held[cached:]
        self._lease = Lease(list(range(self.total)), cached)
        return self._lease

    def grow(self, lease: Lease, tokens: int) -> bool:
        """See `Store`."""
        return tokens <= self._context

    def commit(self, lease: Lease, ids: Sequence[int], done: int) -> None:
        """See `Store`."""
        self._held += ids[len(self._held) : done]

    def end(self, lease: Lease) -> None:
        """See `Store`."""
        self._lease = None


def _names(ids: Sequence[int], pages: int, first: int = 0, last: bytes = b"") -> Iterator[bytes]:
    """Yield names of the pages from `first` on, whose predecessor's name is `last`."""
    name = last
    for page in range(first, pages):
        tokens = np.array(ids[page * PAGE : (page + 1) * PAGE], np.int32)
        name = hashlib.blake2b(name + tokens.tobytes(), digest_size=16).digest()
        yield name
