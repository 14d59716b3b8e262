"""Analysis of a kernel: the pointers that it may write through, and what orders its threads."""

from __future__ import annotations

from collections import Counter

import numpy as np

from .syntax import (
    Addr,
    Imm,
    Instr,
    Kernel,
    Operand,
    Reg,
    SpecialRegister,
    SymbolAddress,
    register_numbers,
)

_WRITES = ("st", "atom", "red", "wmma")
_ORDERED = {"relaxed", "acquire", "release", "acq_rel"}
_PURE = ("cvta", "mov", "add", "sub", "mul", "mad", "shl", "cvt", "and")
_STRONG = _ORDERED | {"volatile", "mmio"}


class KernelFacts:
    """A kernel as the sanitizer asks about it at each launch, analysed once.

    `written`: see `written_params`; `crowded`: see `may_order_only_some_threads`. By number of the
    memory instruction: `strong` (volatile or atomic), `atomic`, `scoped` (for the block alone),
    `blind` (an atomic whose result nobody reads), `compares` (compare-and-swap), `wide` (64 bits).
    `mixed`: strong ones are of 64 bits and of fewer.
    """

    def __init__(self, kernel: Kernel, sites: list[Instr]) -> None:
        self.written, self.crowded = written_params(kernel), may_order_only_some_threads(kernel)
        self.atomic = [False, *(_is_atomic(instr) for instr in sites)]
        self.strong = [
            False, *(instr.op in ("atom", "red") or not _STRONG.isdisjoint(instr.mods)
                     for instr in sites),
        ]  # fmt: skip
        named = Counter(
            r for i in kernel.instrs for arg in (*i.args, i.guard) for r in register_numbers(arg)
        )
        self.blind = [False, *(_discards_result(instr, named) for instr in sites)]
        self.compares = np.array([False, *("cas" in instr.mods for instr in sites)])
        wide = {"b64", "u64", "s64", "f64"}
        self.wide = np.array(
            [False, *(i.op == "mbarrier" or not wide.isdisjoint(i.mods) for i in sites)]
        )
        self.mixed = len({bool(w) for w, s in zip(self.wide, self.strong, strict=True) if s}) > 1
        self.scoped = [n for n, instr in enumerate(sites, 1) if "cta" in instr.mods]


def _is_atomic(instr: Instr) -> bool:
    return (
        instr.op in ("atom", "red")
        or (instr.op == "mbarrier" and "init" not in instr.mods)
        or not _ORDERED.isdisjoint(instr.mods)
    )


def _discards_result(instr: Instr, named: Counter[int]) -> bool:
    result = register_numbers(instr.args[0]) if instr.op == "atom" else []
    return instr.op == "red" or (instr.op == "atom" and all(named[r] == 1 for r in result))


def _source_parameters(
    instr: Instr, kernel: Kernel, known: dict[int, frozenset[str]]
) -> frozenset[str]:
    """Parameters that the instruction's result may come from; "*" for a pointer from memory."""
    if instr.op in ("ld", "ldu"):
        arg = instr.args[1]
        if isinstance(arg, Addr) and isinstance(arg.base, SymbolAddress):
            name = arg.base.name
            if "param" in instr.mods and name in kernel.params:
                return frozenset([name])
            return frozenset() if "@" in name else frozenset("*")
        return (
            frozenset("*") if any(m in ("u64", "b64", "s64") for m in instr.mods) else frozenset()
        )
    out: set[str] = set()
    for arg in instr.args[1:]:
        for index in register_numbers(arg):
            out |= known.get(index, frozenset())
        if isinstance(arg, SymbolAddress) and arg.name not in kernel.variables:
            out.add("*")
    return frozenset(out)


def clock_dependent_registers(kernel: Kernel) -> set[int]:
    """Registers whose values depend on a clock."""
    out: set[int] = set()
    clocks = ("%clock", "%globaltimer")
    changed = True
    while changed:
        changed = False
        for instr in kernel.instrs:
            if instr.op in ("st", "red", "atom", "ld") or not instr.args:
                continue
            first, *rest = instr.args
            read = any(isinstance(a, SpecialRegister) and a.name.startswith(clocks) for a in rest)
            if read or any(r in out for arg in rest for r in register_numbers(arg)):
                changed |= not out.issuperset(register_numbers(first))
                out.update(register_numbers(first))
    return out


