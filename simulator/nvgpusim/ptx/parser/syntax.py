"""The tree of a PTX module: kernels, variables, instructions, operands, literals."""

from __future__ import annotations

from dataclasses import dataclass, field

_SIZES = {"8": 8, "16": 16, "32": 32, "64": 64, "128": 128}


class PtxError(Exception):
    """The text is not PTX that is known here; the message has line and text."""


@dataclass(frozen=True)
class Reg:
    """A register: its number in the kernel, its width in bits (1: predicate), its name."""

    index: int
    bits: int
    name: str


@dataclass(frozen=True)
class Imm:
    """A literal. `kind`: "int" (value as written), "f32"/"f64" (bits), "float" (decimal)."""

    value: int | float
    kind: str


@dataclass(frozen=True)
class SpecialRegister:
    """A read-only register such as `%tid.x`."""

    name: str


@dataclass(frozen=True)
class SymbolAddress:
    """The address of a variable (or a label), plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Addr:
    """`[base + offset]`."""

    base: Reg | SymbolAddress | Imm
    offset: int


@dataclass(frozen=True)
class Vec:
    """`{a, b, ...}`; None stands for the sink `_`."""

    items: tuple[Operand | None, ...]


@dataclass(frozen=True)
class NegatedPredicate:
    """`!p`."""

    reg: Reg


@dataclass(frozen=True)
class DestinationPair:
    """`p|q`: two destinations."""

    first: Operand | None
    second: Operand | None


Operand = (
    Reg | Imm | SpecialRegister | SymbolAddress | Addr | Vec | NegatedPredicate | DestinationPair
)


def register_numbers(operand: Operand | None) -> list[int]:
    """Return the numbers of the registers that an operand names."""
    match operand:
        case Reg():
            return [operand.index]
        case NegatedPredicate():
            return [operand.reg.index]
        case Addr():
            return register_numbers(operand.base)
        case Vec():
            return [r for item in operand.items for r in register_numbers(item)]
        case DestinationPair():
            return register_numbers(operand.first) + register_numbers(operand.second)
    return []


@dataclass(frozen=True)
class Instr:
    """One instruction: opcode, modifiers, operands (None: the sink `_`), guard, place."""

    op: str
    mods: tuple[str, ...]
    args: tuple[Operand | None, ...]
    guard: Reg | None
    guard_not: bool
    line: int
    text: str
    source: tuple[str, int] | None = None  # .loc: file, line


@dataclass
class Variable:
    """A variable of a state space; `data` is its initial content (zeros if none given).

    `references`: at which byte the address of which variable or function is added to how much.
    """

    name: str
    space: str
    size: int
    align: int
    data: bytes = b""
    offset: int = 0
    references: list[tuple[int, str, int]] = field(default_factory=list)


@dataclass
class Kernel:
    """An entry function. `refusal`: why it cannot be read, "" if it can."""

    name: str
    params: dict[str, Variable] = field(default_factory=dict)
    param_bytes: int = 0
    variables: dict[str, Variable] = field(default_factory=dict)
    instrs: list[Instr] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    regs: list[Reg] = field(default_factory=list)
    tables: dict[str, list[str]] = field(default_factory=dict)
    max_threads: int = 1024
    refusal: str = ""
    slots: dict[tuple[str, int], Reg] = field(default_factory=dict)
    flag: Reg | None = None

    def call_parameter_register(self, name: str, offset: int, bits: int) -> Reg:
        """The register that holds a call's parameter bytes at `offset`."""
        if (name, offset) not in self.slots:
            reg = Reg(len(self.regs), bits, f"{name}+{offset}")
            self.regs.append(reg)
            self.slots[name, offset] = reg
        return self.slots[name, offset]

    def carry_register(self) -> Reg:
        """The carry flag of .cc, which no instruction names."""
        if self.flag is None:
            self.flag = Reg(len(self.regs), 32, "%carry")
            self.regs.append(self.flag)
        return self.flag


@dataclass
class PtxModule:
    """A translation unit: target, entries by name, module-scope variables, names of functions."""

    version: str = ""
    target: str = ""
    kernels: dict[str, Kernel] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: list[str] = field(default_factory=list)

    def function_address(self, name: str) -> int:
        """The address of a function, 0 where there is none of that name."""
        return FUNCTIONS + 16 * self.functions.index(name) if name in self.functions else 0


FUNCTIONS = 0x7F0000000000
"""Start of the addresses of functions: nothing else lies there, and nobody reads code."""


def parse_literal(text: str) -> Imm:
    """A PTX literal."""
    if text[:2] in ("0f", "0F"):
        return Imm(int(text[2:], 16), "f32")
    if text[:2] in ("0d", "0D"):
        return Imm(int(text[2:], 16), "f64")
    if "." in text or (text[:2].lower() != "0x" and "e" in text.lower()):
        return Imm(float(text), "float")
    digits = text.rstrip("U")
    if digits[:2].lower() in ("0x", "0b"):
        return Imm(int(digits, 0), "int")
    return Imm(int(digits, 8 if len(digits) > 1 and digits[0] == "0" else 10), "int")


def type_bits(name: str) -> int:
    """Width of a type's name without the dot: "u32" 32, "pred" 1, "f16x2" 32, "tf32" 32."""
    if name == "pred":
        return 1
    if name in ("f16x2", "bf16x2", "tf32"):
        return 32
    digits = name.lstrip("abdefistu")
    if digits not in _SIZES:
        raise PtxError(f"unknown type .{name}")
    return _SIZES[digits]
