"""A kernel as pieces of code that C runs or the host serves, made once per kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

from .native.instructions import GROUPS, TABLE, InstructionText, instruction_to_c, register_effects
from .native.operand_writer import KernelNumbering
from .operands import TYPES, InstructionInKernel
from .parser.syntax import (
    Imm,
    Instr,
    Kernel,
    Operand,
    PtxError,
    PtxModule,
    Reg,
    SymbolAddress,
    Variable,
    register_numbers,
    type_bits,
)
from .spaces import SHARED_RESERVED

END = 1 << 30
"""Number of the block after the last one: the thread is done."""
CHAIN, STORE, GROUP, BARRIER, EVENT = range(5)
"""Kinds of blocks: what each lane runs on its own; one store to memory; one instruction that all
lanes do together; bar.sync of the whole block; what the host serves."""
CALLS = ("vprintf", "__assertfail", "__recursion", "malloc", "free", "trap")
"""Opcodes that the host serves: calls of what the driver provides, and trap."""
_JUMPS = ("bra", "brx", "exit", "ret", "bar", "barrier")
_MEMORY = (
    "ld", "ldu", "st", "atom", "red", "cp", "ldmatrix", "wmma", "fence", "membar", "mbarrier",
)  # fmt: skip
_POLLS = ("volatile", "relaxed", "acquire", "test_wait", "try_wait")
WHOLE = ("mma", "ldmatrix", "wmma")
MASKED = {"shfl": 4, "vote": 2, "match": 2, "redux": 2}
"""Operand that holds the membermask."""
EVERYONE = Imm(0xFFFFFFFF, "int")
"""The mask of a whole warp."""


@dataclass
class BlockEnding:
    """Ending of a block: "next", "bra", "brx", "exit", "bar", "arrive" or "warp" (a barrier).

    Of a barrier: its number and how many threads it is for, or the mask; `reduce`: how bar.red
    combines which predicate, and where the outcome goes.
    """

    kind: str = "next"
    targets: tuple[int, ...] = ()
    instr: Instr | None = None
    number: Operand | None = None
    count: Operand | None = None
    reduce: tuple[str, Operand, Operand] | None = None


@dataclass
class CodeBlock:
    """Straight-line instructions and their ending, the last one where that jumps or waits.

    `meet`: mask of the lanes that its first instruction needs together, where it needs any.
    `alone`: all lanes do it before any goes on. `polls`: it looks at what other threads may store.
    Registers: `alive` ones at its start, `reads` before it writes them, `writes` in some or all
    lanes, `kills` in all.
    """

    kind: int
    instrs: list[Instr]
    ending: BlockEnding
    meet: Operand | None = None
    alone: bool = False
    polls: bool = False
    alive: set[int] = field(default_factory=set)
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    kills: set[int] = field(default_factory=set)

    @property
    def body(self) -> list[Instr]:
        """The instructions without the ending."""
        return self.instrs[: len(self.instrs) - (self.ending.instr is not None)]


@dataclass
class KernelCode:
    """A kernel whose instructions are C.

    `texts`: C by id of the instruction. `kept`: registers that live between blocks; of a block's
    start and in it: `alive`, `writes`. `dynamic`: it has shared memory whose size the launch gives.
    Watched code also has its memory instructions (`sites`) and the widest pieces, by space, that
    none of its accesses splits (`granules`, bytes). `native`: the compiled kernel, once it is.
    """

    kernel: Kernel
    module: PtxModule
    frame: KernelNumbering
    blocks: list[CodeBlock]
    texts: dict[int, InstructionText]
    kept: list[int]
    shared: dict[str, int]
    shared_bytes: int
    local: dict[str, int]
    local_bytes: int
    dynamic: bool = False
    sites: list[Instr] = field(default_factory=list)
    granules: dict[str, int] = field(default_factory=dict)
    native: object = None
    plain: KernelCode | None = None

    def unwatched_code(self) -> KernelCode:
        """The same code for a launch that no sanitizer watches."""
        if not self.frame.watched:
            return self
        if self.plain is None:
            self.plain = _make_kernel_code(self.module, self.kernel, None, self.frame.turns)
        return self.plain


def _variable_offsets_and_end(variables: list[Variable], start: int) -> tuple[dict[str, int], int]:
    out = {}
    for v in variables:
        start = -(-start // max(1, v.align)) * max(1, v.align)
        out[v.name] = start
        start += v.size
    return out, start


def _membermask_operand(instr: Instr) -> Operand | None:
    """The mask of lanes that must execute this together, if it names one."""
    if instr.guard is not None:
        return None
    if instr.op in ("bar", "barrier"):
        if "warp" in instr.mods or "arrive" in instr.mods:
            return None
        return None if instr.op == "barrier" and "aligned" not in instr.mods else EVERYONE
    if instr.op in WHOLE:
        return EVERYONE
    if instr.op in MASKED and "sync" in instr.mods:
        return instr.args[MASKED[instr.op]]
    return None


def _granules_by_space(kernel: Kernel) -> dict[str, int]:
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


def translate_kernel(
    module: PtxModule, kernel: Kernel, fine: bool = False, turns: bool = True
) -> KernelCode:
    """Write every instruction as C. Raises PtxError naming the first one that is unknown.

    `fine`: for a sanitizer, which knows each memory instruction; and, with `turns`, each ends a
    piece of code, so that warps can change places there.
    """
    if kernel.refusal:
        raise PtxError(kernel.refusal)
    sites = [i for i in kernel.instrs if i.op in _MEMORY] if fine else None
    return _make_kernel_code(module, kernel, sites, fine and turns)


def _make_kernel_code(
    module: PtxModule, kernel: Kernel, sites: list[Instr] | None, turns: bool
) -> KernelCode:
    frame = KernelNumbering(kernel, module, sites, turns)
    texts = {
        id(i): instruction_to_c(i, frame)
        for i in kernel.instrs
        if i.op not in CALLS and (i.op not in _JUMPS or "warp" in i.mods)
    }
    blocks = _cut_into_blocks(frame, texts)
    kept = _find_live_registers(kernel, blocks, texts)
    variables = [*module.variables.values(), *kernel.variables.values()]
    fixed = [v for v in variables if v.space == "shared" and v.size]
    open_ended = [v for v in variables if v.space == "shared" and not v.size]
    shared, end = _variable_offsets_and_end(fixed, SHARED_RESERVED)
    shared.update(_variable_offsets_and_end(open_ended, -(-end // 16) * 16)[0])
    local, depth = _variable_offsets_and_end([v for v in variables if v.space == "local"], 0)
    return KernelCode(
        kernel, module, frame, blocks, texts, kept, shared, end, local, -(-depth // 16) * 16,
        bool(open_ended), sites or [], _granules_by_space(kernel) if frame.watched else {},
    )  # fmt: skip


def _block_starts(frame: KernelNumbering, texts: dict[int, InstructionText]) -> set[int]:
    """Starts of the pieces of code: labels, after jumps, at what lanes do together."""
    kernel = frame.kernel
    starts = {0, *kernel.labels.values()}
    for at, instr in enumerate(kernel.instrs):
        text = texts.get(id(instr))
        if instr.op in _JUMPS and instr.op not in ("bar", "barrier"):
            starts.add(at + 1)
        elif text is None or text.store or text.group or text.alone:
            starts |= {at, at + 1}
        if frame.turns and instr.op in _MEMORY:
            starts.add(at + 1)
    return starts


def _cut_into_blocks(frame: KernelNumbering, texts: dict[int, InstructionText]) -> list[CodeBlock]:
    kernel = frame.kernel
    order = sorted(s for s in _block_starts(frame, texts) if s < len(kernel.instrs))
    number = {at: n for n, at in enumerate(order)}
    blocks = []
    for at, end in zip(order, [*order[1:], len(kernel.instrs)], strict=True):
        instrs = kernel.instrs[at:end]
        site, text = InstructionInKernel(instrs[-1], kernel, frame.module), texts.get(id(instrs[0]))
        ending = _block_ending(site, number)
        kind = CHAIN
        if ending.kind in ("bar", "arrive") or instrs[0].op in CALLS:
            plain = ending.kind == "bar" and isinstance(ending.number, Imm) and not ending.count
            kind = BARRIER if plain and not ending.reduce and not site.i.guard else EVENT
        elif text is not None and (text.store or text.group):
            kind = STORE if text.store else GROUP
        block = CodeBlock(kind, instrs, ending, _membermask_operand(instrs[0]))
        block.alone = text is not None and text.alone
        block.polls = any(i.op == "atom" or any(m in _POLLS for m in i.mods) for i in instrs)
        blocks.append(block)
    return blocks


def _block_ending(site: InstructionInKernel, number: dict[int, int]) -> BlockEnding:
    """The ending of a block whose last instruction is this."""
    instr = site.i
    match instr.op:
        case "bra":
            return BlockEnding("bra", (_label_to_block(site, number, instr.args[0]),), instr)
        case "exit" | "ret":
            return BlockEnding("exit", (END,), instr)
        case "brx":
            table = instr.args[1]
            if not isinstance(table, SymbolAddress) or table.name not in site.kernel.tables:
                raise site.make_error("unknown branch table")
            names = site.kernel.tables[table.name]
            targets = tuple(_label_to_block(site, number, SymbolAddress(name)) for name in names)
            return BlockEnding("brx", targets, instr, site.require_operand(0))
        case "bar" | "barrier":
            return _barrier_ending(site)
    return BlockEnding()


def _barrier_ending(site: InstructionInKernel) -> BlockEnding:
    args = site.i.args
    if site.has_modifier("warp"):
        return BlockEnding("warp", (), site.i, site.require_operand(0))
    if site.has_modifier("red"):
        kind = next(m for m in site.mods if m in ("popc", "and", "or"))
        values = [a for a in args[1:] if a is not None]
        if not args[0] or len(values) < 2:
            raise site.make_error()
        count = values[1] if len(values) > 2 else None
        return BlockEnding("bar", (), site.i, values[0], count, (kind, values[-1], args[0]))
    if not site.has_modifier("sync", "arrive"):
        raise site.make_error()
    count = site.require_operand(1) if len(args) > 1 else None
    kind = "arrive" if site.has_modifier("arrive") else "bar"
    return BlockEnding(kind, (), site.i, site.require_operand(0), count)


def _label_to_block(site: InstructionInKernel, number: dict[int, int], arg: Operand | None) -> int:
    if not isinstance(arg, SymbolAddress):
        raise site.make_error("a branch needs a label")
    if arg.name not in site.kernel.labels:
        raise site.make_error(f"unknown label {arg.name}")
    return number.get(site.kernel.labels[arg.name], END)


def successor_blocks(blocks: list[CodeBlock], n: int) -> list[int]:
    """Blocks that may follow block n, the next one last."""
    block, out = blocks[n], list(blocks[n].ending.targets)
    ending = block.ending
    falls = ending.kind not in ("bra", "exit", "brx") or ending.instr is None
    if falls or (ending.instr is not None and ending.instr.guard is not None):
        out.append(n + 1)
    elif ending.kind == "brx":
        out.append(END)  # for an index beyond the table
    return [t if t < len(blocks) else END for t in out]


def _find_live_registers(
    kernel: Kernel, blocks: list[CodeBlock], texts: dict[int, InstructionText]
) -> list[int]:
    """Find what lives where, by the usual backward iteration; registers that live at any start."""
    for block in blocks:
        one = [register_effects(i, kernel, texts.get(id(i))) for i in block.body]
        if (last := block.ending.instr) is not None:
            reads = (
                {r for arg in last.args for r in register_numbers(arg)}
                if last.op != "bra"
                else set()
            )
            made: set[int] = set()
            if block.ending.reduce is not None and isinstance(last.args[0], Reg):
                made = {last.args[0].index}
            if last.guard is not None:
                reads.add(last.guard.index)
            one.append((reads, made, set()))
        block.writes = {r for _, may, _ in one for r in may}
        for reads, _, sure in reversed(one):
            block.reads = (block.reads - sure) | reads
            block.kills |= sure
    changed = True
    while changed:
        changed = False
        for n in reversed(range(len(blocks))):
            after = [blocks[t].alive for t in successor_blocks(blocks, n) if t != END]
            live = set[int]().union(*after) - blocks[n].kills | blocks[n].reads
            if live != blocks[n].alive:
                blocks[n].alive, changed = live, True
    return sorted(set().union(*(b.alive for b in blocks)))


def supported_opcodes() -> list[str]:
    """All opcodes that can be run, those that end a piece of code included."""
    return sorted({*TABLE, *GROUPS, *_JUMPS, "call", "trap"})