def written_params(kernel: Kernel) -> set[str] | None:
    """Names of the pointer parameters that global stores and atomics go through; None: unknown."""
    if kernel.slots:
        return None
    known: dict[int, frozenset[str]] = {}
    changed = True
    while changed:
        changed = False
        for instr in kernel.instrs:
            if instr.op in ("st", "red") or not instr.args:
                continue
            found = _source_parameters(instr, kernel, known)
            for index in register_numbers(instr.args[0]) if found else []:
                if not found <= known.get(index, frozenset()):
                    known[index] = known.get(index, frozenset()) | found
                    changed = True
    out: set[str] = set()
    for instr in kernel.instrs:
        if instr.op not in _WRITES or any(m in ("shared", "local", "param") for m in instr.mods):
            continue
        place = instr.args[1 if instr.op == "atom" else 0]
        if not isinstance(place, Addr) or not isinstance(place.base, Reg):
            return None
        names = known.get(place.base.index, frozenset())
        if not names or "*" in names:
            return None
        out |= names
    return out


def loads_compared_by_cas(kernel: Kernel) -> set[int]:
    """Numbers of plain loads whose value an atom.cas of the same address compares.

    A loop around compare-and-swap begins with such a read, NVIDIA's own atomicAdd of bf16 too. It
    races with nothing that matters: an old value only costs another turn.
    """
    written: dict[int, list[int]] = {}
    for n, instr in enumerate(kernel.instrs):
        for index in (
            register_numbers(instr.args[0]) if instr.args and instr.op not in ("st", "red") else ()
        ):
            written.setdefault(index, []).append(n)
    out: set[int] = set()
    for instr in kernel.instrs:
        if instr.op != "atom" or "cas" not in instr.mods or len(instr.args) < 4:
            continue
        place = _symbolic_value(kernel, written, instr.args[1])
        todo, seen = register_numbers(instr.args[2]), set[int]()
        while todo:
            index = todo.pop()
            if index in seen:
                continue
            seen.add(index)
            for n in written.get(index, []):
                source = kernel.instrs[n]
                plain = source.op == "ld" and _STRONG.isdisjoint(source.mods)
                if source.op == "mov":
                    todo += register_numbers(source.args[1])
                elif plain and _symbolic_value(kernel, written, source.args[1]) == place:
                    out.add(n)
    return out


def _symbolic_value(
    kernel: Kernel, written: dict[int, list[int]], operand: Operand | None
) -> object:
    """An operand's content, so that equal contents are the same; addresses of any space."""
    if isinstance(operand, Addr):
        return _symbolic_value(kernel, written, operand.base), operand.offset
    if not isinstance(operand, Reg):
        return operand
    places = written.get(operand.index, [])
    if len(places) != 1:
        return operand
    instr = kernel.instrs[places[0]]
    if instr.guard is not None or instr.op not in _PURE:
        return operand
    if instr.op in ("cvta", "mov"):
        return _symbolic_value(kernel, written, instr.args[1])
    return instr.op, instr.mods, tuple(_symbolic_value(kernel, written, a) for a in instr.args[1:])


def may_order_only_some_threads(kernel: Kernel) -> bool:
    """True if an instruction may order some threads of a block or grid, and not others.

    Barriers of whole blocks and whole warps order neighbours: who is after the lowest and the
    highest of some threads is after those between them.
    """
    for instr in kernel.instrs:
        if instr.op in ("fence", "membar", "mbarrier") or _STRONG.intersection(instr.mods):
            return True
        if instr.op not in ("bar", "barrier"):
            continue
        reduces = "red" in instr.mods
        first, *others = instr.args[reduces:]
        if "warp" in instr.mods:
            if not isinstance(first, Imm) or int(first.value) & 0xFFFFFFFF != 0xFFFFFFFF:
                return True
        elif "arrive" in instr.mods or len(others) > reduces or not isinstance(first, Imm):
            return True
    return False
