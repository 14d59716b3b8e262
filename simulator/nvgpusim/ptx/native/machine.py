"""A chunk on compiled code: the registers in memory that both sides share, and the calls."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from ..compile import END
from ..spaces import WINDOW_BYTES
from ..state import CONTAINER, NO_COMMITS, UNWRITTEN, Async, Lanes, State
from . import build
from .plan import CHAIN, GROUP, STORE, Plan, cut_kernel
from .text import ODD, source
from .values import at
from .watch import Watcher

if TYPE_CHECKING:
    from ..state import Compiled, Grid

BUDGET = 256
"""Turns of loops after which a lane lets others run (as run.PATIENCE)."""
NO_LIMIT = 1 << 40
COPIES = 64
"""Copies of a lane that may be under way in C."""
COPY = np.dtype([(name, np.int64) for name in ("to", "from")] + [
    (name, np.uint64) for name in ("dst", "src")] + [
    (name, np.int64) for name in ("lane", "group", "size", "real", "instr", "issue", "site")] + [
    ("begun", np.uint8, 16)])  # fmt: skip
"""`Copy` of machine.h."""
_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64


class Call(ctypes.Structure):
    """`Call` of machine.h."""

    _fields_ = [
        *((name, _INT) for name in (
            "entry", "n", "whole", "limit", "budget", "done", "steps", "instructions", "moved",
        )),
        *((name, _POINTER) for name in (
            "lanes", "next", "scratch", "reg", "special", "special_mask", "symbol", "shared",
        )),
        ("shared_bytes", _INT), ("threads", _INT), ("local", _POINTER), ("rows", _POINTER),
        ("depth", _INT), ("param", _POINTER), ("bank3", _POINTER), ("bank3_bytes", _INT),
        ("shared_window", _INT), ("local_window", _INT), ("extents", _POINTER),
        ("extent_count", _INT), ("watch", _POINTER), ("copies", _POINTER), ("commits", _POINTER),
        *((name, _INT) for name in ("copy_count", "copy_room", "issued", "other_copies")),
    ]  # fmt: skip


class Native:
    """A kernel that C runs: its pieces, the function, chunks that have ended (`idle`).

    `inner`: blocks that begin within one of the interpreter's. `widest`: granules of its widest
    store, for watched code.
    """

    def __init__(self, plan: Plan, function: Any, old: Compiled) -> None:
        self.plan, self.function = plan, function
        self.watched = plan.frame.watched
        grain = min(plan.code.granules.values(), default=1)
        self.widest = max([s.size * len(s.values) // grain for s in plan.stores()], default=1)
        self.code = plan.code
        self.idle: dict[Any, NativeChunk] = {}
        self.compiled = [kind in (CHAIN, STORE, GROUP) for kind in plan.kinds]
        starts = {start: n for n, start in enumerate(plan.code.starts)}
        self.number = [starts[s] for s in old.starts]
        self.inner = frozenset(starts.values()).difference(self.number)
        regs = plan.code.kernel.regs
        self.types = [CONTAINER[regs[k].bits] for k in plan.kept]
        self.copying = any(i.op == "cp" for i in plan.code.kernel.instrs)
        self.zeros = {
            n for n, k in enumerate(plan.kept) if plan.alive and k in plan.alive[0]
        }  # read before they are written, in some lane

    def block(self, number: int) -> int:
        """The number here of a block of the code that numpy ran."""
        return self.number[number] if number < len(self.number) else END


def compile_native(code: Compiled, watched: bool) -> Native | None:
    """Compile a kernel; None where there is no compiler or nothing to compile.

    `watched`: for launches under the sanitizer.
    """
    plan = cut_kernel(code.module, code.kernel, code.starts, code.sites if watched else None)
    if not any(kind in (CHAIN, STORE, GROUP) for kind in plan.kinds):
        return None
    function = build.load_compiled(source(plan))
    return None if function is None else Native(plan, function, code)


class NativeChunk:
    """The state of one chunk as C sees it; `fresh`: nothing of it has run."""

    def __init__(self, native: Native, launch: Grid, st: State, fresh: bool = False) -> None:
        self.native, self.launch, self.st = native, launch, st
        self.call = Call()
        self.argument = ctypes.addressof(self.call)
        self.next = np.empty(st.n, np.int32)
        self.scratch = np.empty(st.n, np.uint64)
        self.extents: Any = None
        self.watcher: Watcher | None = None
        if native.watched:
            self.watcher = Watcher(native.widest, st)
            self.call.watch = self.watcher.address
        if native.copying:
            self._copies()
        self._registers()
        self._places()
        self._constants()
        for n, (index, mine) in enumerate(self.own):
            if not fresh or n in native.zeros:
                mine[...] = st.full(index, mine.dtype)
            st.R[index] = mine

    def _copies(self) -> None:
        """Room for copies that C begins."""
        st, c = self.st, self.call
        self.copies = np.zeros(COPIES * st.n, COPY)
        if not len(st.commits):
            st.commits = np.zeros(st.n, np.int64)
        c.copies, c.copy_room, c.commits = at(self.copies), len(self.copies), at(st.commits)
        st.handed_over = self.hand_over

    def hand_over(self) -> list[Async]:
        """The copies that C has begun and not done, which are the interpreter's now."""
        rows, instrs = self.copies[: self.call.copy_count].copy(), self.st.launch.code.kernel.instrs
        self.call.copy_count = 0
        out = []
        for issue in np.unique(rows["issue"]):
            some = rows[rows["issue"] == issue]
            head = some[0]
            size = int(head["size"])
            begun = np.ascontiguousarray(some["begun"][:, :size]).view(np.uint32)
            out.append(Async(
                some["lane"], some["group"], some["dst"], some["src"], size, some["real"],
                instrs[int(head["instr"])], int(head["site"]), begun if head["site"] else None,
            ))  # fmt: skip
        return out

    def _registers(self) -> None:
        """One piece of memory for all registers that live between blocks."""
        st, native = self.st, self.native
        sizes = [t.itemsize * st.n + 63 & ~63 for t in native.types]
        self.memory = np.empty(sum(sizes) + 64, np.uint8)
        self.own: list[tuple[int, Any]] = []
        first = at(self.memory)
        start, places = -first % 64, []
        for index, t, size in zip(native.plan.kept, native.types, sizes, strict=True):
            self.own.append((index, self.memory[start : start + t.itemsize * st.n].view(t)))
            places.append(first + start)
            start += size
        self.places = np.array(places, np.uint64)

    def _places(self) -> None:
        """Set what stays from launch to launch of one geometry."""
        st, launch, frame, c = self.st, self.launch, self.native.plan.frame, self.call
        known = st.special
        made = [known[n] if n in known else launch.special(n, st) for n in frame.specials]
        self.specials = [np.ascontiguousarray(v, np.uint32) for v in made]
        self.special_at = np.array([at(v) for v in self.specials], np.uint64)
        self.masks = np.array([-1 if v.ndim else 0 for v in made], np.int64)
        self.symbols = np.zeros(len(frame.symbols), np.uint64)
        c.next, c.scratch, c.reg = at(self.next), at(self.scratch), at(self.places)
        c.special, c.special_mask, c.symbol = at(self.special_at), at(self.masks), at(self.symbols)
        c.shared, c.shared_bytes, c.threads = at(st.shared), st.shared.shape[1], st.threads
        if st.local is not None:
            c.local, c.rows, c.depth = at(st.local.bytes), at(st.local.rows), st.local.shape[1]

    def _constants(self) -> None:
        """Set what each launch has of its own. Raises KernelFault: a variable has no address."""
        launch, c = self.launch, self.call
        for n, (kind, name) in enumerate(self.native.plan.frame.symbols):
            value = launch.symbol(name) if kind == "symbol" else launch.window_base(name)
            self.symbols[n] = value & (1 << 64) - 1
        zero, three = launch.banks.get(0) or b"\0", launch.banks.get(3, b"")
        self.banks = np.frombuffer(zero, np.uint8), np.frombuffer(three or b"\0", np.uint8)
        c.param = at(self.banks[0]) + launch.param_base
        c.bank3, c.bank3_bytes = at(self.banks[1]), len(three)
        c.shared_window, c.local_window = launch.shared_window, launch.local_window

    def renew(self, launch: Grid) -> None:
        """Take the chunk of another launch of the same geometry."""
        st = self.st
        self.launch = st.launch = launch
        self._constants()
        st.m = st.live = st.fault_mask = st.at = None
        st.begun = []
        if st.handed_over is None:
            st.commits = NO_COMMITS
        else:
            st.commits[:] = self.call.copy_count = 0
        st.shared.fill(UNWRITTEN)
        if self.watcher is not None:
            st.shadow = launch.watch.chunk(st)
            self.watcher.renew(st)
        for n, (index, mine) in enumerate(self.own):
            if n in self.native.zeros:
                mine[...] = 0
            st.R[index] = mine

    def rest(self) -> None:
        """Nothing of a watched launch is kept: neither its buffers nor their records."""
        if self.watcher is not None:
            self.watcher.rest()
            self.st.shadow = None

    def run_from_start(self) -> dict[int, Lanes | None]:
        """Run a chunk from its start as far as C goes; where its lanes are then, {} at the end."""
        how = self.run(0, NO_LIMIT, True)
        c = self.call
        self.launch.steps += c.steps
        if how == 1:
            return {} if c.entry >= len(self.native.compiled) else {c.entry: None}
        out: dict[int, Lanes | None] = {}
        left = [np.arange(c.done, self.st.n)]
        for n, lanes in self.arrived() if c.done else ():
            if n == ODD:
                left.insert(0, lanes)
            else:
                out[n] = lanes
        rest = np.concatenate(left)
        if len(rest):
            out[c.entry] = rest if len(rest) < self.st.n else None
        return out

    def share(self) -> None:
        """Bring registers that the interpreter has replaced back to their memory."""
        replaced = [(k, mine) for k, mine in self.own if self.st.R[k] is not mine]
        if not replaced:
            return
        R = self.st.R  # noqa: N806 - its name
        values = [R[k].copy() if len(replaced) > 1 and R[k].ndim else R[k] for k, _ in replaced]
        for (k, mine), value in zip(replaced, values, strict=True):
            mine[...] = value.view(mine.dtype)
            R[k] = mine

    def run(self, entry: int, limit: int, whole: bool) -> int:
        """Run the active lanes: 0 a lane is not plainly right, 1 all at `entry`, 2 split."""
        st, c = self.st, self.call
        self.share()
        table = self.launch.vm.extents()
        if table is not self.extents:
            self.extents = table
            rows = _outside(table, self.launch)
            self.rows = rows
            c.extents, c.extent_count = at(rows), len(rows)
        mask = st.m
        if mask is None:
            c.n, c.lanes = st.n, 0
        else:
            mask = np.ascontiguousarray(mask, np.int64)
            c.n, c.lanes = len(mask), at(mask)
        c.other_copies = len(st.begun)
        c.entry, c.limit, c.whole, c.budget = entry, limit, whole, BUDGET
        if self.watcher is not None:
            self.watcher.before(self.rows)
        how: int = self.native.function(self.argument)
        if self.watcher is not None:
            self.watcher.after()
        self.launch.thread_instrs += c.instructions
        self.launch.moved += c.moved
        return how

    def arrived(self) -> list[tuple[int, Lanes]]:
        """Blocks where the lanes that are done go on, and which lanes."""
        done = self.call.done
        lanes, where = self.st.lanes()[:done], self.next[:done]
        out = []
        while len(where):  # few places: faster than to sort
            same = where == where[0]
            out.append((int(where[0]), lanes[same]))
            lanes, where = lanes[~same], where[~same]
        return out


def _outside(table: Any, launch: Grid) -> Any:
    """Mappings that no window hides from global accesses."""
    bad = np.zeros(len(table), bool)
    for base in (launch.shared_window, launch.local_window):
        ends = table[:, 0] + table[:, 1]
        bad |= (ends > base) & (table[:, 0] < base + WINDOW_BYTES)
    return np.ascontiguousarray(table[~bad]) if bad.any() else table
