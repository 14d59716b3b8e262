"""The sanitizer's records as compiled code sees them (`Watch` of watch.h)."""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from ...mappings_table import array_address
from ..sanitizer.native_accesses import check_native_accesses
from ..sanitizer.records import AccessRecords

if TYPE_CHECKING:
    from ..state import ChunkState

PIECES, LOST = 64, 1 << 16
"""Buffers that are known at a time; reads that C keeps before it tells of them."""
TOLD = np.dtype([
    ("lane", np.int64), ("at", np.uint64), ("site", np.uint32), ("size", np.uint32),
    ("what", np.uint8), ("space", np.uint8), ("same", np.uint8), ("rest", np.uint8, 5),
])  # fmt: skip
"""`Told` of watch.h."""
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_CALLED = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int)
_TOLD = ctypes.PYFUNCTYPE(None, ctypes.c_uint64)


class MappingRow(ctypes.Structure):
    """`MappingRow` of machine.h."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("start", "size", "memory", "kept", "state", "writable")
    ]  # fmt: skip


class WatchedBuffer(ctypes.Structure):
    """`WatchedBuffer` of watch.h."""

    _fields_ = [
        ("start", ctypes.c_uint64), ("end", ctypes.c_uint64), ("mapping", MappingRow),
        ("wrote", _POINTER),
        *((name, ctypes.c_uint64) for name in (
            "origin", "records", "base", "granules", "number",
        )),
        *((name, _POINTER) for name in ("write", "low", "high", "equal", "crowd", "flight")),
    ]  # fmt: skip

    def point_to_records(self, slots: AccessRecords) -> None:
        """Take the addresses of a memory's records."""
        self.granules = len(slots.write)
        self.write, self.low, self.high = (
            array_address(slots.write),
            array_address(slots.low),
            array_address(slots.high),
        )
        self.equal = 0 if slots.equal is None else array_address(slots.equal)
        self.crowd = 0 if slots.crowd is None else array_address(slots.crowd.some)
        self.flight = 0 if slots.flight is None else array_address(slots.flight)


