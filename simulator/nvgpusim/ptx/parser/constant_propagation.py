"""Literals for registers that hold one: compilers put masks of warp instructions in registers."""

from __future__ import annotations

from dataclasses import replace

from .syntax import Imm, Instr, Kernel, Reg, register_numbers

_FIRST = {"shfl": 2, "vote": 2, "match": 2, "redux": 2}
"""Operand from which on an instruction of a warp names lanes."""
_BITS32 = {"b32", "u32", "s32"}


def replace_registers_by_literals(kernel: Kernel) -> None:
    """Replace registers that a mov has set, with no label between."""
    labels, known = set(kernel.labels.values()), dict[int, Imm]()
    for at, instr in enumerate(kernel.instrs):
        if at in labels:
            known.clear()
        first = _FIRST.get(instr.op)
        if first is not None and known:
            rest = (known.get(a.index, a) if isinstance(a, Reg) else a for a in instr.args[first:])
            kernel.instrs[at] = replace(instr, args=(*instr.args[:first], *rest))
        for index in register_numbers(instr.args[0]) if instr.args else ():
            known.pop(index, None)
        if (moved := _register_and_moved_literal(instr)) is not None:
            known.update([moved])


def _register_and_moved_literal(instr: Instr) -> tuple[int, Imm] | None:
    """The 32-bit register that surely holds an integer now, and which."""
    if instr.op != "mov" or _BITS32.isdisjoint(instr.mods) or len(instr.args) != 2:
        return None
    to, what = instr.args
    if instr.guard is not None or not isinstance(to, Reg) or to.bits != 32:
        return None
    return (to.index, what) if isinstance(what, Imm) and what.kind == "int" else None
