"""A chunk under the sanitizer: races, uninitialised reads, ends of buffers.

Time counts synchronizations (`tick`). Every granule of shared and global memory remembers its last
write and two reads, those of the lowest and the highest thread since, as one word each: tick, a
flag for volatile and atomic accesses, instruction, thread. Two accesses of different threads, one
of them a write, race unless something orders them: a barrier of the block or of the warp that both
passed, a named barrier, or a release that the second knows of (see `releases`). Two volatile or
atomic accesses of global memory do not race, nor do two writes of the same value, as
compute-sanitizer has it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .clocks import Watch
from .ends import Ends, at
from .records import SITE, SITES, STRONG, THREADS, TICK, Slots
from .releases import Words
from .spaces import scatter
from .state import Async, Lanes, State
from .tree import Instr

_WAITS = ("test_wait", "try_wait")
_ORDERED = ("relaxed", "acquire", "release", "acq_rel")
_VOLATILE = ("volatile", "mmio", *_ORDERED)


class Shadow(Ends):
    """A chunk's lanes: what orders them, and the records of its shared and local memory."""

    def __init__(self, owner: Watch, st: State) -> None:
        super().__init__(owner, st)
        code = st.launch.code
        self.race, self.init = "race" in owner.checks, "init" in owner.checks
        self.bounds, self.sync = "bounds" in owner.checks, "sync" in owner.checks
        self.grain = code.granules.get("shared", 4)
        limit = st.shared.shape[1]
        self.limit = limit
        self.shared = Slots.of(st.blocks * -(-limit // self.grain) if code.shared else 0)
        size = st.local.shape[0] * st.local.shape[1] if st.local is not None else 0
        self.local = np.zeros(size if self.init else 0, bool)

    def _what(self, space: str, index: int, mapping: Any) -> str:
        """The variable or buffer behind a granule."""
        if space == "shared":
            grains = -(-self.limit // self.grain)
            offset = index % grains * self.grain
            best = max(
                ((v, k) for k, v in self.launch.code.shared.items() if v <= offset),
                default=(0, "shared memory"),
            )
            return f"{best[1]}+{offset - best[0]}"
        va = mapping.va - mapping.buf_offset + index * self.o.grain
        extent = self.o.find(va)
        if extent is not None:
            return f"+{va - extent.va} in {extent}"
        return f"+{index * self.o.grain:#x} in {mapping.buf!r}"

    def _clash(
        self, verb: str, other: str, space: str, lane: int, record: int, index: int, mapping: Any
    ) -> None:
        site, thread = record >> SITE & SITES, record & int(THREADS)
        if space == "shared":
            thread = int(self.gid[thread])
        mine = self.place(self.st.site, verb)
        theirs = self.place(site, other)
        self.report(
            "race",
            (self.st.site, site, verb, other),
            f"{mine} of {self._what(space, index, mapping)} by {self.me(lane)} and {theirs} by "
            f"{self.who(thread)}: nothing orders them",
        )

    # order

    def _strong(self) -> bool:
        instr = self.st.at
        if instr is None:
            return False
        return instr.op in ("atom", "red") or any(m in _VOLATILE for m in instr.mods)

    def left(self, lane: int, gone: int, count: int, instr: Instr | None) -> None:
        """A barrier for the whole block that some of its threads never reach."""
        if self.sync:
            block = lane // self.st.threads * self.st.threads
            self.report(
                "sync",
                instr and instr.line,
                f"barrier ({at(instr)}) passed by {self.me(lane)}, which {count} threads of the "
                f"block never reach, {self.me(block + gone)} the first of them: they have exited",
            )

    # accesses

    def _index(self, offsets: Any, total: int, grain: int) -> tuple[Any, int]:
        """Granules of an access, all of a lane's side by side, and how many a lane has."""
        count = max(1, total // grain)
        base = np.asarray(offsets).astype(np.int64) // grain
        if count == 1:
            return base, 1
        return (base[:, None] + np.arange(count)).reshape(-1), count

    def _mine(self, lanes: Lanes, space: str, strong: bool) -> Words:
        who = lanes if space == "shared" else self.gid[lanes]
        head = self.o.tick << TICK | int(strong) << STRONG
        head |= min(self.st.site, SITES) << SITE
        return np.uint64(head) | who.astype(np.uint64)

    def _exempt(self, bad: Any, lanes: Lanes, records: Words, strong: bool, space: str) -> None:
        """Two strong accesses of global memory, or two atomics, are no race in their scope."""
        if strong and (space == "global" or self._atomic()):
            fine = (records >> np.uint64(STRONG)) & np.uint64(1) > 0
            if space == "global" and self.narrow():
                theirs = (records & THREADS).astype(np.int64)
                fine &= theirs // self.st.threads == self.gid[lanes] // self.st.threads
            bad &= ~fine

    def _atomic(self) -> bool:
        at = self.st.at
        return at is not None and (
            at.op in ("atom", "red")
            or (at.op == "mbarrier" and "init" not in at.mods)
            or any(m in _ORDERED for m in at.mods)
        )

    def _publish(self, lanes: Lanes, slots: Slots, index: Any) -> None:
        """A strong write; .release is a fence, too."""
        at = self.st.at
        if at is not None and any(m in ("release", "acq_rel") for m in at.mods):
            self.fence()
        self.publish(lanes, slots, index, at is not None and at.op not in ("st", "mbarrier"))

    def _flag(self, space: str) -> bool:
        return self._atomic() or (space == "global" and self._strong())

    def _read(
        self, slots: Slots, space: str, lanes: Lanes, index: Any, count: int, mapping: Any
    ) -> None:
        strong = self._flag(space)
        if count > 1:
            lanes = np.repeat(lanes, count)
        records = slots.write[index]
        if slots.flight is not None:
            self._in_flight(slots, lanes, index, "read")
        if int(records.max()) >= int(self.first):
            bad = self.unordered(lanes, records, space)
            self._exempt(bad, lanes, records, strong, space)
            if bad.any():
                for equal in slots.equals(index):
                    bad &= (equal == 0) | self.unordered(lanes, equal, space)
            if bad.any():
                n = int(np.flatnonzero(bad)[0])
                self._clash(
                    "read", "write", space, int(lanes[n]), int(records[n]), int(index[n]), mapping
                )
        mine = self._mine(lanes, space, strong)
        low = slots.low[index]
        keep = (low & THREADS) < (mine & THREADS)
        keep &= ~self._stale(low, lanes, space)
        slots.low[index[::-1]] = np.where(keep, low, mine)[::-1]
        high = slots.high[index]
        keep = (high & THREADS) > (mine & THREADS)
        keep &= ~self._stale(high, lanes, space)
        slots.high[index] = np.where(keep, high, mine)

    def _stale(self, records: Words, lanes: Lanes, space: str) -> NDArray[np.bool_]:
        """Records that are ordered before the lane by a barrier, or are of no thread."""
        if space == "shared":
            out: NDArray[np.bool_] = records < self.passed[lanes]
            other, mine = (records & THREADS).astype(np.int64), lanes
        else:
            out = records < self.o.start
            if out.all():
                return out
            other, mine = (records & THREADS).astype(np.int64), self.gid[lanes]
            same = other // self.st.threads == mine // self.st.threads
            out |= same & (records < self.passed[lanes])
        same = (other // 32 == mine // 32) if self.st.threads % 32 == 0 else (other == mine)
        out |= same & (records < self.warped[lanes])
        return out

    def _before_write(
        self, slots: Slots, space: str, lanes: Lanes, index: Any, mapping: Any, same: Any
    ) -> None:
        """Races of a write with what was done before; `same`: where the value does not change.

        Writes that nothing orders and that wrote the same value stay remembered.
        """
        strong = self._flag(space)
        if slots.flight is not None:
            self._in_flight(slots, lanes, index, "write")
        last, equals = slots.write[index], slots.equals(index)
        unchanged = np.zeros(len(index), bool)
        for records, other in (
            (last, "write"), *((record, "write") for record in equals),
            (slots.low[index], "read"), (slots.high[index], "read"),
        ):  # fmt: skip
            if int(records.max()) < int(self.first):
                continue
            bad = self.unordered(lanes, records, space)
            self._exempt(bad, lanes, records, strong, space)
            if same is not None and bad.any():
                equal = bad & same()
                if other == "write":
                    unchanged |= equal
                else:
                    equal &= self._after_own(records, [last, *equals], space)
                bad &= ~equal
            if bad.any():
                n = int(np.flatnonzero(bad)[0])
                self._clash(
                    "write", other, space, int(lanes[n]), int(records[n]), int(index[n]), mapping
                )
        slots.forget_equals(index[~unchanged])
        if unchanged.any():
            slots.keep_equal(index[unchanged], last[unchanged])

    def _after_own(self, reads: Words, writes: list[Words], space: str) -> NDArray[np.bool_]:
        """Reads by a block that itself had written before what is written once more."""
        own, threads = np.zeros(len(reads), bool), np.uint64(self.st.threads)
        if space == "global":
            for record in writes:
                later = reads >> np.uint64(TICK) > record >> np.uint64(TICK)
                block = (reads & THREADS) // threads == (record & THREADS) // threads
                own |= later & block & (record >= self.o.start)
        return own

    def _in_flight(self, slots: Slots, lanes: Lanes, index: Any, verb: str) -> None:
        assert slots.flight is not None
        owner = slots.flight[index]
        if owner.any():
            n = int(np.flatnonzero(owner)[0])
            self.report(
                "race",
                (self.st.site, verb, "flight"),
                f"{self.place(self.st.site, verb)} of {self._what('shared', int(index[n]), None)} "
                f"by {self.me(int(lanes[n]))}, where a cp.async of {self.me(int(owner[n]) - 1)} "
                f"is still under way",
            )

    # what loads and stores call

    def load(self, space: str, part: Any, offsets: Any, total: int) -> None:
        """A read of shared or local memory at byte offsets of its backing."""
        lanes = self._active(part)
        if space == "local":
            self._local(lanes, offsets, total, False)
            return
        index, count = self._index(offsets, total, self.grain)
        if self.init:
            never = self.shared.write[index] == 0
            if never.any():
                n = int(np.flatnonzero(never)[0])
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

    def store(self, space: str, part: Any, offsets: Any, rows: Any, total: int, table: Any) -> None:
        """A write of shared or local memory, which `table` (bytes) is made to hold."""
        lanes = self._active(part)
        if space == "local":
            self._local(lanes, offsets, total, True)
            scatter(table, offsets, rows, total)
            return
        index, count = self._index(offsets, total, self.grain)
        if not self.race:
            self.shared.write[index] = self._word()
            scatter(table, offsets, rows, total)
            return
        if self._atomic():
            self._publish(np.repeat(lanes, count), self.shared, index)
        self._write(self.shared, space, lanes, index, count, offsets, rows, total, table, None)

    def _write(
        self, slots: Slots, space: str, lanes: Lanes, index: Any, count: int, offsets: Any,
        rows: Any, total: int, table: Any, mapping: Any,
    ) -> None:  # fmt: skip
        many = np.repeat(lanes, count) if count > 1 else lanes

        def same() -> Any:
            found = _equal(table, offsets, rows, total)
            return np.repeat(found, count) if count > 1 else found

        self._before_write(slots, space, many, index, mapping, same)
        mine = self._mine(many, space, self._flag(space))
        slots.write[index] = mine
        scatter(table, offsets, rows, total)
        lost = slots.write[index] != mine
        if lost.any():
            equal = same()
            slots.keep_equal(index[lost & equal], mine[lost & equal])
            lost &= ~equal
            if lost.any():
                n = int(np.flatnonzero(lost)[0])
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
        elif not self.local[index].all():
            n = int(np.flatnonzero(~self.local[index].all(1))[0])
            self.report(
                "init",
                self.st.site,
                f"{self.place(self.st.site, 'read')} of local memory by {self.me(int(lanes[n]))}: "
                f"the thread has not written it",
            )

    def atomic(self, space: str, part: Any, offsets: Any, size: int) -> None:
        """An atomic of shared memory."""
        if space != "shared":
            return
        lanes = self._active(part)
        index, count = self._index(offsets, size, self.grain)
        many = np.repeat(lanes, count) if count > 1 else lanes
        if self.init and (self.shared.write[index] == 0).any():
            n = int(np.flatnonzero(self.shared.write[index] == 0)[0])
            self.report(
                "init",
                self.st.site,
                f"{self.place(self.st.site, 'atomic')} on {self._what(space, int(index[n]), None)} "
                f"by {self.me(int(many[n]))}: nobody has written it",
            )
        if self.race:
            self._before_write(self.shared, space, many, index, None, None)
        self._publish(many, self.shared, index)
        at = self.st.at
        if at is not None and (at.op == "atom" or any(m in _WAITS for m in at.mods)):
            self.hear(many, self.shared, index)
        self.shared.write[index] = self._mine(many, space, True)

    def copy_begins(self, lanes: Lanes, dst: Any, size: int) -> None:
        """cp.async: from now until its wait, its target is nobody's."""
        if not self.race:
            return
        index, count = self._index(self._flat(lanes, dst), size, self.grain)
        many = np.repeat(lanes, count) if count > 1 else lanes
        inside = index < len(self.shared.write)
        many, index = many[inside], index[inside]
        self._before_write(self.shared, "shared", many, index, None, None)
        if self.shared.flight is None:
            self.shared.flight = np.zeros(len(self.shared.write), np.int32)
        self.shared.write[index] = self._mine(many, "shared", False)
        self.shared.flight[index] = many + 1

    def copy_ends(self, lanes: Lanes, dst: Any, size: int) -> None:
        """cp.async has landed; its write by way of `store` follows."""
        if self.shared.flight is not None:
            index, _ = self._index(self._flat(lanes, dst), size, self.grain)
            self.shared.flight[index[index < len(self.shared.flight)]] = 0

    def copy_read(self, copy: Async, now: Any) -> None:
        """cp.async reads its source at any time until its wait: by then it is what it was."""
        changed = (now != copy.begun).any(1)
        if self.race and changed.any():
            lane = int(copy.lanes[np.flatnonzero(changed)[0]])
            self.report(
                "race",
                copy.instr.line,
                f"read ({at(copy.instr)}) by {self.me(lane)}: its source was written before the "
                f"copy was waited for",
            )

    def _flat(self, lanes: Lanes, dst: Any) -> Any:
        return lanes // self.st.threads * self.limit + dst.astype(np.int64)

    # global memory

    def _runs(self, addr: Any) -> list[tuple[Any, Any]]:
        """(mapping, lanes among those of `addr` or None) for tracked buffers."""
        mapping = self.o.mapping(int(addr.min()))
        if mapping is None:
            return []
        if int(addr.max()) < mapping.end:
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

    def global_load(self, part: Any, addr: Any, total: int) -> None:
        """A read of global memory."""
        if not self.race:
            return
        if not addr.ndim:
            addr = np.full(len(self._active(part)), addr)
        written, strong = self.o.written, self._strong()
        for mapping, some in self._runs(addr):
            still = written is not None and id(mapping.buf) not in written
            if still and not strong:
                continue
            lanes, where, slots = self._active(part), addr, self.o.slots(mapping)
            if some is not None:
                lanes, where = lanes[some], addr[some]
            index, count = self._index(self._offsets(mapping, where), total, self.o.grain)
            if strong:
                self.hear(np.repeat(lanes, count), slots, index)
            if not still:
                self._read(slots, "global", lanes, index, count, mapping)

    def _offsets(self, mapping: Any, where: Any) -> Any:
        return (where - np.uint64(mapping.va - mapping.buf_offset)).astype(np.int64)

    def global_store(self, part: Any, addr: Any, rows: Any, total: int) -> bool:
        """A write of global memory; whether it was done here."""
        if not self.race:
            return False
        runs = self._runs(addr)
        if (
            not runs
            or any(m.read_only for m, _ in runs)
            or sum(len(addr) if some is None else len(some) for _, some in runs) < len(addr)
        ):
            return False
        if (addr + np.uint64(total) > np.array([m.end for m, _ in runs], np.uint64).max()).any():
            return False
        for mapping, some in runs:
            if self.o.written is not None:
                self.o.written.add(id(mapping.buf))
            lanes, where, values = self._active(part), addr, rows
            if some is not None:
                lanes, where, values = lanes[some], addr[some], rows[some]
            offsets = self._offsets(mapping, where)
            index, count = self._index(offsets, total, self.o.grain)
            slots = self.o.slots(mapping)
            if self._strong():
                self._publish(np.repeat(lanes, count), slots, index)
            self._write(
                slots, "global", lanes, index, count, offsets, values, total, mapping.buf.array,
                mapping,
            )  # fmt: skip
            mapping.wrote(int(where.min()) - mapping.va, int(where.max()) + total - mapping.va)
        return True

    def global_atomic(self, part: Any, addr: Any, size: int) -> None:
        """An atomic of global memory."""
        if not self.race:
            return
        lanes = self._active(part)
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
            slots.write[index] = records
            if self.narrow():
                self._apart(slots, mine, records, index, mapping)

    def _apart(self, slots: Slots, lanes: Lanes, mine: Words, index: Any, mapping: Any) -> None:
        """Blocks that meet at a word in one instruction whose scope is the block."""
        last = slots.write[index]
        threads = np.uint64(self.st.threads)
        apart = (last & THREADS) // threads != (mine & THREADS) // threads
        if apart.any():
            n = int(np.flatnonzero(apart)[0])
            self._clash(
                "atomic", "atomic", "global", int(lanes[n]), int(last[n]), int(index[n]), mapping
            )


def _pieces(data: Any, total: int) -> Any:
    """Bytes as (values, words): words of at most 8 bytes."""
    word = min(total, 8)
    flat = data[: len(data) // total * total].view(f"u{word}")
    return flat.reshape(-1, total // word)


def _equal(table: Any, offsets: Any, rows: Any, total: int) -> Any:
    """Mask of the rows that the table already holds."""
    values = _pieces(np.ascontiguousarray(rows).reshape(-1).view(np.uint8), total)
    return (_pieces(table, total)[np.asarray(offsets) // total] == values).all(1)
