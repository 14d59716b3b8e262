"""A chunk under the sanitizer: what its loads, stores, atomics and copies tell."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..parser.syntax import Instr
from ..state import Lanes, State
from .access_checks import place_of
from .clocks import Watch
from .fenced_writes import Words
from .races import WAITS, Races
from .records import THREADS, Slots

POLLERS = 1024
"""Lanes that may poll together; more are not remembered as such."""


class Poll(NamedTuple):
    """A volatile or atomic access: lanes and addresses, the words it left, the event before it."""

    who: bytes
    where: bytes
    words: list[tuple[Slots, Any, Words, Any]]
    event: int


class Written:
    """A store that C has done. `flags`: bit 0, memory held a lane's value; bit 1, it does now."""

    def __init__(self, flags: Any) -> None:
        self.flags, self.bit = flags, 1

    def do(self) -> None:
        """Go on to the moment after it."""
        self.bit = 2

    def same(self) -> Any:
        """Mask of the lanes whose value memory holds."""
        return self.flags & self.bit > 0


class Shadow(Races):
    """A chunk's lanes as their instructions see it, and who wrote its local memory."""

    def __init__(self, owner: Watch, st: State) -> None:
        super().__init__(owner, st)
        size = st.local.shape[0] * st.local.shape[1] if st.local is not None else 0
        self.local = np.zeros(size if self.init else 0, bool)
        self.polls: dict[int, Poll] = {}
        self.poll: tuple[bytes, bytes] | None = None
        self.bound: list[tuple[Lanes, Any]] = []

    def is_repeat(self, where: Any) -> bool:
        """True if the lanes did the same to the same words and nothing has happened since.

        Whoever polls a word finds what it found, and its record there still holds: what the lanes
        are ordered after and what others are ordered after of them changes with events alone.
        """
        self.poll = None
        if not self.race or not self._strong():
            return False
        lanes = self.st.lanes()
        if len(lanes) > POLLERS:
            return False
        self.poll = lanes.tobytes(), where.tobytes()
        known = self.polls.get(self.st.site)
        return (
            known is not None
            and self.poll == known[:2]
            and int(self.changed[lanes].max()) <= known.event
            and all(
                np.array_equal(slots.write[index], written)
                and np.array_equal(_released(slots, index), released)
                for slots, index, written, released in known.words
            )
        )

    def _remember(self, words: list[tuple[Slots, Any]]) -> None:
        """Keep what a strong access left in its words."""
        if self.poll is not None:
            left = [(s, at, s.write[at], _released(s, at)) for s, at in words]
            self.polls[self.st.site] = Poll(*self.poll, left, self.events)

    # accesses of the active lanes

    def load(self, space: str, offsets: Any, total: int) -> None:
        """A read of shared or local memory at byte offsets of its backing."""
        lanes = self.st.lanes()
        if space == "local":
            self._local(lanes, offsets, total, False)
            return
        index, count = self._index(offsets, total, self.grain)
        if self.init:
            never = self.shared.write[index] == 0
            if count > 1 and np.count_nonzero(never):
                never &= np.tile(self.used(total).reshape(count, -1).any(1), len(lanes))
            if np.count_nonzero(never):
                n = int(never.nonzero()[0][0])
                self.report(
                    "init",
                    self.st.site,
                    f"{self.place(self.st.site, 'read')} of "
                    f"{self._what(space, int(index[n]), None)} by "
                    f"{self.me(int(lanes[n // count]))}: nobody has written it",
                )
        if self.race:
            if self._atomic():
                self.hear(np.repeat(lanes, count), self.shared, index)
            self._read(self.shared, space, lanes, index, count, None)

    def store(self, space: str, offsets: Any, total: int, store: Written) -> None:
        """A write of shared or local memory."""
        lanes = self.st.lanes()
        if space == "local":
            self._local(lanes, offsets, total, True)
            store.do()
            return
        index, count = self._index(offsets, total, self.grain)
        if not self.race:
            self.shared.write[index] = self._word()
            store.do()
            return
        if self._atomic():
            self._publish(np.repeat(lanes, count), self.shared, index)
        self._write(self.shared, space, lanes, (index, count), store, None)

    def _write(
        self, slots: Slots, space: str, lanes: Lanes, place: tuple[Any, int],
        store: Written, mapping: Any,
    ) -> None:  # fmt: skip
        index, count = place
        many = np.repeat(lanes, count) if count > 1 else lanes

        def same() -> Any:
            return np.repeat(store.same(), count) if count > 1 else store.same()

        self._before_write(slots, space, many, index, mapping, same)
        mine = self._mine(many, space, self._flag(space))
        slots.write[index] = mine
        store.do()
        lost = slots.write[index] != mine
        if np.count_nonzero(lost):
            equal = same()
            slots.keep_equal(index[lost & equal], mine[lost & equal])
            lost &= ~equal
            if np.count_nonzero(lost):
                n = int(lost.nonzero()[0][0])
                record = int(slots.write[index[n]])
                self._clash("write", "write", space, int(many[n]), record, int(index[n]), mapping)

    def _local(self, lanes: Lanes, offsets: Any, total: int, write: bool) -> None:
        if not self.init:
            return
        depth = self.st.local.shape[1]
        base = lanes * depth + (offsets - self.st.local.rows[lanes])
        index = base[:, None] + np.arange(total)
        if write:
            self.local[index] = True
        elif not (known := self.local[index] | ~self.used(total)).all():
            n = int(np.flatnonzero(~known.all(1))[0])
            self.report(
                "init",
                self.st.site,
                f"{self.place(self.st.site, 'read')} of local memory by {self.me(int(lanes[n]))}: "
                f"the thread has not written it",
            )

    def atomic(self, offsets: Any, size: int) -> None:
        """An atomic of shared memory."""
        lanes = self.st.lanes()
        index, count = self._index(offsets, size, self.grain)
        many = np.repeat(lanes, count) if count > 1 else lanes
        if self.init and (self.shared.write[index] == 0).any():
            n = int(np.flatnonzero(self.shared.write[index] == 0)[0])
            self.report(
                "init",
                self.st.site,
                f"{self.place(self.st.site, 'atomic')} on "
                f"{self._what('shared', int(index[n]), None)} by {self.me(int(many[n]))}: "
                "nobody has written it",
            )
        if self.race:
            self._before_write(self.shared, "shared", many, index, None, None)
        at = self.st.at
        waits = at is not None and any(m in WAITS for m in at.mods)
        if not waits:
            self._publish(many, self.shared, index)
        if waits or (at is not None and at.op == "atom"):
            self.hear(many, self.shared, index)
        self.shared.atomic(index, self._mine(many, "shared", True), self.facts.blind[self.st.site])
        self._remember([(self.shared, index)])

    def copy_begins(self, lanes: Lanes, flat: Any, size: int) -> None:
        """cp.async: from now until its wait, its target is nobody's."""
        if not self.race:
            return
        index, count = self._index(flat, size, self.grain)
        many = np.repeat(lanes, count) if count > 1 else lanes
        inside = index < len(self.shared.write)
        many, index = many[inside], index[inside]
        self._before_write(self.shared, "shared", many, index, None, None)
        self.shared.write[index] = self._mine(many, "shared", False)
        self.shared.begin_flight(index, many)

    def copy_ends(self, flat: Any, size: int) -> None:
        """cp.async has landed; its write by way of `store` follows."""
        if self.shared.flight is not None:
            index, _ = self._index(flat, size, self.grain)
            self.shared.flight[index[index < len(self.shared.flight)]] = 0

    def copies_bound(self, lanes: Lanes, flat: Any, size: int) -> None:
        """Copies are under way until somebody of the block has waited for an mbarrier."""
        if self.race:
            index, count = self._index(flat, size, self.grain)
            many = np.repeat(lanes, count)
            self.shared.begin_flight(index, many)
            self.bound.append((many, index))

    def waited(self, lanes: Lanes, of: int) -> None:
        """Such copies are done: the lanes' own (`of` 1), or all of their blocks of `of` threads."""
        kept = []
        for many, index in self.bound:
            done = np.isin(many // of, lanes // of)
            if self.shared.flight is not None:
                self.shared.flight[index[done]] = 0
            if not done.all():
                kept.append((many[~done], index[~done]))
        self.bound = kept

    def source_changed(self, lanes: Lanes, instr: Instr) -> None:
        """The sources of lanes' copies are not what they were when the copies began."""
        if self.race:
            self.report(
                "race",
                instr.line,
                f"read ({place_of(instr)}) by {self.me(int(lanes[0]))}: its source was written "
                "before the copy was waited for",
            )

    # global memory

    def _runs(self, addr: Any) -> list[tuple[Any, Any]]:
        """(mapping, lanes among those of `addr` or None) for tracked buffers."""
        mapping = self.o.mapping(int(addr.min()))
        if mapping is None:
            return []
        if int(np.maximum.reduce(addr)) < mapping.end:
            return [(mapping, None)]
        out, left = [], np.arange(len(addr))
        while len(left):
            mapping = self.o.mapping(int(addr[left[0]]))
            if mapping is None:
                left = left[1:]
                continue
            here = (addr[left] >= mapping.va) & (addr[left] < mapping.end)
            out.append((mapping, left[here]))
            left = left[~here]
        return out

    def global_load(self, addr: Any, total: int) -> None:
        """A read of global memory."""
        if not self.race:
            return
        written, strong, words = self.o.written, self._strong(), []
        for mapping, some in self._runs(addr):
            still = written is not None and id(mapping.buf) not in written
            if still and not strong:
                continue
            lanes, where, slots = self.st.lanes(), addr, self.o.slots(mapping)
            if some is not None:
                lanes, where = lanes[some], addr[some]
            index, count = self._index(self._offsets(mapping, where), total, self.o.grain)
            if strong:
                self.hear(np.repeat(lanes, count) if count > 1 else lanes, slots, index)
            if not still:
                self._read(slots, "global", lanes, index, count, mapping)
            words.append((slots, index))
        self._remember(words)

    def _offsets(self, mapping: Any, where: Any) -> Any:
        return (where - np.uint64(mapping.va - mapping.buf_offset)).astype(np.int64)

    def global_store(self, addr: Any, total: int, flags: Any) -> None:
        """A write of global memory that C has done (see `Written`)."""
        if not self.race:
            return
        for mapping, some in self._runs(addr):
            if self.o.written is not None:
                self.o.written.add(id(mapping.buf))
            which = slice(None) if some is None else some
            lanes, where = self.st.lanes()[which], addr[which]
            index, count = self._index(self._offsets(mapping, where), total, self.o.grain)
            slots = self.o.slots(mapping)
            if self._strong():
                self._publish(np.repeat(lanes, count), slots, index)
            done = Written(flags[which])
            self._write(slots, "global", lanes, (index, count), done, mapping)

    def global_atomic(self, addr: Any, size: int) -> None:
        """An atomic of global memory."""
        if not self.race:
            return
        lanes, words = self.st.lanes(), []
        for mapping, some in self._runs(addr):
            mine = lanes if some is None else lanes[some]
            where = addr if some is None else addr[some]
            index, count = self._index(self._offsets(mapping, where), size, self.o.grain)
            mine = np.repeat(mine, count) if count > 1 else mine
            slots = self.o.slots(mapping)
            self._before_write(slots, "global", mine, index, mapping, None)
            self._publish(mine, slots, index)
            if self.st.at is not None and self.st.at.op == "atom":
                self.hear(mine, slots, index)
            records = self._mine(mine, "global", True)
            slots.atomic(index, records, self.facts.blind[self.st.site])
            if self.narrow():
                self._apart(slots, mine, records, index, mapping)
            words.append((slots, index))
        self._remember(words)

    def _apart(self, slots: Slots, lanes: Lanes, mine: Words, index: Any, mapping: Any) -> None:
        """Blocks that meet at a word in one instruction whose scope is the block."""
        last = slots.write[index]
        threads = np.uint64(self.st.threads)
        apart = (last & THREADS) // threads != (mine & THREADS) // threads
        if np.count_nonzero(apart):
            n = int(apart.nonzero()[0][0])
            self._clash(
                "atomic", "atomic", "global", int(lanes[n]), int(last[n]), int(index[n]), mapping
            )


def _released(slots: Slots, index: Any) -> Any:
    return None if slots.released is None else slots.released[:, index]
