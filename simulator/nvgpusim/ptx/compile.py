"""A kernel as basic blocks of closures, made once per kernel."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from .instructions.bit import BIT_OPS
from .instructions.cvt import cvt
from .instructions.driver_calls import DRIVER_CALLS
from .instructions.float import FLOAT_OPS
from .instructions.lower import PRED, TYPES, U32, Op, Read, Site
from .instructions.mem import MEM_OPS
from .instructions.tensor import TENSOR_OPS
from .instructions.video import VIDEO_OPS
from .instructions.warp import WARP_OPS
from .parser.syntax import Instr, Kernel, Module, PtxError, Reg, Sym, Variable, type_bits
from .spaces import SHARED_RESERVED
from .state import CONTAINER, State

_TABLE: dict[str, Callable[[Site], Op]] = {
    **FLOAT_OPS, **BIT_OPS, **MEM_OPS, **WARP_OPS, **VIDEO_OPS, **TENSOR_OPS,
    **DRIVER_CALLS, "cvt": cvt,
}  # fmt: skip


def _ignored(site: Site) -> Op:
    return lambda st: None


for _name in ("nanosleep", "pmevent", "griddepcontrol"):
    _TABLE[_name] = _ignored

T = TypeVar("T")
END = 1 << 30
"""Number of the block after the last one: the thread is done."""


@dataclass
class Jump:
    """Ending of a block: "next", "bra", "exit", "bar" (see `Code`)."""

    kind: str
    target: int = END
    guard: Read | None = None
    bar: tuple[Read, Read | None] | None = None
    targets: tuple[int, ...] = ()
    index: Read | None = None
    reduce: tuple[str, Read, Any] | None = None
    instr: Instr | None = None


@dataclass
class Block:
    """Straight-line operations and the jump after them.

    `meet`: mask of the lanes that its first instruction needs together, where it needs any.
    `polls`: it looks at what other threads may store. `cost`: CPU seconds of a turn on numpy, and
    of a lane in it, about.
    """

    meet: Read | None = None
    polls: bool = False
    cost: tuple[float, float] = (0.0, 0.0)
    ops: list[Op] = field(default_factory=list)
    instrs: list[Instr] = field(default_factory=list)
    jump: Jump = field(default_factory=lambda: Jump("next"))


@dataclass
class Heat:
    """CPU seconds that a kernel has cost numpy, about; its compiled form, if that was `tried`."""

    spent: float = 0.0
    tried: bool = False
    native: Any = None


@dataclass
class Code:
    """A kernel ready to run.

    `dynamic`: it has shared memory whose size the launch gives. Fine code also has its memory
    instructions (`sites`) and the widest pieces, by space, that none of its accesses splits
    (`granules`, bytes). `starts`: the number of each block's first instruction. `heat`: what it has
    cost so far.
    """

    kernel: Kernel
    module: Module
    blocks: list[Block]
    registers: list[Any]
    shared: dict[str, int]
    shared_bytes: int
    local: dict[str, int]
    local_bytes: int
    dynamic: bool = False
    sites: list[Instr] = field(default_factory=list)
    granules: dict[str, int] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    heat: Heat = field(default_factory=Heat)


def _guarded(op: Op, read: Read) -> Op:
    """Run `op` in the lanes whose predicate holds."""

    def run(st: State) -> None:
        p = read(st)
        if p.ndim == 0:
            if p:
                op(st)
            return
        mask = st.m
        if mask is None:
            lanes = np.flatnonzero(p)
            if len(lanes) == st.n:
                op(st)
                return
        else:
            lanes = mask[p]
        if len(lanes):
            st.m = lanes
            try:
                op(st)
            except Exception:
                st.fault_mask = lanes
                raise
            finally:
                st.m = mask

    return run


def _layout(variables: list[Variable], start: int) -> tuple[dict[str, int], int]:
    out = {}
    for v in variables:
        start = -(-start // max(1, v.align)) * max(1, v.align)
        out[v.name] = start
        start += v.size
    return out, start


_JUMPS = ("bra", "brx", "exit", "ret", "bar", "barrier", "trap")
_MEMORY = (
    "ld", "ldu", "st", "atom", "red", "cp", "ldmatrix", "wmma", "fence", "membar", "mbarrier",
)  # fmt: skip
_POLLS = ("volatile", "relaxed", "acquire", "test_wait", "try_wait")
_WHOLE = ("mma", "ldmatrix", "wmma")
TURN_S = 5e-6
"""CPU seconds of a piece of code on numpy, beside its instructions."""
MASK_S, MASK_LANE_S = 2e-6, 4e-9
"""The same of an instruction that a part of a chunk's lanes executes, and of each of the chunk's:
its result is merged into a copy of the register (numpy 2.4, x86-64, 2026-11-28)."""
_COSTS = {
    "match": (2e-4, 2e-6), "ldmatrix": (1e-4, 3e-8), **dict.fromkeys(("atom", "red"), (6e-5, 1e-6)),
    **dict.fromkeys(("shfl", "vote", "redux"), (4e-5, 1e-7)), "mma": (1e-4, 3e-7),
}  # fmt: skip
"""CPU seconds on numpy of an instruction and of one of its lanes, more than others take, measured
with loops of 32 to 4096 threads, whole warps and halves (numpy 2.4, x86-64, 2026-11-27)."""


def _cost(op: str, fine: bool) -> tuple[float, float]:
    """CPU seconds of an instruction on numpy, and of a lane; `fine`: under the sanitizer."""
    if op in _COSTS:
        return _COSTS[op]
    if op in _MEMORY:
        return (8e-5, 3e-8) if fine else (1e-5, 4e-9)
    return 2e-6, 2e-9


MASKED = {"shfl": 4, "vote": 2, "match": 2, "redux": 2}
"""Operand that holds the membermask."""


def _meeting(site: Site) -> Read | None:
    """The mask of lanes that must execute this together, if it names one."""
    instr = site.i
    if instr.guard is not None:
        return None
    if instr.op in _WHOLE or (instr.op in ("bar", "barrier") and not site.has("warp", "arrive")):
        if instr.op == "barrier" and "aligned" not in instr.mods:
            return None
        everyone = np.uint32(0xFFFFFFFF)
        return lambda st: everyone
    if instr.op in MASKED and site.has("sync"):
        return site.read(site.arg(MASKED[instr.op]), U32)
    return None


def _noted(op: Op, instr: Instr, number: int) -> Op:
    """Leave a trace of which instruction runs."""

    def run(st: State) -> None:
        st.at, st.site = instr, number
        op(st)

    return run


def _understood(site: Site, lower: Callable[[Site], T]) -> T:
    """An instruction, lowered; PtxError for a form that nobody has thought of."""
    try:
        return lower(site)
    except (ArithmeticError, LookupError, ValueError, TypeError, AttributeError) as e:
        raise site.error(f"this form is not supported ({e})") from e


def _starts(kernel: Kernel, fine: bool) -> set[int]:
    """Starts of the pieces of code: labels, after jumps, at instructions that lanes meet for."""
    starts = {0, *kernel.labels.values()}
    for at, instr in enumerate(kernel.instrs):
        if instr.op in _JUMPS:
            starts.add(at + 1)
        if instr.op in (*_WHOLE, *MASKED, "bar", "barrier"):
            starts.add(at)
        if fine and instr.op in _MEMORY:
            starts.add(at + 1)
    return starts


def _granules(kernel: Kernel) -> dict[str, int]:
    """Bytes that every access to shared, and to global, memory takes or leaves as a whole."""
    out = {"shared": 16, "global": 16}
    for instr in kernel.instrs:
        if instr.op not in _MEMORY or instr.op in ("fence", "membar"):
            continue
        bits = next((type_bits(m) for m in instr.mods if m in TYPES), 32)
        size = 1 if instr.op == "cp" and len(instr.args) > 3 else max(1, bits // 8)
        if instr.op == "ldmatrix":
            size = 16
        for space in out:
            other = "shared" if space == "global" else "global"
            if instr.op == "cp" or not any(
                m == other or m in ("param", "const", "local") for m in instr.mods
            ):
                out[space] = min(out[space], size)
    return out


def compile_kernel(
    module: Module,
    kernel: Kernel,
    fine: bool = False,
    turns: bool = True,
    cuts: Collection[int] = (),
) -> Code:
    """Lower every instruction. Raises PtxError naming the first one that is unknown.

    `fine`: every memory instruction leaves its name; and, with `turns`, ends a piece of code, so
    that warps can change places there. `cuts`: numbers of more instructions that begin one.
    """
    if kernel.refusal:
        raise PtxError(kernel.refusal)
    starts = _starts(kernel, fine and turns) | set(cuts)
    sites = [i for i in kernel.instrs if fine and i.op in _MEMORY]
    order = sorted(s for s in starts if s < len(kernel.instrs))
    number = {at: n for n, at in enumerate(order)}
    blocks = []
    for n, at in enumerate(order):
        end = order[n + 1] if n + 1 < len(order) else len(kernel.instrs)
        block = Block()
        block.meet = _understood(Site(kernel.instrs[at], kernel, module), _meeting)
        for instr in kernel.instrs[at:end]:
            site = Site(instr, kernel, module)
            jump = _understood(site, lambda site: _jump(site, kernel, number))
            if jump is not None:
                block.jump = jump
                block.instrs.append(instr)
                break
            if instr.op not in _TABLE:
                raise PtxError(
                    f"PTX line {instr.line}: unknown instruction {instr.op!r}: {instr.text!r} "
                    f"(kernel {kernel.name})"
                )
            op = _understood(site, _TABLE[instr.op])
            if instr.op == "shfl" or (fine and instr.op in _MEMORY):
                op = _noted(op, instr, sites.index(instr) + 1 if instr in sites else 0)
            if instr.guard is not None:
                op = _guarded(op, _guard(site))
            block.ops.append(op)
            block.instrs.append(instr)
            block.polls |= instr.op == "atom" or any(m in _POLLS for m in instr.mods)
            turn, lane = _cost(instr.op, fine)
            turn += block.cost[0] or TURN_S
            block.cost = turn, block.cost[1] + lane
        blocks.append(block)
    variables = [*module.variables.values(), *kernel.variables.values()]
    fixed = [v for v in variables if v.space == "shared" and v.size]
    open_ended = [v for v in variables if v.space == "shared" and not v.size]
    shared, end = _layout(fixed, SHARED_RESERVED)
    shared.update(_layout(open_ended, -(-end // 16) * 16)[0])
    local, depth = _layout([v for v in variables if v.space == "local"], 0)
    registers = [np.zeros((), _container(reg))[()] for reg in kernel.regs]
    return Code(
        kernel, module, blocks, registers, shared, end, local, -(-depth // 16) * 16,
        bool(open_ended), sites, _granules(kernel) if fine else {}, order,
    )  # fmt: skip


def _container(reg: Reg) -> Any:
    return CONTAINER[reg.bits]


def _guard(site: Site) -> Read:
    reg = site.i.guard
    read = site.read(reg, PRED)
    if site.i.guard_not:
        return lambda st: ~read(st)
    return read


def _jump(site: Site, kernel: Kernel, number: dict[int, int]) -> Jump | None:
    instr = site.i
    guard = _guard(site) if instr.guard is not None else None
    if instr.op == "bra":
        return Jump("bra", _target(site, kernel, number), guard, instr=instr)
    if instr.op in ("exit", "ret"):
        return Jump("exit", guard=guard, instr=instr)
    if instr.op == "trap":
        return Jump("trap", guard=guard, instr=instr)
    if instr.op == "brx":
        table = site.i.args[1]
        if not isinstance(table, Sym) or table.name not in kernel.tables:
            raise site.error("unknown branch table")
        names = kernel.tables[table.name]
        targets = tuple(_label(site, kernel, number, name) for name in names)
        return Jump("brx", guard=guard, targets=targets, index=site.src(0, U32), instr=instr)
    if instr.op in ("bar", "barrier"):
        jump = _barrier(site)
        jump.guard = guard
        return jump
    return None


def _barrier(site: Site) -> Jump:
    args = site.i.args
    if site.has("warp"):
        return Jump("warp", index=site.src(0, U32), instr=site.i)
    if site.has("red"):
        kind = next(m for m in site.mods if m in ("popc", "and", "or"))
        values = [a for a in args[1:] if a is not None]
        pred = site.read(values[-1], PRED)
        bar = (site.read(values[0], U32), site.read(values[1], U32) if len(values) > 2 else None)
        put = site.dst(0, U32 if kind == "popc" else PRED)
        return Jump("bar", bar=bar, reduce=(kind, pred, put), instr=site.i)
    if not site.has("sync", "arrive"):
        raise site.error()
    bar = (site.src(0, U32), site.src(1, U32) if len(args) > 1 else None)
    return Jump("arrive" if site.has("arrive") else "bar", bar=bar, instr=site.i)


def _target(site: Site, kernel: Kernel, number: dict[int, int]) -> int:
    arg = site.i.args[0]
    if not isinstance(arg, Sym):
        raise site.error("a branch needs a label")
    return _label(site, kernel, number, arg.name)


def _label(site: Site, kernel: Kernel, number: dict[int, int], name: str) -> int:
    if name not in kernel.labels:
        raise site.error(f"unknown label {name}")
    return number.get(kernel.labels[name], END)


def supported() -> list[str]:
    """All opcodes that can be run, those that end a piece of code included."""
    return sorted({*_TABLE, *_JUMPS, "call"} - {*DRIVER_CALLS})
