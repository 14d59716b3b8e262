"""The C of a whole kernel (see the package's docstring for its layout)."""

from __future__ import annotations

from collections import defaultdict

from ..operands import U32
from ..parser.syntax import Instr, Reg
from ..translate import BARRIER, CHAIN, END, EVENT, GROUP, STORE, KernelCode, successor_blocks
from .instructions import guard_condition
from .memory import MISS, ORDERED, SPACE
from .operand_writer import OperandWriter

Lines = list[str]


def c_source(code: KernelCode) -> str:
    """The text of the C file."""
    headers = ["machine", "groups", *(["watch"] if code.frame.watched else []), "tensor"]
    lines = [f'#include "{name}.h"' for name in headers]
    lines.append(f"#define HITS {max(1, code.frame.hits)}")
    lines.append("#define ticks (c->ticks + c->later + c->instructions + count - counted)")
    lines += _chain_function_lines(code)
    lines += _run_function_lines(code)
    return "\n".join(lines) + "\n"


def _register_c_type(code: KernelCode, index: int) -> str:
    return code.frame.register_c_type(code.kernel.regs[index])


def _register_pointer_declaration(code: KernelCode, index: int) -> str:
    kind, place = _register_c_type(code, index), _register_memory_expression(code, index)
    return f"{kind} *const restrict R{index} = {place};"


LANE = "int64_t i = c->lanes ? c->lanes[j] : j;"
WHO = "const Who og = who(c, i, 0), os = who(c, i, 1); (void)og, (void)os;"
BLOCK = "uint64_t block = (uint32_t)i / (uint32_t)c->threads; (void)block;"


def _register_memory_expression(code: KernelCode, index: int) -> str:
    """The memory of a register, "0" for one that nobody reads."""
    return f"c->reg[{code.kept.index(index)}]" if index in code.kept else "0"


def _case_statement(code: KernelCode, n: int) -> str:
    """A case of the C function run: the store, or what the lanes do together, that is block n."""
    instr = code.blocks[n].instrs[0]
    head = f"case {n}: c->at = {code.frame.numbers[id(instr)]};"
    group = code.texts[id(instr)].group
    if group is None:
        return f"{head} {_ptx_store_statement(code, instr)} break;"
    call = group(lambda index: _register_memory_expression(code, index))
    if instr.guard is None:
        return f"{head} ok = {call}; break;"
    place = _register_memory_expression(code, instr.guard.index)
    whole = f"const Group all = narrow(c, {place}, {int(instr.guard_not)});"
    return f"{head} {{ {whole} ok = !c->n || {call}; c->n = all.n; c->lanes = all.lanes; }} break;"


def _ptx_store_statement(code: KernelCode, instr: Instr) -> str:
    store = code.texts[id(instr)].store
    assert store is not None

    def column(value: Reg | int | str) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, int):
            return f"{{&(uint64_t){{{value:#x}ull}}, 0}}"
        return f"{{{_register_memory_expression(code, value.index)}, {max(8, value.bits) // 8}}}"

    values = ", ".join(column(v) for v in store.values)
    guarded = "0" if instr.guard is None else _register_memory_expression(code, instr.guard.index)
    space = SPACE.get(store.space, "x")
    address, wide, offset = "{0, 0}", 1, f"{store.offset:#x}ull"
    if isinstance(store.address, str):
        offset = f"{store.address} + {offset}"
    else:
        address, wide = column(store.address), int(store.address.bits == 64)
    strong = int(not set(ORDERED).isdisjoint(instr.mods))
    put = (
        f"&(Put){{'{space}', {address}, {wide}, {offset}, {guarded}, {int(instr.guard_not)}, "
        f"{store.size}, {len(store.values)}, {{{values}}}, {strong}}}"
    )
    if not code.frame.watched:
        return f"ok = put(c, {put});"
    return f"ok = put_watched(c, {put}, {code.frame.site_number(instr)});"


def _followers_in_c_by_block(code: KernelCode) -> list[list[int]]:
    """By block: those that may follow it before the lane is given back."""
    blocks = code.blocks

    def follow(n: int, t: int) -> bool:
        apart = t == END or blocks[t].kind != CHAIN or blocks[t].alone
        return not apart and not _jump_overtakes_lanes(code, n, t)

    return [
        [t for t in successor_blocks(blocks, n) if follow(n, t)]
        if block.kind == CHAIN and not block.alone
        else []
        for n, block in enumerate(blocks)
    ]


def _modified_registers(code: KernelCode, goes_on: list[list[int]]) -> list[set[int]]:
    """By block: registers that C may have changed by its end, since the lane entered."""
    blocks = code.blocks
    out = [set(b.writes) if b.kind == CHAIN else set() for b in blocks]
    changed = True
    while changed:
        changed = False
        for n, following in enumerate(goes_on):
            for t in following:
                if not out[n] <= out[t]:
                    out[t] |= out[n]
                    changed = True
    return out


