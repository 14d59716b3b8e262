"""Operands as C: how a compiled kernel reads and writes registers, literals and symbols."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..operands import SPECIALS, TYPES, InstructionInKernel, PtxType, literal_value
from ..parser.syntax import (
    Addr,
    DestinationPair,
    Imm,
    Instr,
    Kernel,
    NegatedPredicate,
    Operand,
    PtxModule,
    Reg,
    SpecialRegister,
    SymbolAddress,
)


class UnknownFormError(Exception):
    """A form that nobody has written."""


NEUTRAL = ("mov", "ld", "ldu", "st", "selp", "shfl")
"""Opcodes that move bits: their types do not say what a register holds."""
CLOCKS = {"%clock": "ticks", "%globaltimer": "nanoseconds(c)"}
"""Special registers that differ from one look to the next, as C."""


def unsigned_c_type(bits: int) -> str:
    """The C type of a register or of an unsigned value of so many bits."""
    return f"uint{max(8, bits)}_t"


def float_registers(kernel: Kernel) -> set[int]:
    """Registers that arithmetic uses as f32 or f64 and nothing as an integer."""
    real: set[int] = set()
    other: set[int] = set()
    for i in kernel.instrs:
        if i.op in NEUTRAL:
            continue
        kinds = {TYPES[m].bits for m in i.mods if m in ("f32", "f64")}
        integers = {TYPES[m].bits for m in i.mods if m in TYPES and m not in ("f32", "f64")}
        for arg in i.args:
            reg = arg.base if isinstance(arg, Addr) else arg
            if isinstance(reg, Reg):
                plain = reg is arg and reg.bits in kinds and reg.bits not in integers
                (real if plain else other).add(reg.index)
    return real - other


class KernelNumbering:
    """One kernel being written: its special registers and symbols by number.

    `sites`: its memory instructions, where a sanitizer watches them. `turns`: warps may change
    places after each of them.
    """

    def __init__(
        self,
        kernel: Kernel,
        module: PtxModule,
        sites: list[Instr] | None = None,
        turns: bool = False,
    ) -> None:
        self.kernel, self.module = kernel, module
        self.watched = sites is not None
        self.sites = {id(instr): n for n, instr in enumerate(sites or [], 1)}
        self.turns = turns
        self.numbers = {id(instr): n for n, instr in enumerate(kernel.instrs)}
        self.real = float_registers(kernel)
        self.specials: list[str] = []
        self.symbols: list[tuple[str, str]] = []
        self.hits = 0

    def special_register_number(self, name: str) -> int:
        """Number of a special register."""
        if name not in self.specials:
            self.specials.append(name)
        return self.specials.index(name)

    def symbol_expression(self, kind: str, name: str) -> str:
        """A launch's constant: ("symbol", variable) or ("base", state space)."""
        if (kind, name) not in self.symbols:
            self.symbols.append((kind, name))
        return f"c->symbol[{self.symbols.index((kind, name))}]"

    def site_number(self, instr: Instr) -> int:
        """Number of a memory instruction, 0 for one that is none."""
        return self.sites.get(id(instr), 0)

    def new_mapping_slot_expression(self) -> str:
        """A place for the last mapping of a memory instruction."""
        self.hits += 1
        return f"&h[{self.hits - 1}]"

    def register_c_type(self, reg: Reg) -> str:
        """The C type of a register's local variable."""
        if reg.index in self.real:
            return "float" if reg.bits == 32 else "double"
        return unsigned_c_type(reg.bits)


