"""A chunk under the sanitizer: what its loads, stores, atomics and copies tell."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..parser.syntax import Instr
from ..state import ChunkState, Lanes
from .access_checks import instruction_text
from .clocks import SanitizerProtocol
from .fenced_writes import Words
from .races import WAITS, RaceChecks
from .records import THREADS, AccessRecords

POLLERS = 1024
"""Lanes that may poll together; more are not remembered as such."""


class PolledAccess(NamedTuple):
    """A volatile or atomic access: lanes and addresses, the words it left, the event before it."""

    who: bytes
    where: bytes
    words: list[tuple[AccessRecords, Any, Words, Any]]
    event: int


class DoneStore:
    """A store that C has done. `flags`: bit 0, memory held a lane's value; bit 1, it does now."""

    def __init__(self, flags: Any) -> None:
        self.flags, self.bit = flags, 1

    def switch_to_after_store(self) -> None:
        """Go on to the moment after it."""
        self.bit = 2

    def lanes_with_value(self) -> Any:
        """Mask of the lanes whose value memory holds."""
        return self.flags & self.bit > 0


class ChunkShadow(RaceChecks):
    """A chunk's lanes as their instructions see it, and who wrote its local memory."""

    def __init__(self, owner: SanitizerProtocol, st: ChunkState) -> None:
        super().__init__(owner, st)
        size = st.local.shape[0] * st.local.shape[1] if st.local is not None else 0
        self.local = np.zeros(size if self.init else 0, bool)
        self.polls: dict[int, PolledAccess] = {}
        self.poll: tuple[bytes, bytes] | None = None
        self.bound: list[tuple[Lanes, Any]] = []

    def is_repeated_poll(self, where: Any) -> bool:
        """True if the lanes did the same to the same words and nothing has happened since.

        Whoever polls a word finds what it found, and its record there still holds: what the lanes
        are ordered after and what others are ordered after of them changes with events alone.
        """
        self.poll = None
        if not self.race or not self._is_strong():
            return False
        lanes = self.st.active_lanes()
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
                and np.array_equal(_release_numbers_at(slots, index), released)
                for slots, index, written, released in known.words
            )
        )

    def _remember_poll(self, words: list[tuple[AccessRecords, Any]]) -> None:
        """Keep what a strong access left in its words."""
        if self.poll is not None:
            left = [(s, at, s.write[at], _release_numbers_at(s, at)) for s, at in words]
            self.polls[self.st.site] = PolledAccess(*self.poll, left, self.events)

    # accesses of the active lanes

    def on_shared_or_local_load(self, space: str, offsets: Any, total: int) -> None:
        """A read of shared or local memory at byte offsets of its backing."""
        lanes = self.st.active_lanes()
        if space == "local":
            self._check_local_access(lanes, offsets, total, False)
            return
        index, count = self._granules_and_count(offsets, total, self.grain)
        if self.init:
            never = self.shared.write[index] == 0
            if count > 1 and np.count_nonzero(never):
                never &= np.tile(self.used_byte_mask(total).reshape(count, -1).any(1), len(lanes))
            if np.count_nonzero(never):
                n = int(never.nonzero()[0][0])
                self.add_finding(
                    "init",
                    self.st.site,
                    f"{self.site_text(self.st.site, 'read')} of "
                    f"{self._granule_text(space, int(index[n]), None)} by "
                    f"{self.lane_text(int(lanes[n // count]))}: nobody has written it",
                )
        if self.race:
            if self._is_atomic():
                self.on_strong_read(np.repeat(lanes, count), self.shared, index)
            self._check_and_record_read(self.shared, space, lanes, index, count, None)

    def on_shared_or_local_store(
        self, space: str, offsets: Any, total: int, store: DoneStore
    ) -> None:
        """A write of shared or local memory."""
        lanes = self.st.active_lanes()
        if space == "local":
            self._check_local_access(lanes, offsets, total, True)
            store.switch_to_after_store()
            return
        index, count = self._granules_and_count(offsets, total, self.grain)
        if not self.race:
            self.shared.write[index] = self._now_word()
            store.switch_to_after_store()
            return
        if self._is_atomic():
            self._record_strong_write(np.repeat(lanes, count), self.shared, index)
        self._check_and_record_write(self.shared, space, lanes, (index, count), store, None)

    def _check_and_record_write(
        self, slots: AccessRecords, space: str, lanes: Lanes, place: tuple[Any, int],
        store: DoneStore, mapping: Any,
    ) -> None:  # fmt: skip
        index, count = place
        many = np.repeat(lanes, count) if count > 1 else lanes

        def same() -> Any:
            return (
                np.repeat(store.lanes_with_value(), count)
                if count > 1
                else store.lanes_with_value()
            )

        self._check_write_races(slots, space, many, index, mapping, same)
        mine = self._make_own_records(many, space, self._counts_as_strong(space))
        slots.write[index] = mine
        store.switch_to_after_store()
        lost = slots.write[index] != mine
        if np.count_nonzero(lost):
            equal = same()
            slots.keep_equal_writes(index[lost & equal], mine[lost & equal])
            lost &= ~equal
            if np.count_nonzero(lost):
                n = int(lost.nonzero()[0][0])
                record = int(slots.write[index[n]])
                self._report_race(
                    "write", "write", space, int(many[n]), record, int(index[n]), mapping
                )

    def _check_local_access(self, lanes: Lanes, offsets: Any, total: int, write: bool) -> None:
        if not self.init:
            return
        depth = self.st.local.shape[1]
        base = lanes * depth + (offsets - self.st.local.rows[lanes])
        index = base[:, None] + np.arange(total)
        if write:
            self.local[index] = True
        elif not (known := self.local[index] | ~self.used_byte_mask(total)).all():
            n = int(np.flatnonzero(~known.all(1))[0])
            self.add_finding(
                "init",
                self.st.site,
                f"{self.site_text(self.st.site, 'read')} of local memory by "
                f"{self.lane_text(int(lanes[n]))}: the thread has not written it",
            )

    def on_shared_atomic(self, offsets: Any, size: int) -> None:
        """An atomic of shared memory."""
        lanes = self.st.active_lanes()
        index, count = self._granules_and_count(offsets, size, self.grain)
        many = np.repeat(lanes, count) if count > 1 else lanes
        if self.init and (self.shared.write[index] == 0).any():
            n = int(np.flatnonzero(self.shared.write[index] == 0)[0])
            self.add_finding(
                "init",
                self.st.site,
                f"{self.site_text(self.st.site, 'atomic')} on "
                f"{self._granule_text('shared', int(index[n]), None)} by "
                f"{self.lane_text(int(many[n]))}: nobody has written it",
            )
        if self.race:
            self._check_write_races(self.shared, "shared", many, index, None, None)
        at = self.st.at
        waits = at is not None and any(m in WAITS for m in at.mods)
        if not waits:
            self._record_strong_write(many, self.shared, index)
        if waits or (at is not None and at.op == "atom"):
            self.on_strong_read(many, self.shared, index)
        self.shared.record_atomics(
            index, self._make_own_records(many, "shared", True), self.facts.blind[self.st.site]
        )
        self._remember_poll([(self.shared, index)])

    def on_copy_begin(self, lanes: Lanes, flat: Any, size: int) -> None:
        """cp.async: from now until its wait, its target is nobody's."""
        if not self.race:
            return
        index, count = self._granules_and_count(flat, size, self.grain)
        many = np.repeat(lanes, count) if count > 1 else lanes
        inside = index < len(self.shared.write)
        many, index = many[inside], index[inside]
        self._check_write_races(self.shared, "shared", many, index, None, None)
        self.shared.write[index] = self._make_own_records(many, "shared", False)
        self.shared.mark_copies_in_flight(index, many)

    def on_copy_end(self, flat: Any, size: int) -> None:
        """cp.async has landed; its write by `on_shared_or_local_store` follows."""
        if self.shared.flight is not None:
            index, _ = self._granules_and_count(flat, size, self.grain)
            self.shared.flight[index[index < len(self.shared.flight)]] = 0

    def on_copies_tied_to_mbarrier(self, lanes: Lanes, flat: Any, size: int) -> None:
        """Copies are under way until somebody of the block has waited for an mbarrier."""
        if self.race:
            index, count = self._granules_and_count(flat, size, self.grain)
            many = np.repeat(lanes, count)
            self.shared.mark_copies_in_flight(index, many)
            self.bound.append((many, index))

    def on_copies_waited(self, lanes: Lanes, of: int) -> None:
        """Such copies are done: the lanes' own (`of` 1), or all of their blocks of `of` threads."""
        kept = []
        for many, index in self.bound:
            done = np.isin(many // of, lanes // of)
            if self.shared.flight is not None:
                self.shared.flight[index[done]] = 0
            if not done.all():
                kept.append((many[~done], index[~done]))
        self.bound = kept

    def report_changed_copy_source(self, lanes: Lanes, instr: Instr) -> None:
        """The sources of lanes' copies are not what they were when the copies began."""
        if self.race:
            self.add_finding(
                "race",
                instr.line,
                f"read ({instruction_text(instr)}) by {self.lane_text(int(lanes[0]))}: its source "
                "was written before the copy was waited for",
            )

    # global memory

    def _lanes_by_mapping(self, addr: Any) -> list[tuple[Any, Any]]:
        """(mapping, lanes among those of `addr` or None) for tracked buffers."""
        mapping = self.o.mapping_at(int(addr.min()))
        if mapping is None:
            return []
        if int(np.maximum.reduce(addr)) < mapping.end:
            return [(mapping, None)]
        out, left = [], np.arange(len(addr))
        while len(left):
            mapping = self.o.mapping_at(int(addr[left[0]]))
            if mapping is None:
                left = left[1:]
                continue
            here = (addr[left] >= mapping.va) & (addr[left] < mapping.end)
            out.append((mapping, left[here]))
            left = left[~here]
        return out

    def on_global_load(self, addr: Any, total: int) -> None:
        """A read of global memory."""
        if not self.race:
            return
        written, strong, words = self.o.written, self._is_strong(), []
        for mapping, some in self._lanes_by_mapping(addr):
            still = written is not None and id(mapping.buf) not in written
            if still and not strong:
                continue
            lanes, where, slots = self.st.active_lanes(), addr, self.o.records_of_mapping(mapping)
            if some is not None:
                lanes, where = lanes[some], addr[some]
            index, count = self._granules_and_count(
                self._buffer_offsets(mapping, where), total, self.o.grain
            )
            if strong:
                self.on_strong_read(np.repeat(lanes, count) if count > 1 else lanes, slots, index)
            if not still:
                self._check_and_record_read(slots, "global", lanes, index, count, mapping)
            words.append((slots, index))
        self._remember_poll(words)

    def _buffer_offsets(self, mapping: Any, where: Any) -> Any:
        return (where - np.uint64(mapping.va - mapping.buf_offset)).astype(np.int64)

    def on_global_store(self, addr: Any, total: int, flags: Any) -> None:
        """A write of global memory that C has done (see `DoneStore`)."""
        if not self.race:
            return
        for mapping, some in self._lanes_by_mapping(addr):
            if self.o.written is not None:
                self.o.written.add(id(mapping.buf))
            which = slice(None) if some is None else some
            lanes, where = self.st.active_lanes()[which], addr[which]
            index, count = self._granules_and_count(
                self._buffer_offsets(mapping, where), total, self.o.grain
            )
            slots = self.o.records_of_mapping(mapping)
            if self._is_strong():
                self._record_strong_write(np.repeat(lanes, count), slots, index)
            done = DoneStore(flags[which])
            self._check_and_record_write(slots, "global", lanes, (index, count), done, mapping)

    def on_global_atomic(self, addr: Any, size: int) -> None:
        """An atomic of global memory."""
        if not self.race:
            return
        lanes, words = self.st.active_lanes(), []
        for mapping, some in self._lanes_by_mapping(addr):
            mine = lanes if some is None else lanes[some]
            where = addr if some is None else addr[some]
            index, count = self._granules_and_count(
                self._buffer_offsets(mapping, where), size, self.o.grain
            )
            mine = np.repeat(mine, count) if count > 1 else mine
            slots = self.o.records_of_mapping(mapping)
            self._check_write_races(slots, "global", mine, index, mapping, None)
            self._record_strong_write(mine, slots, index)
            if self.st.at is not None and self.st.at.op == "atom":
                self.on_strong_read(mine, slots, index)
            records = self._make_own_records(mine, "global", True)
            slots.record_atomics(index, records, self.facts.blind[self.st.site])
            if self.is_block_scoped():
                self._report_block_scope_race(slots, mine, records, index, mapping)
            words.append((slots, index))
        self._remember_poll(words)

    def _report_block_scope_race(
        self, slots: AccessRecords, lanes: Lanes, mine: Words, index: Any, mapping: Any
    ) -> None:
        """Blocks that meet at a word in one instruction whose scope is the block."""
        last = slots.write[index]
        threads = np.uint64(self.st.threads)
        apart = (last & THREADS) // threads != (mine & THREADS) // threads
        if np.count_nonzero(apart):
            n = int(apart.nonzero()[0][0])
            self._report_race(
                "atomic", "atomic", "global", int(lanes[n]), int(last[n]), int(index[n]), mapping
            )


def _release_numbers_at(slots: AccessRecords, index: Any) -> Any:
    return None if slots.released is None else slots.released[:, index]