def _predecessor_counts(code: KernelCode) -> list[int]:
    """By block: number of its predecessors."""
    out = [0] * len(code.blocks)
    for n in range(len(out)):
        for t in {*successor_blocks(code.blocks, n)} - {END}:
            out[t] += 1
    return out


def _jump_overtakes_lanes(code: KernelCode, n: int, t: int) -> bool:
    """True if a lane that jumps from block n to t may pass others that still store or meet.

    Lanes in step wait for them there. They are in a branch that it jumps over, or in a loop that it
    leaves.
    """
    if t <= n:
        return False
    spans = [(n + 1, t - 1)]
    spans += [
        (first, last)
        for last in range(n, t)
        for first in successor_blocks(code.blocks, last)
        if first <= n
    ]
    return any(
        code.blocks[k].kind != CHAIN for first, last in spans for k in range(first, last + 1)
    )


class _ChainWriter:
    """C that runs each lane from the entry to a store, or what lanes do together."""

    def __init__(self, code: KernelCode) -> None:
        self.code, self.blocks = code, code.blocks
        self.goes_on = _followers_in_c_by_block(code)
        self.modified = _modified_registers(code, self.goes_on)
        self.arrivals = _predecessor_counts(code)
        self.exits: dict[int, set[int]] = {}
        self.left = defaultdict[int, set[int]](set)

    def leave_statement(self, n: int, t: int) -> str:
        """Give the lane back before block t."""
        if t == END:
            return f"{{ next = {END}; goto done; }}"
        self.exits.setdefault(t, set()).update(self.modified[n] & self.blocks[t].alive)
        self.left[n].add(t)
        return f"goto X{t};"

    def jump_statement(self, n: int, t: int) -> str:
        """Go on at block t."""
        if t not in self.goes_on[n]:
            return self.leave_statement(n, t)
        if t == n + 1 and self.arrivals[t] < 2 and not self.code.frame.turns:
            return f"goto B{t};"
        test = "--left < 0" if t <= n else f"unlikely(limit <= {t})"
        return f"{{ if ({test}) {self.leave_statement(n, t)} goto B{t}; }}"

    def block_lines(self, n: int) -> Lines:
        """Block n."""
        code, block = self.code, self.blocks[n]
        lines = [f"B{n}: count += {len(block.instrs)};"]
        for instr in block.body:
            text = code.texts[id(instr)].lines
            miss = f"{{ c->at = {code.frame.numbers[id(instr)]}; bad = a; goto miss; }}"
            lines.append(text.replace(MISS, miss))
        targets, jump = successor_blocks(self.blocks, n), block.ending.instr
        if block.ending.kind == "brx":
            assert jump is not None
            index = OperandWriter(jump, code.frame).operand_expression(jump.args[0], U32)
            cases = [f"case {k}: {self.jump_statement(n, t)}" for k, t in enumerate(targets[:-1])]
            table = (
                f"switch ({index}) {{ {' '.join(cases)} default: {self.jump_statement(n, END)} }}"
            )
            lines.append(f"if ({guard_condition(jump)}) {{ {table} }}" if jump.guard else table)
        elif len(targets) > 1:
            assert jump is not None
            lines.append(f"if ({guard_condition(jump)}) {self.jump_statement(n, targets[0])}")
        return [*lines, self.jump_statement(n, targets[-1])]

    def registers_needed(self) -> list[set[int]]:
        """By block: registers that are read, or given back, by a lane that enters there."""
        out: list[set[int]] = [set() for _ in self.blocks]
        changed = True
        while changed:
            changed = False
            for n in reversed(range(len(out))):
                after = [self.exits[t] for t in self.left[n]] + [out[t] for t in self.goes_on[n]]
                need = set[int]().union(*after) - self.blocks[n].kills | self.blocks[n].reads
                if need != out[n]:
                    out[n], changed = need, True
        return out


