"""Owners of the pages of keys and values, and pages that a new prompt finds done already.

A full page is known by its tokens and by all before them (a chain of hashes). It stays when the
last sequence that uses it ends, until a page is needed: then the one that was used longest ago
goes. The last page of a text, which is not full, is kept for one that goes on behind all of it, as
a chat's next question does.
"""

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from orinllm.batching.state_checkpoints import StateCheckpoints, StateSlots
from orinllm.gpu.kernels.buffers import PAGE, pages_for_tokens


class SequencePages(list[int]):
    """A sequence's pages in their order, and the slot where its recurrent states are."""

    slot = 0


@dataclass
class Lease:
    """The pages of a running sequence.

    cached: tokens whose keys and values were there when it began. ids, done: those of ids[:done]
    are there now. resumes: the checkpoint of recurrent states that it begins with; None: they are
    in their place, or there are none. started: tokens that the states are behind when all that was
    started is done. last: a token that ended the text, which is no part of it.
    """

    pages: SequencePages
    cached: int
    ids: Sequence[int] = ()
    done: int = 0
    names: list[bytes] = field(default_factory=list)  # of its full pages, as far as they are known
    resumes: int | None = None
    started: int = 0
    last: int | None = None


class PageStore(Protocol):
    """Memory for keys and values of several sequences."""

    total: int  # pages

    @property
    def n_used_pages(self) -> int:
        """Pages that running sequences have."""
        ...

    @property
    def n_free_pages(self) -> int:
        """Pages that a sequence can get, those that are kept for later prompts among them."""
        ...

    def has_page_for_each(self, sequences: int) -> bool:
        """Say whether each of so many running sequences can still get a page."""
        ...

    def try_begin_lease(self, ids: Sequence[int], tokens: int, reuse: bool = True) -> Lease | None:
        """Lease room for `tokens` tokens to a sequence that begins with `ids`; None: no room.

        The last of `ids` is never cached: its logits are wanted. `reuse` False looks up nothing.
        """
        ...

    def try_grow_lease(self, lease: Lease, tokens: int) -> bool:
        """Make room for so many tokens; False: there is none."""
        ...

    def commit_tokens(self, lease: Lease, ids: Sequence[int], done: int) -> None:
        """Say that keys and values of ids[:done] are computed, or will be before anything else."""
        ...

    def end_lease(self, lease: Lease) -> None:
        """Give the pages back."""
        ...

    def prompt_piece_end(self, lease: Lease, start: int, end: int) -> int:
        """Return where a piece from `start` on stops that may go to `end`: at the next place where
        recurrent states are kept."""
        ...

    def claim_save_checkpoint(self, lease: Lease) -> int | None:
        """Return the checkpoint that is to have the sequence's states behind ids[:done], if any."""
        ...

    def pop_restore_checkpoint(self, lease: Lease) -> int | None:
        """Return the checkpoint that a sequence begins with, if any; at the first call alone."""
        ...


class _CheckpointingStore(ABC):
    """The part of a `PageStore` that checkpoints of recurrent states need, if it has any."""

    _checkpoints: StateCheckpoints | None

    @abstractmethod
    def _checkpoint_owner(self, lease: Lease) -> Hashable:
        """Return whose checkpoints those of a sequence are, behind a whole page."""

    def prompt_piece_end(self, lease: Lease, start: int, end: int) -> int:
        """See `PageStore`."""
        kept = self._checkpoints
        return end if kept is None else kept.prompt_piece_end(start, end, len(lease.ids))

    def claim_save_checkpoint(self, lease: Lease) -> int | None:
        """See `PageStore`."""
        if self._checkpoints is None or not lease.done or lease.done % PAGE:
            return None
        return self._checkpoints.claim_checkpoint(self._checkpoint_owner(lease), lease.done)

    def pop_restore_checkpoint(self, lease: Lease) -> int | None:
        """See `PageStore`."""
        checkpoint, lease.resumes = lease.resumes, None
        if checkpoint is not None and self._checkpoints is not None:
            self._checkpoints.unpin(checkpoint)
        return checkpoint


