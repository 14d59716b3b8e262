"""An instruction as C, and which registers it reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

from ..parser.syntax import Addr, Instr, Kernel, SymbolAddress, register_numbers
from .arithmetic import ARITHMETIC
from .conversions import CONVERSIONS
from .floating import FLOATING
from .groups import GROUPS as WARPS
from .groups import Writer
from .memory import MEMORY, MemoryStore, make_memory_store, must_be_watched_in_turn
from .operand_writer import KernelNumbering, OperandWriter, UnknownFormError
from .tensor import TENSOR
from .video import VIDEO

TABLE = {**ARITHMETIC, **FLOATING, **VIDEO, **CONVERSIONS, **MEMORY}
GROUPS = {**WARPS, **TENSOR}
CARRYING = ("addc", "subc", "madc")
"""Opcodes that read the carry flag."""


@dataclass
class InstructionText:
    """An instruction in C: what a lane does, or a store or another call of all lanes.

    `alone`: all lanes do it before any goes on, since it orders them for the sanitizer.
    """

    lines: str = ""
    store: MemoryStore | None = None
    group: Writer | None = None
    alone: bool = False


def guard_condition(instr: Instr) -> str:
    """The condition of a guarded instruction in C, "" for none."""
    return "" if instr.guard is None else f"{'!' * instr.guard_not}r{instr.guard.index}"


def instruction_to_c(instr: Instr, frame: KernelNumbering) -> InstructionText:
    """An instruction in C. Raises PtxError for one, or a form, that nobody has written."""
    words = OperandWriter(instr, frame)
    if instr.op not in TABLE and instr.op not in GROUPS:
        raise words.make_error(f"unknown instruction {instr.op!r}")
    try:
        if instr.op in GROUPS:
            return InstructionText(group=GROUPS[instr.op](words))
        if instr.op == "st" and not _is_call_parameter_access(instr):
            return InstructionText(store=make_memory_store(words))
        lines = TABLE[instr.op](words)
    except (
        UnknownFormError, ArithmeticError, LookupError, ValueError, TypeError, AttributeError,
    ) as e:  # fmt: skip
        raise words.make_error() from e
    if lines and instr.guard:
        lines = f"if ({guard_condition(instr)}) {{ {lines} }}"
    return InstructionText(lines, alone=must_be_watched_in_turn(words))


def _is_call_parameter_access(instr: Instr) -> bool:
    """True for a load or store of a call's parameter, which is a register."""
    places = (arg.base for arg in instr.args if isinstance(arg, Addr))
    return any(isinstance(base, SymbolAddress) and "@" in base.name for base in places)


def _call_parameter_registers(instr: Instr, kernel: Kernel) -> list[int]:
    """Registers behind the parameters of calls that an instruction names."""
    out = []
    for arg in instr.args:
        name = arg.base if isinstance(arg, Addr) else arg
        if isinstance(name, SymbolAddress) and "@" in name.name:
            if instr.op not in ("ld", "ldu", "st"):
                return [r.index for r in kernel.slots.values()]
            out += [r.index for (n, _), r in kernel.slots.items() if n == name.name]
    return out


def register_effects(
    instr: Instr, kernel: Kernel, text: InstructionText | None
) -> tuple[set[int], set[int], set[int]]:
    """Registers that an instruction reads, may write and surely writes in every lane.

    `text`: None for one that the host serves.
    """
    every = {r for arg in instr.args for r in register_numbers(arg)}
    slots = set(_call_parameter_registers(instr, kernel))
    if instr.guard is not None:
        every.add(instr.guard.index)
    flag = {kernel.carry_register().index} if instr.op in CARRYING or "cc" in instr.mods else set()
    if text is None:
        return every | slots, every | slots, set()
    silent = instr.op in ("st", "red", "bar", "barrier", "cp", "membar", "fence")
    silent |= "store" in instr.mods
    silent |= instr.op == "mbarrier" and isinstance(instr.args[0], Addr)
    if silent or (not text.lines and not text.group):
        return every, slots, set()
    first = set(register_numbers(instr.args[0])) | (flag if "cc" in instr.mods else set())
    rest = {r for arg in instr.args[1:] for r in register_numbers(arg)} | (every - first) | slots
    rest |= flag if instr.op in CARRYING else set()
    if instr.guard is not None:
        return rest | first | {instr.guard.index}, first, set()
    return rest, first, first