def _chain_function_lines(code: KernelCode) -> Lines:
    chain, body = _ChainWriter(code), []
    inside = [n for n, block in enumerate(code.blocks) if block.kind == CHAIN]
    for n in inside:
        body += chain.block_lines(n)
    for t, regs in chain.exits.items():
        saves = " ".join(f"R{r}[i] = r{r};" for r in sorted(regs))
        body.append(f"X{t}: {saves} next = {t}; goto done;")
    entries, needed = [], chain.registers_needed()
    for n in inside:
        if n in chain.exits or not n or code.blocks[n - 1].kind != CHAIN:
            bits = {r: code.kernel.regs[r].bits for r in sorted(needed[n])}
            loads = " ".join(f"r{r} = R{r}[i]{' != 0' * (b == 1)};" for r, b in bits.items())
            entries.append(f"case {n}: {loads} goto B{n};")
    who, told = (WHO, "tell(c->watch);") if code.frame.watched else ("", "")
    named = sorted({r for n in inside for r in _block_and_successor_registers(code, n)})
    return [
        "static int chain(Call *c) {",
        "int64_t moved = 0, count = 0, steps = 0; int same = 1; const int entry = (int)c->entry;",
        "const int64_t limit = c->limit; uint64_t bad = 0;",
        "Hit h[HITS]; memset(h, 0, sizeof h);",
        *(_register_pointer_declaration(code, r) for r in code.kept if r in named),
        f"for (int64_t j = 0; j < c->n; j++) {{ {LANE} {BLOCK} {who}",
        "int64_t left = c->budget; const int64_t counted = count; int32_t next;",
        *(f"{_register_c_type(code, r)} r{r};" for r in named),
        "switch (entry) {", *entries, "default: __builtin_unreachable(); }",
        *body,
        f"miss: wrong(c, i, bad); {told} return 3;",
        "done: c->next[j] = next; if (next != c->next[0]) same = 0;",
        "if (c->budget - left >= steps) steps = c->budget - left + 1; }",
        "c->done = c->n; c->moved += moved; c->instructions += count; c->steps += steps;",
        f"{told} return same ? 1 : 2; }}",
    ]  # fmt: skip


def _block_and_successor_registers(code: KernelCode, n: int) -> set[int]:
    out = code.blocks[n].alive | code.blocks[n].writes
    for t in successor_blocks(code.blocks, n):
        out |= code.blocks[t].alive if t != END else set()
    return out


def _writeless_barrier_flags(code: KernelCode) -> list[int]:
    """By block: 1 for a barrier behind which no shared memory is written before the next one."""
    blocks = code.blocks
    writing = {
        n for n, block in enumerate(blocks) if _may_write_shared(code, n) or block.kind == EVENT
    }
    out = []
    for n, block in enumerate(blocks):
        seen: set[int] = set()
        ahead = [*successor_blocks(blocks, n)] if block.kind == BARRIER else []
        while ahead:
            t = ahead.pop()
            if t != END and t not in seen and blocks[t].kind != BARRIER:
                seen.add(t)
                ahead += successor_blocks(blocks, t)
        out.append(int(block.kind == BARRIER and not seen & writing))
    return out


def _may_write_shared(code: KernelCode, n: int) -> bool:
    """True if a block may write shared memory."""
    store = code.texts[id(code.blocks[n].instrs[0])].store if code.blocks[n].kind == STORE else None
    if store is not None:
        return store.space in ("shared", "generic")
    writers = ("atom", "red", "cp", "mbarrier", "wmma")
    return code.blocks[n].kind == GROUP and code.blocks[n].instrs[0].op in writers


def _run_function_lines(code: KernelCode) -> Lines:
    """The whole group while it stays together.

    0: the first instruction of block `entry` cannot go on, or somebody has to look at it, 1: all
    lanes are at `entry`, where it is the host's turn, 2: the lanes are at different blocks, 3: a
    lane's access is wrong.
    """
    blocks, watched = code.blocks, code.frame.watched
    kinds = ", ".join(str(block.kind) for block in blocks) or "0"
    calm = ", ".join(map(str, _writeless_barrier_flags(code))) if watched else ""
    tables = f"static const uint8_t calm[] = {{{calm}}};"
    cross = "c->whole && cross(c, calm[c->entry])" if watched else "c->whole"
    together = [_case_statement(code, n) for n, b in enumerate(blocks) if b.kind in (STORE, GROUP)]
    return [
        f"enum {{ END = {len(blocks)}, STORE = {STORE}, BARRIER = {BARRIER}, EVENT = {EVENT}, "
        f"GROUP = {GROUP} }};",
        f"int run(Call *c) {{ static const uint8_t kind[] = {{{kinds}}}; {tables * watched}",
        "c->done = 0; c->steps = 0; c->instructions = 0; c->moved = 0; c->why = 0; c->note = -1;",
        "for (;;) {",
        "if (kind[c->entry] == STORE || kind[c->entry] == GROUP) {",
        "int ok = 0; switch (c->entry) {", *together,
        "} if (!ok) return 0;",
        "c->instructions += c->n; c->steps++; c->entry++; c->trusted = 0;",
        "} else { int how = chain(c); c->trusted = 0; if (how != 1) return how; ",
        "c->entry = c->next[0]; }",
        f"for (; c->entry < END && kind[c->entry] == BARRIER && {cross}; c->entry++)",
        "c->instructions += c->n;",
        "if (c->entry >= END || kind[c->entry] == BARRIER || kind[c->entry] == EVENT) return 1;",
        "if (c->entry >= c->limit || c->steps >= c->budget) return 1;",
        "} }",
    ]  # fmt: skip