class SharedPageStore(_CheckpointingStore):
    """`PageStore` of pages that sequences share.

    A page that is not full has one user, who writes behind its tokens. It is found by a prompt that
    begins with all of them: parts of it would tell a stranger token by token what another one said.
    states: of a model that has recurrent ones, which do not go back. A prompt begins where there
    are some: behind a text that ended, whose slot still has them, or at a checkpoint.
    """

    def __init__(self, total: int, states: StateSlots | None = None) -> None:
        self.total, self._states = total, states
        self._checkpoints = states.checkpoints if states and states.checkpoints.total else None
        self._free = list(range(total - 1, -1, -1))
        self._users = [0] * total
        self._name_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # known, of no sequence; oldest first
        self._ends: dict[int, Sequence[int]] = {}  # idle pages that are not full, and their tokens

    @property
    def n_used_pages(self) -> int:
        """See `PageStore`."""
        return self.total - self.n_free_pages

    @property
    def n_free_pages(self) -> int:
        """See `PageStore`."""
        return len(self._free) + len(self._idle)

    def has_page_for_each(self, sequences: int) -> bool:
        """See `PageStore`."""
        return self.n_free_pages >= sequences

    def try_begin_lease(self, ids: Sequence[int], tokens: int, reuse: bool = True) -> Lease | None:
        """See `PageStore`."""
        lease = Lease(SequencePages(), 0)
        for name in _page_hashes(ids, (len(ids) - 1) // PAGE) if reuse else ():
            if (page := self._page_of.get(name)) is None:
                break
            self._add_page_user(page)
            lease.pages.append(page)
            lease.names.append(name)
        lease.cached = len(lease.pages) * PAGE
        if reuse:
            self._reuse_partial_page(lease, ids)
        if self._states is not None:
            self._take_slot_and_trim_pages(lease, ids, self._states)
        lease.ids, lease.done, lease.started = ids, lease.cached, lease.cached
        if self.try_grow_lease(lease, tokens):
            return lease
        self.end_lease(lease)
        return None

    def try_grow_lease(self, lease: Lease, tokens: int) -> bool:
        """See `PageStore`."""
        missing = pages_for_tokens(tokens) - len(lease.pages)
        if missing > self.n_free_pages:
            return False
        for _ in range(missing):
            page = self._free.pop() if self._free else self._forget_page(next(iter(self._idle)))
            self._users[page] = 1
            lease.pages.append(page)
        return True

    def commit_tokens(self, lease: Lease, ids: Sequence[int], done: int) -> None:
        """See `PageStore`."""
        lease.ids, lease.done = ids, done
        known = len(lease.names)
        if done // PAGE == known:
            return
        last = lease.names[-1] if lease.names else b""
        for name in _page_hashes(ids, done // PAGE, known, last):
            page = lease.pages[len(lease.names)]
            lease.names.append(name)
            # Two that began together have a page each; the first one's is found.
            if name not in self._page_of:
                self._page_of[name], self._name_of[page] = page, name

    def end_lease(self, lease: Lease) -> None:
        """See `PageStore`; the sequence's last pages are the first to go."""
        if self._states is not None:
            if lease.last is not None and lease.started == lease.done + 1:
                # A step passes it; a chat's next question comes behind it.
                self.commit_tokens(lease, [*lease.ids, lease.last], lease.started)
            known = lease.started <= lease.done and self.pop_restore_checkpoint(lease) is None
            self._states.give_back_slot(lease.pages.slot, _text_key(lease) if known else None)
        if tokens := lease.ids[len(lease.names) * PAGE : lease.done]:
            page, name = lease.pages[len(lease.names)], _partial_page_name(lease)
            if (older := self._page_of.get(name)) is not None:
                self._forget_page(older)
                self._free.append(older)
            self._page_of[name], self._name_of[page], self._ends[page] = page, name, tokens
        for page in reversed(lease.pages):
            self._remove_page_user(page)
        lease.pages.clear()

    def _remove_page_user(self, page: int) -> None:
        self._users[page] -= 1
        if self._users[page]:
            return
        if page in self._name_of:
            self._idle[page] = None
        else:
            self._free.append(page)

    def _checkpoint_owner(self, lease: Lease) -> Hashable:
        return lease.names[-1]

    def _take_slot_and_trim_pages(
        self, lease: Lease, ids: Sequence[int], states: StateSlots
    ) -> None:
        """Take a slot, and give back pages behind the place from which there are states."""
        lease.ids, lease.done = ids, lease.cached
        if lease.cached and states.has_states_of_text(text := _text_key(lease)):
            lease.pages.slot = states.take_slot(text)
            return
        while lease.names:
            done = len(lease.names) * PAGE
            _, checkpoint = states.checkpoints.length_and_checkpoint_of_owner(lease.names[-1], done)
            if checkpoint is not None:
                states.checkpoints.pin(checkpoint)
                lease.resumes = checkpoint
                break
            lease.names.pop()
            self._remove_page_user(lease.pages.pop())
        lease.cached = len(lease.names) * PAGE
        lease.pages.slot = states.take_slot(None)

    def _reuse_partial_page(self, lease: Lease, ids: Sequence[int]) -> None:
        """Add the page behind the full ones of a text that ends there, and that `ids` continue."""
        page = self._page_of.get(_partial_page_name(lease))
        if page is None:
            return
        tokens, start = self._ends[page], lease.cached
        end = start + len(tokens)
        if self._states is not None and not self._states.has_states_of_text(
            (_partial_page_name(lease), tuple(tokens))
        ):
            return
        if end < len(ids) and ids[start:end] == tokens:
            self._forget_page(page)
            self._add_page_user(page)
            lease.pages.append(page)
            lease.cached = end

    def _add_page_user(self, page: int) -> None:
        self._idle.pop(page, None)
        self._users[page] += 1

    def _forget_page(self, page: int) -> int:
        """Return an idle page, which is not known any more."""
        del self._idle[page], self._page_of[self._name_of.pop(page)]
        self._ends.pop(page, None)
        return page


class SlotStore(_CheckpointingStore):
    """`PageStore` of a piece of memory for each slot, which keeps what its last sequence left.

    A prompt gets the free slot that knows most of its beginning; of equals, the one that was used
    longest ago. It goes on behind all that the slot holds, behind the prompt of that, or behind
    whole pages: else `cached` would tell a stranger token by token what another one said.
    `resumable`: it may; else only behind all, or where one of `checkpoints` is (recurrent states do
    not go back).
    """

    def __init__(
        self, slots: int, context: int, resumable: bool = True, checkpoints: int = 0
    ) -> None:
        self._each, self._context, self._resumable = pages_for_tokens(context), context, resumable
        self.total = slots * self._each
        self._held: list[list[int]] = [[] for _ in range(slots)]
        self._asked = [0] * slots  # tokens of the prompts, without their last
        self._checkpoints = StateCheckpoints(checkpoints) if checkpoints else None
        self._live = [True] * slots  # its states are those behind what it holds
        self._free = list(range(slots))  # the one that was used longest ago is first

    @property
    def n_used_pages(self) -> int:
        """See `PageStore`."""
        return self.total - self.n_free_pages

    @property
    def n_free_pages(self) -> int:
        """See `PageStore`."""
        return len(self._free) * self._each

    def has_page_for_each(self, sequences: int) -> bool:
        """See `PageStore`; a slot has room for a whole context."""
        return True

    def try_begin_lease(self, ids: Sequence[int], tokens: int, reuse: bool = True) -> Lease | None:
        """See `PageStore`."""
        if not self._free or tokens > self._context:
            return None
        known = {
            slot: self._reusable_tokens_and_checkpoint(slot, ids) if reuse else (0, None)
            for slot in self._free
        }
        slot = max(self._free, key=lambda slot: known[slot][0])
        cached, checkpoint = known[slot]
        self._free.remove(slot)
        del self._held[slot][cached:]
        if self._checkpoints is not None:
            self._checkpoints.forget_after(slot, cached)
            if checkpoint is not None:
                self._checkpoints.pin(checkpoint)
        self._asked[slot] = len(ids) - 1
        first = slot * self._each
        pages = SequencePages(range(first, first + self._each))
        pages.slot = slot
        return Lease(pages, cached, ids, cached, resumes=checkpoint, started=cached)

    def _reusable_tokens_and_checkpoint(
        self, slot: int, ids: Sequence[int]
    ) -> tuple[int, int | None]:
        """Return how many tokens of a prompt a slot spares, and from which checkpoint on."""
        held = self._held[slot]
        known = min(common_prefix_length(ids, held), len(ids) - 1)
        if known == len(held) and (self._resumable or self._live[slot]):
            return known, None
        if not self._resumable:
            kept = self._checkpoints
            return (0, None) if kept is None else kept.length_and_checkpoint_of_owner(slot, known)
        asked = self._asked[slot]
        return max(known // PAGE * PAGE, asked if asked <= known else 0), None

    def try_grow_lease(self, lease: Lease, tokens: int) -> bool:
        """See `PageStore`."""
        return tokens <= self._context

    def commit_tokens(self, lease: Lease, ids: Sequence[int], done: int) -> None:
        """See `PageStore`."""
        held = self._held[lease.pages.slot]
        held += ids[len(held) : done]
        lease.ids, lease.done = ids, done

    def end_lease(self, lease: Lease) -> None:
        """See `PageStore`."""
        slot = lease.pages.slot
        self._live[slot] = lease.started <= lease.done and (
            self.pop_restore_checkpoint(lease) is None
        )
        self._free.append(slot)

    def _checkpoint_owner(self, lease: Lease) -> Hashable:
        return lease.pages.slot


def _partial_page_name(lease: Lease) -> bytes:
    """Return the name of the page behind a lease's full ones; full pages have other names."""
    return (lease.names[-1] if lease.names else b"") + b"end"


def _text_key(lease: Lease) -> tuple[bytes, tuple[int, ...]]:
    """Return the name of all that a lease's states are behind."""
    return _partial_page_name(lease), tuple(lease.ids[len(lease.names) * PAGE : lease.done])


def _page_hashes(
    ids: Sequence[int], pages: int, first: int = 0, last: bytes = b""
) -> Iterator[bytes]:
    """Yield names of the pages from `first` on, whose predecessor's name is `last`."""
    name = last
    for page in range(first, pages):
        tokens = np.array(ids[page * PAGE : (page + 1) * PAGE], np.int64)
        name = hashlib.blake2b(name + tokens.tobytes(), digest_size=16).digest()
        yield name


def common_prefix_length(some: Sequence[int], others: Sequence[int]) -> int:
    """Return how many tokens two texts begin with in common."""
    n = min(len(some), len(others))
    if some[:n] == others[:n]:  # of lists, at once: a text that grows is asked for each token
        return n
    pairs = zip(some, others, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
