"""The C of a whole kernel (see the package's docstring for its layout)."""

from __future__ import annotations

from ..compile import END
from ..parser.syntax import Instr, Reg
from .memory import ORDERED
from .plan import ALIEN, ALONE, BARRIER, CHAIN, GROUP, STORE, Plan, guard, successors

Lines = list[str]
LANES = (CHAIN, ALONE)
"""What each lane runs on its own."""
ODD = -1
"""Next block of a lane that C gave up and undid, for the interpreter to run."""


def source(plan: Plan) -> str:
    """The text of the C file."""
    stores = [n for n, kind in enumerate(plan.kinds) if kind in (STORE, GROUP)]
    headers = ["machine", "groups", *(["watch"] if plan.frame.watched else []), "tensor"]
    lines = [f'#include "{name}.h"' for name in headers]
    lines.append(f"#define HITS {max(1, plan.frame.hits)}")
    lines += _chain(plan)
    lines += _driver(plan, stores)
    return "\n".join(lines) + "\n"


def _name(plan: Plan, index: int) -> str:
    return plan.frame.c_type(plan.code.kernel.regs[index])


def _pointer(plan: Plan, index: int) -> str:
    at = plan.kept.index(index)
    return f"{_name(plan, index)} *const restrict R{index} = c->reg[{at}];"


def _read(plan: Plan, index: int) -> str:
    if plan.code.kernel.regs[index].bits == 1:
        return f"r{index} = R{index}[i] != 0;"
    return f"r{index} = R{index}[i];"


LANE = "int64_t i = c->lanes ? c->lanes[j] : j;"
WHO = "const Who og = who(c, i, 0), os = who(c, i, 1); (void)og, (void)os;"
BLOCK = "uint64_t block = (uint32_t)i / (uint32_t)c->threads; (void)block;"


def _place(plan: Plan, index: int) -> str:
    """The memory of a register, "0" for one that nobody reads."""
    return f"c->reg[{plan.kept.index(index)}]" if index in plan.kept else "0"


def _store(plan: Plan, n: int) -> str:
    """A case of the driver: the store, or what the lanes do together, that is block n."""
    instr: Instr = plan.code.blocks[n].instrs[0]
    group = plan.texts[id(instr)].group
    if group is not None:
        return f"case {n}: ok = {group.text(lambda index: _place(plan, index))}; break;"
    store = plan.texts[id(instr)].store
    assert store is not None

    def column(value: Reg | int) -> str:
        if isinstance(value, int):
            return f"{{&(uint64_t){{{value:#x}ull}}, 0}}"
        return f"{{c->reg[{plan.kept.index(value.index)}], {max(8, value.bits) // 8}}}"

    values = ", ".join(column(v) for v in store.values)
    g = instr.guard
    guarded = "0" if g is None else f"c->reg[{plan.kept.index(g.index)}]"
    space = {"global": "g", "shared": "s", "local": "l", "generic": "a"}[store.space]
    address, wide, offset = "{0, 0}", 1, f"{store.offset:#x}ull"
    if isinstance(store.address, str):
        offset = f"{store.address} + {offset}"
    else:
        address, wide = column(store.address), int(store.address.bits == 64)
    put, site, strong = "put", "", 0
    if plan.frame.watched:
        put, site = "put_watched", f", {plan.frame.site(instr)}"
        strong = int(not set(ORDERED).isdisjoint(instr.mods))
    return (
        f"case {n}: ok = {put}(c, &(Put){{'{space}', {address}, {wide}, {offset}, {guarded}, "
        f"{int(instr.guard_not)}, {store.size}, {len(store.values)}, {{{values}}}, {strong}}}"
        f"{site}); break;"
    )


