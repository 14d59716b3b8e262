"""A chunk on compiled code: the registers in memory that C and the host share, and the calls."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...mappings_table import array_address
from ..operands import CONTAINER
from ..spaces import UNPLACED, WINDOW_BYTES
from ..state import UNWRITTEN, ChunkState, GridLaunch, KernelFault, Lanes
from ..translate import KernelCode
from .build import KernelLibrary
from .c_file import c_source
from .shadow import NativeShadow

NO_LIMIT = 1 << 40
COPIES = 4
"""Copies of a lane that may be under way, before there is room for more."""
COPY = np.dtype([(name, np.int64) for name in ("to", "from", "src")] + [
    (name, np.int64) for name in ("lane", "group", "size", "real", "site")] + [
    ("begun", np.uint8, 16)])  # fmt: skip
"""`Copy` of machine.h."""
KEPT = 4
"""Chunks of a kernel whose memory is kept for the next launch."""
LOOK, WHOLE, SPLIT, WRONG = range(4)
"""Results of `run` (see `c_file._run_function_lines`)."""
LOOKS = 64
"""Looks at memory of a lane that a search for endless waits remembers."""
ONE_LOOK = np.dtype([(name, np.int64) for name in ("at", "space", "lane")] + [
    ("address", np.uint64)])  # fmt: skip
"""`Look` of machine.h."""
NONE, ADDRESS, SOURCE, ARRIVALS, ROOM = range(5)
"""Why an instruction cannot go on: W_NONE to W_ROOM of machine.h."""
_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64


class CallStruct(ctypes.Structure):
    """`Call` of machine.h."""

    _fields_ = [
        *((name, _INT) for name in (
            "entry", "n", "whole", "limit", "budget", "trusted", "done", "steps", "instructions",
            "moved", "at", "lane", "why",
        )),
        ("address", ctypes.c_uint64),
        *((name, _INT) for name in ("note", "note_at", "expected", "arrived")),
        *((name, ctypes.c_uint64) for name in ("ticks", "later")),
        *((name, _POINTER) for name in (
            "lanes", "next", "scratch", "some", "ended", "live", "reg", "special", "special_mask",
            "symbol", "shared",
        )),
        ("shared_bytes", _INT), ("threads", _INT), ("local", _POINTER), ("rows", _POINTER),
        ("depth", _INT), ("bank0", _POINTER), ("bank0_bytes", _INT), ("param", _POINTER),
        ("param_bytes", _INT), ("bank3", _POINTER), ("bank3_bytes", _INT), ("shared_window", _INT),
        ("local_window", _INT), ("mappings", _POINTER), ("mapping_count", _INT),
        ("watch", _POINTER), ("copies", _POINTER), ("commits", _POINTER), ("copy_count", _INT),
        ("copy_room", _INT), ("looks", _POINTER),
        *((name, _INT) for name in ("look_count", "look_room", "changes")),
    ]  # fmt: skip


class NativeKernel:
    """A kernel as C: its library, chunks that have ended (`idle`).

    `widest`: granules of its widest store, for watched code.
    """

    def __init__(self, code: KernelCode) -> None:
        self.code, self.text = code, c_source(code)
        self.library = KernelLibrary(self.text)
        self.looking: KernelLibrary | None = None
        self.watched = code.frame.watched
        grain = min(code.granules.values(), default=1)
        stores = [text.store for text in code.texts.values() if text.store is not None]
        self.widest = max([s.size * len(s.values) // grain for s in stores], default=1)
        self.idle: dict[Any, NativeChunk] = {}
        self.types = [CONTAINER[code.kernel.regs[k].bits] for k in code.kept]
        self.copying = any(i.op == "cp" for i in code.kernel.instrs)
        self.zeros = {
            n for n, k in enumerate(code.kept) if code.blocks and k in code.blocks[0].alive
        }  # read before they are written, in some lane


def get_or_compile_kernel(code: KernelCode) -> NativeKernel:
    """A kernel, compiled. Raises NoCompilerError."""
    if code.native is None:
        code.native = NativeKernel(code)
    assert isinstance(code.native, NativeKernel)
    return code.native


class NativeChunk:
    """The state of one chunk as C sees it."""

    def __init__(self, native: NativeKernel, launch: GridLaunch, st: ChunkState) -> None:
        self.native, self.launch, self.st = native, launch, st
        self.call = CallStruct()
        self.argument = ctypes.addressof(self.call)
        self.next = np.empty(st.n, np.int32)
        self.scratch, self.some, self.ended = (np.empty(st.n, np.uint64) for _ in range(3))
        self.mapping_table: Any = None
        self.watcher: NativeShadow | None = None
        if native.watched:
            self.watcher = NativeShadow(native.widest, st)
            self.call.watch = self.watcher.struct_address
        self.copies = np.zeros(0, COPY)
        self.looks: Any = None
        if native.copying:
            self.commits = np.zeros(st.n, np.int64)
            self.call.commits = array_address(self.commits)
            self.double_copy_room()
        self._allocate_registers()
        self._set_geometry()
        self._set_launch_constants()
        self._set_unwritten_registers_to_zero()

    def double_copy_room(self) -> None:
        """Room for as many copies once more."""
        c = self.call
        more = np.zeros(max(2 * len(self.copies), COPIES * self.st.n), COPY)
        more[: c.copy_count] = self.copies[: c.copy_count]
        self.copies, c.copies, c.copy_room = more, array_address(more), len(more)

    def _allocate_registers(self) -> None:
        """One piece of memory for all registers that live between blocks."""
        st, native = self.st, self.native
        sizes = [t.itemsize * st.n + 63 & ~63 for t in native.types]
        self.memory = np.empty(sum(sizes) + 64, np.uint8)
        first = array_address(self.memory)
        start, places = -first % 64, []
        for index, t, size in zip(native.code.kept, native.types, sizes, strict=True):
            st.R[index] = self.memory[start : start + t.itemsize * st.n].view(t)
            places.append(first + start)
            start += size
        self.places = np.array(places, np.uint64)

    def _set_unwritten_registers_to_zero(self) -> None:
        """Registers that a kernel reads and has not written are 0."""
        for n, index in enumerate(self.native.code.kept):
            if n in self.native.zeros:
                self.st.R[index][...] = 0

    def _set_geometry(self) -> None:
        """Set what stays from launch to launch of one geometry."""
        st, launch, frame, c = self.st, self.launch, self.native.code.frame, self.call
        known = st.special
        made = [
            known[n] if n in known else launch.special_register_value(n, st) for n in frame.specials
        ]
        self.specials = [np.ascontiguousarray(v, np.uint32) for v in made]
        self.special_at = np.array([array_address(v) for v in self.specials], np.uint64)
        self.masks = np.array([-1 if v.ndim else 0 for v in made], np.int64)
        self.symbols = np.zeros(len(frame.symbols), np.uint64)
        c.next, c.scratch, c.reg = (
            array_address(self.next),
            array_address(self.scratch),
            array_address(self.places),
        )
        c.some, c.ended = array_address(self.some), array_address(self.ended)
        c.special, c.special_mask, c.symbol = (
            array_address(self.special_at),
            array_address(self.masks),
            array_address(self.symbols),
        )
        c.shared, c.shared_bytes, c.threads = (
            array_address(st.shared),
            st.shared.shape[1],
            st.threads,
        )
        if st.local is not None:
            c.local, c.rows, c.depth = (
                array_address(st.local.bytes),
                array_address(st.local.rows),
                st.local.shape[1],
            )

    def _set_launch_constants(self) -> None:
        """Set what each launch has of its own."""
        launch, c = self.launch, self.call
        for n, (kind, name) in enumerate(self.native.code.frame.symbols):
            value = (
                launch.window_base(name)
                if kind == "base"
                else self._symbol_or_unplaced_address(n, name)
            )
            self.symbols[n] = value & (1 << 64) - 1
        zero, three = launch.banks.get(0, b""), launch.banks.get(3, b"")
        self.banks = np.frombuffer(zero or b"\0", np.uint8), np.frombuffer(three or b"\0", np.uint8)
        c.bank0, c.bank0_bytes = array_address(self.banks[0]), len(zero)
        c.param = array_address(self.banks[0]) + launch.param_base
        c.param_bytes = max(0, len(zero) - launch.param_base)
        c.bank3, c.bank3_bytes = array_address(self.banks[1]), len(three)
        c.shared_window, c.local_window = launch.shared_window, launch.local_window

    def _symbol_or_unplaced_address(self, n: int, name: str) -> int:
        """Address of a variable, or one where nothing lies, whose accesses say so."""
        try:
            return self.launch.symbol_address(name)
        except KernelFault:
            return UNPLACED + (n << 32)

    def reuse_for_launch(self, launch: GridLaunch) -> None:
        """Take the chunk of another launch of the same geometry."""
        st = self.st
        self.launch = st.launch = launch
        self._set_launch_constants()
        st.m = st.live = st.fault_mask = st.at = None
        if self.native.copying:
            self.commits[:] = self.call.copy_count = 0
        st.shared.fill(UNWRITTEN)
        if self.watcher is not None:
            st.shadow = launch.watch.make_shadow(st)
            self.watcher.reuse_for_chunk(st)
        self._set_unwritten_registers_to_zero()

    def on_chunk_end(self) -> None:
        """The chunk has ended: copies that nobody waited for still read their sources."""
        count = self.call.copy_count
        if self.watcher is not None and count:
            self.watcher.check_copy_source_reads(self.copies[:count])

    def forget_launch(self) -> None:
        """Nothing of a watched launch is kept: neither its buffers nor their records."""
        if self.watcher is not None:
            self.watcher.forget_launch()
            self.st.shadow = None

    def set_read_tracing(self, on: bool) -> None:
        """Begin or end to note what lanes read, and how often they change memory."""
        native, c = self.native, self.call
        c.look_count = c.changes = 0
        if not on:
            self.looks = None
            return
        if native.looking is None:
            native.looking = KernelLibrary("#define LOOKING\n" + native.text)
        if self.looks is None:
            self.looks = np.zeros(LOOKS * self.st.n, ONE_LOOK)
            c.looks, c.look_room = array_address(self.looks), len(self.looks)

    def run_lanes(self, entry: int, limit: int, budget: int, trusted: bool = False) -> int:
        """Run the active lanes from block `entry` on, below block `limit`.

        `budget`: turns of loops after which a lane lets others run. `trusted`: what the first
        instruction does has been looked at.
        """
        st, c, launch = self.st, self.call, self.launch
        table = launch.vm.mapping_rows()
        if table is not self.mapping_table:
            self.mapping_table = table
            self.rows = rows = _rows_outside_windows(table, launch)
            c.mappings, c.mapping_count = array_address(rows), len(rows)
        mask = st.m
        if mask is None:
            c.n, c.lanes = st.n, 0
        else:
            mask = np.ascontiguousarray(mask, np.int64)
            c.n, c.lanes = len(mask), array_address(mask)
        c.live = 0 if st.live is None else array_address(st.live)
        c.entry, c.limit, c.budget, c.trusted = entry, limit, budget, trusted
        c.ticks, c.later = launch.thread_instrs, launch.later
        if self.watcher is not None:
            self.watcher.on_run_begin(self.rows)
        library = self.native.library
        if self.looks is not None and self.native.looking is not None:
            c.limit, c.budget, library = 0, 0, self.native.looking  # a piece at a time
        how: int = library.run(self.argument)
        if self.watcher is not None:
            self.watcher.on_run_end()
        launch.thread_instrs += c.instructions
        self.native.library.recompile_when_hot(c.instructions)
        launch.moved += c.moved
        return how

    def iter_lanes_by_block(self) -> Iterator[tuple[int, Lanes]]:
        """Blocks where the lanes go on, and which lanes."""
        lanes, where = self.st.active_lanes(), self.next[: self.call.n]
        while len(where):  # few places: faster than to sort
            same = where == where[0]
            yield int(where[0]), lanes[same]
            lanes, where = lanes[~same], where[~same]


def _rows_outside_windows(table: Any, launch: GridLaunch) -> Any:
    """Mappings, without the parts that windows hide from global accesses."""
    rows = table
    for base in (launch.shared_window, launch.local_window):
        starts, ends = rows[:, 0], rows[:, 0] + rows[:, 1]
        hit = (ends > base) & (starts < base + WINDOW_BYTES)
        if not hit.any():
            continue
        parts = [rows[~hit]]
        for row in rows[hit]:
            start, end = int(row[0]), int(row[0] + row[1])
            for first, last in ((start, min(end, base)), (max(start, base + WINDOW_BYTES), end)):
                if first < last and not int(row[4]):
                    skip = np.uint64(first - start)
                    part = row + np.array([skip, 0, skip, 0, 0, 0], np.uint64)
                    part[1] = last - first
                    parts.append(part[None])
        rows = np.concatenate(parts)
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
    return np.ascontiguousarray(rows)