class WatchStruct(ctypes.Structure):
    """`Watch` of watch.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in (
            "tick", "start", "race", "init", "crowded", "can_cross", "crossed", "calm",
            "full", "shared_end",
            "whole_warps", "shared_grain", "global_grain", "token",
        )),
        *((name, _POINTER) for name in (
            "gid", "thread", "passed", "warped", "local", "saved", "lost",
        )),
        ("lost_count", _INT), ("lost_room", _INT), ("piece_count", _INT),
        ("told", _POINTER), ("told_count", _INT), ("told_room", _INT), ("bound", _INT),
        ("locate", _CALLED), ("tell", _TOLD), ("own", WatchedBuffer),
        ("pieces", WatchedBuffer * PIECES),
    ]  # fmt: skip


_watchers: WeakValueDictionary[int, NativeShadow] = WeakValueDictionary()
_numbers = itertools.count(1)


_LOCATE = _CALLED(lambda token, at, write: _watchers[token].try_enter_buffer_at(at, bool(write)))
_TELL = _TOLD(lambda token: _watchers[token].check_accesses_told_by_c())


class NativeShadow:
    """One chunk's shadow, shared with compiled code. `widest`: granules of its widest store."""

    def __init__(self, widest: int, st: ChunkState) -> None:
        self.told = np.zeros(max(st.n, LOST), TOLD)
        self.struct = WatchStruct(
            locate=_LOCATE, tell=_TELL, token=next(_numbers), lost_room=LOST,
            told=array_address(self.told), told_room=len(self.told),
        )  # fmt: skip
        self.raised: BaseException | None = None
        _watchers[self.struct.token] = self
        self.saved = np.empty((st.n * widest, 2), np.uint64)
        self.struct.saved = array_address(self.saved)
        self.lost = np.empty((0, 3), np.uint64)
        self.rows: Any = None
        self.slots: list[AccessRecords] = []
        self.held: list[Any] = []
        self.reuse_for_chunk(st)

    @property
    def struct_address(self) -> int:
        """Address of the C struct."""
        return ctypes.addressof(self.struct)

    def reuse_for_chunk(self, st: ChunkState) -> None:
        """Another chunk of the same size."""
        shadow: Any = st.shadow
        self.shadow, self.o, w = shadow, shadow.o, self.struct
        launch = st.launch
        w.start, w.race, w.init = int(self.o.start), shadow.race, shadow.init
        w.crowded = shadow.race and self.o.facts.crowded
        if w.crowded and not len(self.lost):
            self.lost = np.empty((LOST, 3), np.uint64)
            w.lost = array_address(self.lost)
        w.shared_end = limit = st.shared.shape[1]
        if shadow.bounds and not launch.code.dynamic:
            w.shared_end = min(limit, launch.code.shared_bytes)
        w.whole_warps = st.threads % 32 == 0
        w.shared_grain = shadow.grain.bit_length() - 1
        w.global_grain = self.o.grain.bit_length() - 1
        w.gid, w.thread = array_address(shadow.gid), array_address(st.thread)
        w.passed, w.warped = array_address(shadow.passed), array_address(shadow.warped)
        w.local = array_address(shadow.local) if len(shadow.local) else 0
        w.full, self.shapes = 0, -1

    def forget_launch(self) -> None:
        """Let go of what belongs to a launch."""
        self.shadow = self.o = self.rows = None
        self.slots, self.held = [], []

    def on_run_begin(self, rows: Any) -> None:
        """C is about to run; `rows`: the mappings."""
        w, shadow = self.struct, self.shadow
        if self.shapes != AccessRecords.shapes or rows is not self.rows or w.piece_count == PIECES:
            self.shapes, self.rows = AccessRecords.shapes, rows
            w.piece_count = 0
            self.slots = [shadow.shared]
            self.held = [rows]
            w.own.point_to_records(shadow.shared)
        w.lost_count = w.told_count = w.calm = 0
        self._update_struct()

    def _update_struct(self) -> None:
        """Let C know of the time, and of memories that have begun to remember more."""
        w, shadow = self.struct, self.shadow
        w.tick, w.crossed, w.bound = self.o.tick, 0, len(shadow.bound)
        w.can_cross = not w.crowded and shadow.knows is None and shadow.shared.crowd is None
        if self.shapes != AccessRecords.shapes:
            self.shapes = AccessRecords.shapes
            w.own.point_to_records(shadow.shared)
            for piece in w.pieces[: w.piece_count]:
                if piece.write:
                    piece.point_to_records(self.slots[piece.number])

    def on_run_end(self) -> None:
        """C has run. Raises what was raised while it told."""
        if self.struct.crossed:
            self.shadow.on_barriers_in_c(self.struct.tick)
        raised, self.raised = self.raised, None
        if raised is not None:
            raise raised

    def check_copy_source_reads(self, copies: Any) -> None:
        """Copies (see `chunk.COPY`) read their sources."""
        told = np.zeros(len(copies), TOLD)
        told["lane"], told["at"], told["site"] = copies["lane"], copies["src"], copies["site"]
        told["size"], told["what"], told["space"] = copies["real"], ord("r"), ord("g")
        if len(told := told[told["size"] > 0]):
            check_native_accesses(self.shadow, told)

    def check_accesses_told_by_c(self) -> None:
        """C tells of barriers, of reads that it keeps no record of, and of other accesses."""
        w = self.struct
        try:
            if w.crossed:
                self.shadow.on_barriers_in_c(w.tick)
            lost = self.lost[: w.lost_count]
            for number in np.unique(lost[:, 0]).tolist():
                some = lost[lost[:, 0] == number]
                self.slots[number].add_middle_reads(some[:, 1].astype(np.int64), some[:, 2])
            if w.told_count:
                check_native_accesses(self.shadow, self.told[: w.told_count])
        except BaseException as e:  # which C cannot pass on
            self.raised = self.raised or e
        self._update_struct()

    def try_enter_buffer_at(self, address: int, write: bool) -> bool:
        """Enter the piece that holds an address; False: C tells of the access."""
        w, o = self.struct, self.o
        mapping = o.mapping_at(address)
        row = int(np.searchsorted(self.rows[:, 0], np.uint64(address), "right")) - 1
        if mapping is None or row < 0 or int(self.rows[row, 0]) != mapping.va:
            return False
        if write and self.shadow.race and o.written is not None:
            o.written.add(id(mapping.buf))
            for known in w.pieces[: w.piece_count]:
                if known.mapping.start == mapping.va:
                    known.records = True
                    if known.start <= address < known.end:
                        return True
        bounds = self._touchable_bounds(mapping, address)
        if w.piece_count == PIECES or bounds is None:
            return False
        piece, row = w.pieces[w.piece_count], self.rows[row]
        piece.start, piece.end, piece.origin, wrote = bounds
        piece.mapping = MappingRow(*row.tolist())
        piece.wrote = 0 if wrote is None else array_address(wrote)
        piece.base = mapping.va - mapping.buf_offset
        piece.records, piece.write = False, 0
        self.held += [wrote, mapping.mapped_memory]
        if self.shadow.race:
            slots = o.records_of_mapping(mapping)
            piece.records = o.written is None or id(mapping.buf) in o.written
            piece.number = len(self.slots)
            self.slots.append(slots)
            piece.point_to_records(slots)
        w.piece_count += 1
        return True

    def _touchable_bounds(self, mapping: Any, address: int) -> tuple[int, int, int, Any] | None:
        """Start and end of what may be touched there, where its words begin, which are written."""
        allocated = self.o.allocated
        piece = self.o.piece_at(address)
        if piece is None:
            if allocated.ever_had_piece_in(mapping.va, mapping.end):
                return None
            asked = mapping.va - mapping.buf_offset + mapping.buf.asked
            return mapping.va, min(mapping.end, asked), mapping.va, None
        if piece.wrote is not None and piece.wrote.all():
            piece.wrote = None
        wrote = piece.wrote if self.shadow.init else None
        return max(mapping.va, piece.va), min(mapping.end, piece.end), piece.va, wrote