def _modified(plan: Plan) -> list[set[int]]:
    """By block: registers that C may have changed by its end, since the lane entered."""
    count = len(plan.kinds)
    out = [set(w) if k in LANES else set() for w, k in zip(plan.writes, plan.kinds, strict=True)]
    changed = True
    while changed:
        changed = False
        for n in range(count):
            if plan.kinds[n] != CHAIN:
                continue
            for t in successors(plan.code, n):
                if t != END and plan.kinds[t] == CHAIN and not out[n] <= out[t]:
                    out[t] |= out[n]
                    changed = True
    return out


def _arrivals(plan: Plan) -> list[int]:
    """By block: number of its predecessors."""
    out = [0] * len(plan.kinds)
    for n in range(len(plan.kinds)):
        for t in {*successors(plan.code, n)} - {END}:
            out[t] += 1
    return out


def _overtakes(plan: Plan, n: int, t: int) -> bool:
    """True if a lane that jumps from block n to t may pass others that still store or meet.

    Lanes in step wait for them there. They are in a branch that it jumps over, or in a loop that it
    leaves.
    """
    if t <= n:
        return False
    spans = [(n + 1, t - 1)]
    spans += [
        (first, last) for last in range(n, t) for first in successors(plan.code, last) if first <= n
    ]
    return any(plan.kinds[k] != CHAIN for first, last in spans for k in range(first, last + 1))


def _chain(plan: Plan) -> Lines:
    """C that runs each lane from the entry to a block of the interpreter, a store or a barrier."""
    modified = _modified(plan)
    joins = [count > 1 for count in _arrivals(plan)]
    exits: dict[int, set[int]] = {}

    def leave(n: int, t: int) -> str:
        if t == END:
            return f"{{ next = {END}; goto done; }}"
        exits.setdefault(t, set()).update(modified[n] & plan.alive[t])
        return f"goto X{t};"

    def jump(n: int, t: int) -> str:
        alone = plan.kinds[n] == ALONE
        if t == END or alone or plan.kinds[t] != CHAIN or _overtakes(plan, n, t):
            return leave(n, t)
        if t == n + 1 and not joins[t]:
            return f"goto B{t};"
        test = "--left < 0" if t <= n else f"unlikely(limit <= {t})"
        return f"{{ if ({test}) {leave(n, t)} goto B{t}; }}"

    body: Lines = []
    inside = [n for n, kind in enumerate(plan.kinds) if kind in LANES]
    for n in inside:
        block = plan.code.blocks[n]
        body.append(f"B{n}: count += {len(block.instrs)};")
        body += [plan.texts[id(i)].lines for i in block.instrs[: len(block.ops)]]
        targets = successors(plan.code, n)
        if len(targets) > 1:
            assert block.jump.instr is not None
            body.append(f"if ({guard(block.jump.instr)}) {jump(n, targets[0])}")
        body.append(jump(n, targets[-1]))
    for t, regs in exits.items():
        saves = " ".join(f"R{r}[i] = r{r};" for r in sorted(regs))
        body.append(f"X{t}: {saves} next = {t}; goto done;")
    entries = []
    for n in inside:
        live = " ".join(_read(plan, r) for r in sorted(plan.alive[n]))
        entries.append(f"case {n}: {live} goto B{n};")
    return _lanes(plan, entries, body)


