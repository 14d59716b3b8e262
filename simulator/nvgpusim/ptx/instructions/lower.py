"""Instructions to closures: the frame that all operation tables share.

A lowered instruction is a function of the running `State`. A table entry receives a `Site` (the
instruction and how to read and write its operands) and returns that function.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..parser.syntax import (
    Addr,
    Imm,
    Instr,
    Kernel,
    Module,
    Neg,
    Operand,
    Pair,
    PtxError,
    Reg,
    Special,
    Sym,
    Vec,
)
from ..state import CONTAINER, State
from .floats import Value

Op = Callable[[State], None]
Read = Callable[[State], Value]
Write = Callable[[State, Value], None]


class Type(NamedTuple):
    """A PTX type: name, bits, numpy dtype of one lane, kind (u, s, f, b, p, x: packed or bf16)."""

    name: str
    bits: int
    dt: np.dtype[Any]
    kind: str


def _types() -> dict[str, Type]:
    out = {"pred": Type("pred", 1, CONTAINER[1], "p")}
    for bits in (8, 16, 32, 64):
        out[f"u{bits}"] = Type(f"u{bits}", bits, CONTAINER[bits], "u")
        out[f"b{bits}"] = Type(f"b{bits}", bits, CONTAINER[bits], "b")
        out[f"s{bits}"] = Type(f"s{bits}", bits, np.dtype(f"i{bits // 8}"), "s")
    for bits in (16, 32, 64):
        out[f"f{bits}"] = Type(f"f{bits}", bits, np.dtype(f"f{bits // 8}"), "f")
    out["bf16"] = Type("bf16", 16, CONTAINER[16], "x")
    for name in ("f16x2", "bf16x2", "tf32"):
        out[name] = Type(name, 32, CONTAINER[32], "x")
    return out


TYPES = _types()
U32, U64, PRED = TYPES["u32"], TYPES["u64"], TYPES["pred"]


class Site:
    """One instruction being lowered."""

    def __init__(self, instr: Instr, kernel: Kernel, module: Module) -> None:
        self.i, self.kernel, self.module = instr, kernel, module
        self.mods = instr.mods
        self.types = [TYPES[m] for m in instr.mods if m in TYPES]

    def error(self, why: str = "this form is not supported") -> PtxError:
        """The error that stops an instruction nobody has taught us."""
        return PtxError(
            f"PTX line {self.i.line}: {why}: {self.i.text!r} (kernel {self.kernel.name})"
        )

    def has(self, *mods: str) -> bool:
        """True if one of the modifiers is there."""
        return any(m in self.mods for m in mods)

    def only(self, *known: str) -> None:
        """Refuse modifiers that the caller does not implement."""
        for m in self.mods:
            if m not in known and m not in TYPES:
                raise self.error(f"unknown modifier .{m}")

    @property
    def t(self) -> Type:
        """The instruction's (last) type."""
        if not self.types:
            raise self.error("no type")
        return self.types[-1]

    def arg(self, n: int) -> Operand:
        """Operand n, which must be there."""
        if n >= len(self.i.args) or (arg := self.i.args[n]) is None:
            raise self.error(f"operand {n + 1} is missing")
        return arg

    def items(self, n: int) -> list[Operand | None]:
        """Operand n as a list: a vector's items, or the one operand."""
        arg = self.i.args[n]
        return list(arg.items) if isinstance(arg, Vec) else [arg]

    def constant(self, n: int) -> int | None:
        """The value of an integer literal operand."""
        arg = self.i.args[n] if n < len(self.i.args) else None
        return int(arg.value) if isinstance(arg, Imm) and arg.kind == "int" else None

    # reading

    def src(self, n: int, t: Type | None = None) -> Read:
        """Operand n as type t (the instruction's by default), active lanes only."""
        return self.read(self.arg(n), t or self.t)

    def read(self, arg: Operand | None, t: Type) -> Read:
        """Any operand as type t."""
        if isinstance(arg, Reg):
            return self._register(arg, t)
        if isinstance(arg, Neg):
            inner = self._register(arg.reg, PRED)
            return lambda st: ~inner(st)
        if isinstance(arg, Imm):
            value = literal(arg, t, self)
            return lambda st: value
        if isinstance(arg, Special):
            return self._special(arg.name, t)
        if isinstance(arg, Sym):
            return self._symbol(arg, t)
        raise self.error("this operand cannot be read")

    def _register(self, reg: Reg, t: Type) -> Read:
        index, dt = reg.index, t.dt
        if reg.bits == t.bits:

            def plain(st: State) -> Value:
                v = st.R[index]
                if v.dtype is not dt:
                    v = v.view(dt)
                return v if st.m is None or v.ndim == 0 else v[st.m]

            return plain
        if reg.bits < t.bits or reg.bits == 1 or t.bits == 1:
            raise self.error(f"{reg.name} has {reg.bits} bits, .{t.name} needs {t.bits}")
        raw = self._register(reg, TYPES[f"u{reg.bits}"])
        part = CONTAINER[t.bits]
        return lambda st: raw(st).astype(part).view(dt)

    def _special(self, name: str, t: Type) -> Read:
        if name not in SPECIALS:
            raise self.error(f"unknown special register {name}")
        dt = t.dt

        def read(st: State) -> Value:
            v = st.special.get(name)
            if v is None:
                v = st.launch.special(name, st)
            v = v.astype(CONTAINER[t.bits]) if v.dtype.itemsize != dt.itemsize else v
            v = v.view(dt)
            return v if st.m is None or v.ndim == 0 else v[st.m]

        return read

    def _symbol(self, sym: Sym, t: Type) -> Read:
        if t.bits not in (32, 64):
            raise self.error("an address needs 32 or 64 bits")
        if not self.known(sym.name):
            raise self.error(f"unknown name {sym.name}")
        kind = CONTAINER[t.bits].type
        mask = (1 << t.bits) - 1
        name, offset, dt = sym.name, sym.offset, t.dt
        return lambda st: kind((st.launch.symbol(name) + offset) & mask).view(dt)

    def known(self, name: str) -> bool:
        """True if a variable of that name exists."""
        return (
            name in self.kernel.variables
            or name in self.module.variables
            or name in self.kernel.params
            or name in self.module.functions
        )

    # writing

    def dst(self, n: int = 0, t: Type | None = None) -> Write:
        """Writer of operand n; the value has type t, which is widened to the register."""
        return self.write(self.i.args[n], t or self.t)

    def write(self, arg: Operand | None, t: Type) -> Write:
        """Writer of any destination."""
        if arg is None:
            return lambda st, v: None
        if isinstance(arg, Pair):
            return self.write(arg.first, t)
        if not isinstance(arg, Reg):
            raise self.error("this operand cannot be written")
        index = arg.index
        if arg.bits == t.bits:

            def plain(st: State, v: Value) -> None:
                if st.m is None:
                    st.R[index] = v
                else:
                    st.put(index, v)

            return plain
        if arg.bits < t.bits or t.bits == 1:
            raise self.error(f"{arg.name} has {arg.bits} bits, .{t.name} has {t.bits}")
        container = CONTAINER[arg.bits]
        if t.kind in "fx":  # bits, zero-extended
            narrow = CONTAINER[t.bits]
            return lambda st, v: st.put(index, v.view(narrow).astype(container))
        return lambda st, v: st.put(index, v.astype(container))

    # common shapes

    def unary(
        self, fn: Callable[[Value], Value], t: Type | None = None, to: Type | None = None
    ) -> Op:
        """d = fn(a)."""
        a, put = self.src(1, t), self.dst(0, to or t)
        return lambda st: put(st, fn(a(st)))

    def binary(
        self, fn: Callable[[Value, Value], Value], t: Type | None = None, to: Type | None = None
    ) -> Op:
        """d = fn(a, b)."""
        a, b, put = self.src(1, t), self.src(2, t), self.dst(0, to or t)
        return lambda st: put(st, fn(a(st), b(st)))

    def ternary(
        self,
        fn: Callable[[Value, Value, Value], Value],
        t: Type | None = None,
        to: Type | None = None,
    ) -> Op:
        """d = fn(a, b, c)."""
        a, b, c, put = self.src(1, t), self.src(2, t), self.src(3, t), self.dst(0, to or t)
        return lambda st: put(st, fn(a(st), b(st), c(st)))

    def address(self, n: int) -> tuple[Read, Sym | None]:
        """Byte address of operand n as u64 values, and the symbol it starts from, if any."""
        arg = self.arg(n)
        if not isinstance(arg, Addr):
            raise self.error(f"operand {n + 1} must be an address")
        if isinstance(arg.base, Sym):
            return self.read(Sym(arg.base.name, arg.offset), U64), arg.base
        if isinstance(arg.base, Imm):
            fixed = np.uint64((int(arg.base.value) + arg.offset) & (1 << 64) - 1)
            return (lambda st: fixed), None
        base = self.read(arg.base, TYPES[f"u{arg.base.bits}"])
        if arg.offset == 0:
            if arg.base.bits == 64:
                return base, None
            return (lambda st: base(st).astype(np.uint64)), None
        width = CONTAINER[arg.base.bits].type
        offset = width(arg.offset & (1 << arg.base.bits) - 1)
        return (lambda st: (base(st) + offset).astype(np.uint64, copy=False)), None


