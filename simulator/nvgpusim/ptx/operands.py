"""The base of all tables of instructions: types, operands, literals, special registers."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from .parser.syntax import Imm, Instr, Kernel, Operand, PtxError, PtxModule, Vec

Value = Any
"""A numpy array of lanes, or a scalar that all have."""
CONTAINER = {
    1: np.dtype(np.bool_),
    8: np.dtype(np.uint8),
    16: np.dtype(np.uint16),
    32: np.dtype(np.uint32),
    64: np.dtype(np.uint64),
}
"""numpy type that keeps a register of so many bits."""


class PtxType(NamedTuple):
    """A PTX type: name, bits, numpy dtype of one lane, kind (u, s, f, b, p, x: packed or bf16)."""

    name: str
    bits: int
    dt: np.dtype[Any]
    kind: str


def _make_types() -> dict[str, PtxType]:
    out = {"pred": PtxType("pred", 1, CONTAINER[1], "p")}
    for bits in (8, 16, 32, 64):
        out[f"u{bits}"] = PtxType(f"u{bits}", bits, CONTAINER[bits], "u")
        out[f"b{bits}"] = PtxType(f"b{bits}", bits, CONTAINER[bits], "b")
        out[f"s{bits}"] = PtxType(f"s{bits}", bits, np.dtype(f"i{bits // 8}"), "s")
    for bits in (16, 32, 64):
        out[f"f{bits}"] = PtxType(f"f{bits}", bits, np.dtype(f"f{bits // 8}"), "f")
    out["bf16"] = PtxType("bf16", 16, CONTAINER[16], "x")
    for name in ("f16x2", "bf16x2", "tf32"):
        out[name] = PtxType(name, 32, CONTAINER[32], "x")
    return out


TYPES = _make_types()
U32, U64, PRED = TYPES["u32"], TYPES["u64"], TYPES["pred"]


class InstructionInKernel:
    """One instruction and what it says of itself."""

    def __init__(self, instr: Instr, kernel: Kernel, module: PtxModule) -> None:
        self.i, self.kernel, self.module = instr, kernel, module
        self.mods = instr.mods
        self.types = [TYPES[m] for m in instr.mods if m in TYPES]

    def make_error(self, why: str = "this form is not supported") -> PtxError:
        """The error that stops an instruction nobody has taught us."""
        return PtxError(
            f"PTX line {self.i.line}: {why}: {self.i.text!r} (kernel {self.kernel.name})"
        )

    def has_modifier(self, *mods: str) -> bool:
        """True if one of the modifiers is there."""
        return any(m in self.mods for m in mods)

    def refuse_other_modifiers(self, *known: str) -> None:
        """Refuse modifiers that the caller does not implement."""
        for m in self.mods:
            if m not in known and m not in TYPES:
                raise self.make_error(f"unknown modifier .{m}")

    @property
    def type(self) -> PtxType:
        """The instruction's (last) type."""
        if not self.types:
            raise self.make_error("no type")
        return self.types[-1]

    def require_operand(self, n: int) -> Operand:
        """Operand n, which must be there."""
        if n >= len(self.i.args) or (arg := self.i.args[n]) is None:
            raise self.make_error(f"operand {n + 1} is missing")
        return arg

    def operand_items(self, n: int) -> list[Operand | None]:
        """Operand n as a list: a vector's items, or the one operand."""
        arg = self.i.args[n]
        return list(arg.items) if isinstance(arg, Vec) else [arg]

    def integer_literal_or_none(self, n: int) -> int | None:
        """The value of an integer literal operand."""
        arg = self.i.args[n] if n < len(self.i.args) else None
        return int(arg.value) if isinstance(arg, Imm) and arg.kind == "int" else None

    def is_known_name(self, name: str) -> bool:
        """True if a variable of that name exists."""
        return (
            name in self.kernel.variables
            or name in self.module.variables
            or name in self.kernel.params
            or name in self.module.functions
        )


SPECIALS = {f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"} | {
    "%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid", "%clock", "%clock_hi",
    "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi", "%lanemask_eq",
    "%lanemask_le", "%lanemask_lt", "%lanemask_ge", "%lanemask_gt", "%dynamic_smem_size",
    "%total_smem_size", "%reserved_smem_offset_begin", "%reserved_smem_offset_end",
    "%reserved_smem_offset_cap", "%reserved_smem_offset_0", "%reserved_smem_offset_1",
} | {f"%envreg{n}" for n in range(32)} | {f"%pm{n}" for n in range(8)}  # fmt: skip


def literal_value(arg: Imm, t: PtxType, site: InstructionInKernel) -> Value:
    """A literal as a numpy scalar of type t."""
    if arg.kind == "f32":
        bits = int(arg.value)
        if t.bits == 32:
            return np.uint32(bits).view(t.dt)
        if t.name == "f64":
            return np.float64(np.uint32(bits).view(np.float32))
        raise site.make_error(f"a 0f literal is no .{t.name}")
    if arg.kind == "f64" or arg.kind == "float":
        value = float(arg.value)
        if arg.kind == "f64":
            (value,) = struct.unpack("<d", int(arg.value).to_bytes(8, "little"))
        if t.kind == "f":
            return t.dt.type(value)
        if t.bits == 64:
            return np.float64(value).view(t.dt)
        raise site.make_error(f"a floating-point literal is no .{t.name}")
    if t.kind == "p":
        return np.bool_(arg.value != 0)
    bits = int(arg.value) & (1 << t.bits) - 1
    if t.name in ("f32", "f64"):
        return t.dt.type(arg.value)
    return CONTAINER[t.bits].type(bits).view(t.dt)


SPACES = ("global", "shared", "local", "const", "param")
HINTS = (
    "weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "sc", "cta", "cluster", "gpu",
    "sys", "nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first", "L1::evict_last", "L1::no_allocate", "L2::64B", "L2::128B", "L2::256B",
    "L2::cache_hint", "v2", "v4", "v8", "shared::cta",
)  # fmt: skip
"""Modifiers of accesses that change nothing here."""


def state_space(site: InstructionInKernel) -> str:
    """State space named by the modifiers, "generic" without one."""
    if site.has_modifier("shared::cta"):
        return "shared"
    return next((m for m in site.mods if m in SPACES), "generic")