def _lanes(plan: Plan, entries: Lines, body: Lines) -> Lines:
    regs = range(len(plan.code.kernel.regs))
    who = WHO if plan.frame.watched else ""
    named = sorted({r for n, kind in enumerate(plan.kinds) if kind in LANES for r in _of(plan, n)})
    told = "tell(c->watch);" if plan.frame.watched else ""
    return [
        "static int chain(Call *c) {",
        "int64_t moved = 0, count = 0, steps = 0; int same = 1; const int entry = (int)c->entry;",
        "const int64_t limit = c->limit;",
        "Hit h[HITS]; memset(h, 0, sizeof h);",
        *(_pointer(plan, r) for r in plan.kept if r in named),
        f"for (int64_t j = 0; j < c->n; j++) {{ {LANE} {BLOCK} {who}",
        "int64_t left = c->budget; const int64_t counted = count, had = moved; int32_t next;",
        *(f"{_name(plan, r)} r{r};" for r in named if r in regs),
        "switch (entry) {", *entries, "default: __builtin_unreachable(); }",
        *body,
        "miss: c->done = j; c->moved += had; c->instructions += counted; c->steps += steps;",
        f"{told} return 0;",
        f"odd: count = counted; moved = had; c->next[j] = {ODD}; same = 0; continue;",
        "done: c->next[j] = next; if (next != c->next[0]) same = 0;",
        "if (c->budget - left >= steps) steps = c->budget - left + 1; }",
        "c->done = c->n; c->moved += moved; c->instructions += count; c->steps += steps;",
        f"{told} return same ? 1 : 2; }}",
    ]  # fmt: skip


def _of(plan: Plan, n: int) -> set[int]:
    out = plan.alive[n] | plan.writes[n]
    for t in successors(plan.code, n):
        out |= plan.alive[t] if t != END else set()
    return out


def _calm(plan: Plan) -> list[int]:
    """By block: 1 for a barrier behind which no shared memory is written before the next one.

    What the interpreter runs may write it, and so may atomics and copies.
    """
    writing = {
        n
        for n, kind in enumerate(plan.kinds)
        if kind == ALIEN
        or (kind == STORE and _space(plan, n) in ("shared", "generic"))
        or (kind == GROUP and plan.code.blocks[n].instrs[0].op in ("atom", "red", "cp"))
    }
    out = []
    for n, kind in enumerate(plan.kinds):
        seen: set[int] = set()
        ahead = [*successors(plan.code, n)] if kind == BARRIER else []
        while ahead:
            t = ahead.pop()
            if t != END and t not in seen and plan.kinds[t] != BARRIER:
                seen.add(t)
                ahead += successors(plan.code, t)
        out.append(int(kind == BARRIER and not seen & writing))
    return out


def _space(plan: Plan, n: int) -> str:
    store = plan.texts[id(plan.code.blocks[n].instrs[0])].store
    return "" if store is None else store.space


def _driver(plan: Plan, stores: list[int]) -> Lines:
    """The whole group while it stays together.

    0: the interpreter must run block `entry` for the lanes that are not done, 1: all lanes are at
    `entry`, where it is the interpreter's turn, 2: the lanes are at different blocks.
    """
    kinds = ", ".join(map(str, plan.kinds)) or "0"
    cross, calm = "c->whole", ""
    if plan.frame.watched:
        cross += " && cross(c, calm[c->entry])"
        calm = f"static const uint8_t calm[] = {{{', '.join(map(str, _calm(plan))) or '0'}}};"
    return [
        f"enum {{ END = {len(plan.kinds)}, STORE = {STORE}, BARRIER = {BARRIER}, "
        f"ALIEN = {ALIEN}, GROUP = {GROUP} }};",
        f"int run(Call *c) {{ static const uint8_t kind[] = {{{kinds}}}; {calm}",
        "c->done = 0; c->steps = 0; c->instructions = 0; c->moved = 0;",
        "for (;;) {",
        "if (kind[c->entry] == STORE || kind[c->entry] == GROUP) {",
        "int ok = 0; switch (c->entry) {",
        *(_store(plan, n) for n in stores),
        "} if (!ok) { c->done = 0; return 0; }",
        "c->instructions += c->n; c->steps++; c->entry++;",
        "} else { int how = chain(c); if (how != 1) return how; c->entry = c->next[0]; }",
        f"for (; c->entry < END && kind[c->entry] == BARRIER && {cross}; c->entry++)",
        "c->instructions += c->n;",
        "if (c->entry >= END || kind[c->entry] == BARRIER || kind[c->entry] == ALIEN) return 1;",
        "if (c->entry >= c->limit || c->steps >= c->budget) return 1;",
        "} }",
    ]