SPECIALS = {f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"} | {
    "%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid", "%clock", "%clock_hi",
    "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi", "%lanemask_eq",
    "%lanemask_le", "%lanemask_lt", "%lanemask_ge", "%lanemask_gt", "%dynamic_smem_size",
    "%total_smem_size", "%reserved_smem_offset_begin", "%reserved_smem_offset_end",
    "%reserved_smem_offset_cap", "%reserved_smem_offset_0", "%reserved_smem_offset_1",
} | {f"%envreg{n}" for n in range(32)} | {f"%pm{n}" for n in range(8)}  # fmt: skip


def literal(arg: Imm, t: Type, site: Site) -> Value:
    """A literal as a numpy scalar of type t."""
    if arg.kind == "f32":
        bits = int(arg.value)
        if t.bits == 32:
            return np.uint32(bits).view(t.dt)
        if t.name == "f64":
            return np.float64(np.uint32(bits).view(np.float32))
        raise site.error(f"a 0f literal is no .{t.name}")
    if arg.kind == "f64" or arg.kind == "float":
        value = float(arg.value) if arg.kind == "float" else _double(int(arg.value))
        if t.kind == "f":
            return t.dt.type(value)
        if t.bits == 64:
            return np.float64(value).view(t.dt)
        raise site.error(f"a floating-point literal is no .{t.name}")
    if t.kind == "p":
        return np.bool_(arg.value != 0)
    bits = int(arg.value) & (1 << t.bits) - 1
    if t.name in ("f32", "f64"):
        return t.dt.type(arg.value)
    return CONTAINER[t.bits].type(bits).view(t.dt)


def _double(bits: int) -> float:
    value: float = struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    return value
