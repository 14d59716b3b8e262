"""A kernel cut into pieces that C can run, and which registers live between them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ..compile import END, Block, Code, compile_kernel
from ..parser.syntax import Addr, Instr, Kernel, Module, PtxError, Reg, Sym, registers
from .arithmetic import ARITHMETIC
from .conversions import CONVERSIONS
from .floating import FLOATING
from .groups import GROUPS as WARPS
from .groups import Group
from .memory import MEMORY, Store, ordered, store
from .tensor import TENSOR
from .values import Frame, Unknown, Words
from .video import VIDEO

CHAIN, STORE, BARRIER, ALIEN, GROUP, ALONE = range(6)
"""Kinds of blocks: compiled; one store to memory; bar.sync; the interpreter's; one instruction that
all lanes do together; one that all lanes do before any goes on, which orders them."""
TABLE = {**ARITHMETIC, **FLOATING, **VIDEO, **CONVERSIONS, **MEMORY}
GROUPS = {**WARPS, **TENSOR}
JUMPS = ("bra", "exit", "ret")
CARRYING = ("addc", "subc", "madc")
"""Opcodes that read the carry flag."""


@dataclass
class Text:
    """An instruction in C: what a lane does, or a store or another call of all lanes."""

    lines: str = ""
    store: Store | None = None
    group: Group | None = None
    alone: bool = False


@dataclass
class Plan:
    """The pieces of a kernel.

    `code`: its blocks for the interpreter, cut where C's end. By block: `kinds`, registers that
    live at its start (`alive`) and that it writes (`writes`). `kept`: registers that live between
    blocks. `texts`: C by id of the instruction.
    """

    code: Code
    frame: Frame
    texts: dict[int, Text]
    kinds: list[int] = field(default_factory=list)
    alive: list[set[int]] = field(default_factory=list)
    writes: list[set[int]] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    def stores(self) -> list[Store]:
        """All stores to memory."""
        return [text.store for text in self.texts.values() if text.store is not None]


def guard(instr: Instr) -> str:
    """The condition of a guarded instruction in C, "" for none."""
    return "" if instr.guard is None else f"{'!' * instr.guard_not}r{instr.guard.index}"


def _write(instr: Instr, frame: Frame) -> Text | None:
    """An instruction in C, None for one of the interpreter."""
    words = Words(instr, frame)
    if instr.op not in TABLE and instr.op not in GROUPS:
        return None
    try:
        if instr.op in GROUPS:
            return None if instr.guard is not None else Text(group=GROUPS[instr.op](words))
        if instr.op == "st" and not _slots(instr, frame.kernel):
            return Text(store=store(words))
        lines = TABLE[instr.op](words)
    except (Unknown, PtxError):  # a literal that has no integer's bits, for one
        return None
    lines = f"if ({guard(instr)}) {{ {lines} }}" if lines and instr.guard else lines
    return Text(lines, alone=ordered(words))


def _slots(instr: Instr, kernel: Kernel) -> list[int]:
    """Registers behind the parameters of calls that an instruction names."""
    out = []
    for arg in instr.args:
        name = arg.base if isinstance(arg, Addr) else arg
        if isinstance(name, Sym) and "@" in name.name:
            if instr.op not in ("ld", "ldu", "st"):
                return [r.index for r in kernel.slots.values()]
            out += [r.index for (n, _), r in kernel.slots.items() if n == name.name]
    return out


def used_registers(
    instr: Instr, kernel: Kernel, text: Text | None
) -> tuple[set[int], set[int], set[int]]:
    """Registers that an instruction reads, may write and surely writes in every lane."""
    every = {r for arg in instr.args for r in registers(arg)}
    slots = set(_slots(instr, kernel))
    if instr.guard is not None:
        every.add(instr.guard.index)
    flag = {kernel.carry().index} if instr.op in CARRYING or "cc" in instr.mods else set()
    if text is None:
        slots |= flag
        return every | slots, every | slots, set()
    silent = ("st", "red", "bar", "barrier", "cp", "membar", "fence")
    if instr.op in silent or (not text.lines and not text.group):
        return every, slots, set()
    first = set(registers(instr.args[0])) | (flag if "cc" in instr.mods else set())
    rest = {r for arg in instr.args[1:] for r in registers(arg)} | (every - first) | slots
    rest |= flag if instr.op in CARRYING else set()
    if instr.guard is not None:
        return rest | first | {instr.guard.index}, first, set()
    return rest, first, first


def cut_kernel(
    module: Module,
    kernel: Kernel,
    starts: Collection[int] = (),
    sites: list[Instr] | None = None,
) -> Plan:
    """Cut a kernel, at `starts` too. Raises PtxError as `compile_kernel` does.

    `sites`: the memory instructions of code that is watched.
    """
    frame = Frame(kernel, module, sites)
    texts: dict[int, Text] = {}
    cuts = set(starts)
    before = True
    for at, instr in enumerate(kernel.instrs):
        if instr.op in JUMPS:
            before = True
            continue
        text = _write(instr, frame)
        if text is not None:
            texts[id(instr)] = text
        if text is None:
            cuts |= {at} if before else set()
        elif text.store or text.group or text.alone:
            cuts |= {at, at + 1}
        elif not before:
            cuts.add(at)
        before = text is not None
    code = compile_kernel(module, kernel, sites is not None, False, cuts)
    plan = Plan(code, frame, texts)
    plan.kinds = [_kind(block, texts) for block in plan.code.blocks]
    _flow(plan)
    return plan


def _kind(block: Block, texts: dict[int, Text]) -> int:
    jump, body = block.jump, block.instrs[: len(block.ops)]
    if jump.kind == "bar" and not body:
        assert jump.instr is not None
        plain = jump.reduce is None and jump.guard is None and len(jump.instr.args) == 1
        return BARRIER if plain and not isinstance(jump.instr.args[0], Reg) else ALIEN
    if jump.kind == "warp" and not body and id(jump.instr) in texts:
        return GROUP
    known = all(id(i) in texts for i in body)
    if body and known and jump.kind == "next" and texts[id(body[0])].group:
        return GROUP
    if not known or jump.kind not in ("next", "bra", "exit"):
        return ALIEN
    first = texts[id(body[0])] if body else Text()
    return STORE if first.store else ALONE if first.alone else CHAIN


def successors(code: Code, n: int) -> list[int]:
    """Blocks that may follow block n."""
    jump = code.blocks[n].jump
    out = {"bra": [jump.target], "exit": [END], "trap": [END], "brx": list(jump.targets)}
    targets = out.get(jump.kind, [n + 1])
    if jump.guard is not None or jump.kind == "brx":
        targets = [*targets, n + 1]
    return [t if t < len(code.blocks) else END for t in targets]


def _flow(plan: Plan) -> None:
    """Find what lives where: the usual backward iteration over the blocks."""
    code, kernel = plan.code, plan.code.kernel
    blocks = [
        [used_registers(i, kernel, plan.texts.get(id(i))) for i in b.instrs] for b in code.blocks
    ]
    for block, one in zip(code.blocks, blocks, strict=True):
        if len(block.instrs) > len(block.ops):  # a jump that C writes reads its guard alone
            last = block.instrs[-1]
            if last.op in JUMPS:
                one[-1] = (set() if last.guard is None else {last.guard.index}), set(), set()
    plan.writes = [{r for _, may, _ in one for r in may} for one in blocks]
    plan.alive = [set() for _ in blocks]
    changed = True
    while changed:
        changed = False
        for n in reversed(range(len(blocks))):
            live: set[int] = set()
            for t in successors(code, n):
                live |= plan.alive[t] if t != END else set()
            for reads, _, sure in reversed(blocks[n]):
                live = (live - sure) | reads
            if live != plan.alive[n]:
                plan.alive[n], changed = live, True
    plan.kept = sorted(set().union(*plan.alive)) if plan.alive else []