class OperandWriter(InstructionInKernel):
    """One instruction whose operands are written as C."""

    def __init__(self, instr: Instr, frame: KernelNumbering) -> None:
        super().__init__(instr, frame.kernel, frame.module)
        self.frame = frame

    def register_expression(self, reg: Reg) -> str:
        """A register's content, unsigned."""
        if reg.index in self.frame.real:
            return f"as_u{reg.bits}(r{reg.index})"
        return f"r{reg.index}"

    def operand_expression(self, arg: Operand | None, t: PtxType) -> str:
        """An operand as a C expression of type t: float, double, integer; f16 and packed: bits."""
        if isinstance(arg, Reg):
            if arg.bits < t.bits or (1 in (arg.bits, t.bits) and arg.bits != t.bits):
                raise self.make_error(f"{arg.name} has {arg.bits} bits, .{t.name} needs {t.bits}")
            if arg.index in self.frame.real and t.kind == "f" and arg.bits == t.bits:
                return f"r{arg.index}"
            return self._typed_expression(
                f"({unsigned_c_type(t.bits)}){self.register_expression(arg)}", t
            )
        if isinstance(arg, NegatedPredicate):
            return f"(uint8_t)!r{arg.reg.index}"
        if isinstance(arg, Imm):
            word = np.asarray(literal_value(arg, t, self))
            raw = int(word.reshape(1).view(f"u{word.itemsize}")[0])
            return self._typed_expression(
                f"({unsigned_c_type(t.bits)}){raw:#x}u{'ll' if t.bits == 64 else ''}", t
            )
        if isinstance(arg, SpecialRegister):
            if arg.name not in SPECIALS:
                raise self.make_error(f"unknown special register {arg.name}")
            for name, now in CLOCKS.items():
                if arg.name.startswith(name):
                    shown = f"({now} >> {32 * arg.name.endswith('_hi')})"
                    if arg.name not in ("%clock64", "%globaltimer"):
                        shown = f"(uint32_t){shown}"
                    return self._typed_expression(f"({unsigned_c_type(t.bits)}){shown}", t)
            n = self.frame.special_register_number(arg.name)
            read = f"((const uint32_t *)c->special[{n}])[i & c->special_mask[{n}]]"
            return self._typed_expression(f"({unsigned_c_type(t.bits)}){read}", t)
        if isinstance(arg, SymbolAddress):
            return self._typed_expression(
                f"({unsigned_c_type(t.bits)}){self.variable_address_expression(arg, t.bits)}", t
            )
        raise self.make_error("this operand cannot be read")

    def variable_address_expression(self, sym: SymbolAddress, bits: int) -> str:
        """The address of a variable."""
        if bits not in (32, 64):
            raise self.make_error("an address needs 32 or 64 bits")
        if not self.is_known_name(sym.name):
            raise self.make_error(f"unknown name {sym.name}")
        start = self.frame.symbol_expression("symbol", sym.name)
        return f"({start} + {sym.offset & (1 << 64) - 1:#x}ull)"

    @staticmethod
    def _typed_expression(bits: str, t: PtxType) -> str:
        if t.name in ("f32", "f64"):
            return f"as_{t.name}({bits})"
        return f"((int{t.bits}_t)({bits}))" if t.kind == "s" else f"({bits})"

    def arg(self, n: int, t: PtxType | None = None) -> str:
        """Operand n as type t, the instruction's by default."""
        return self.operand_expression(self.require_operand(n), t or self.type)

    def assignment(self, arg: Operand | None, t: PtxType, value: str) -> str:
        """A statement that writes a value of type t (f16 and packed: its bits) to a destination."""
        if isinstance(arg, DestinationPair):
            arg = arg.first
        if arg is None:
            return ""
        if not isinstance(arg, Reg):
            raise self.make_error("this operand cannot be written")
        if arg.bits < t.bits or (t.bits == 1 != arg.bits):
            raise self.make_error(f"{arg.name} has {arg.bits} bits, .{t.name} has {t.bits}")
        real = arg.index in self.frame.real
        if t.name in ("f32", "f64"):
            if real and arg.bits == t.bits:
                return f"r{arg.index} = {value};"
            value = f"as_u{t.bits}({value})"
        inner = f"(int{t.bits}_t)" if t.kind == "s" else f"({unsigned_c_type(t.bits)})"
        bits = f"({unsigned_c_type(arg.bits)}){inner}({value})"
        return f"r{arg.index} = {f'as_f{arg.bits}({bits})' if real else bits};"

    def result_assignment(self, value: str, t: PtxType | None = None) -> str:
        """A statement that writes the destination."""
        return self.assignment(self.i.args[0], t or self.type, value)


Emit = Callable[[OperandWriter], str]
