"""A plain evaluator of a few PTX instructions, one thread after the other, in Python and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from nvgpusim.ptx.parser.syntax import (
    DestinationPair,
    Imm,
    Instr,
    Kernel,
    NegatedPredicate,
    Reg,
    SpecialRegister,
    Vec,
)

F32, NAN = np.float32, 0x7FFFFFFF
COMPARE = {"lt": lambda x, y: x < y, "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y}


def signed(x: int, bits: int = 32) -> int:
    """A word as a signed number."""
    return x - (1 << bits) if x >> bits - 1 else x


def real(bits: int) -> Any:
    """A word as a float."""
    return np.uint32(bits & 0xFFFFFFFF).view(F32)


def bits_of(value: Any) -> int:
    """A float as a word, with the GPU's NaN."""
    return NAN if np.isnan(value) else int(F32(value).view(np.uint32))


def flush(value: Any) -> Any:
    """A subnormal as a zero of its sign."""
    return F32(np.copysign(F32(0), value)) if abs(value) < np.finfo(F32).tiny else value


def larger(x: Any, y: Any) -> Any:
    """max.f32: a NaN loses, -0 is below 0."""
    if np.isnan(x) or np.isnan(y):
        return y if np.isnan(x) else x
    return (x if np.signbit(y) else y) if x == y == 0 else max(x, y)


class Thread:
    """One thread: its registers, its local memory, what it may read and what it has written."""

    def __init__(self, kernel: Kernel, special: dict[str, int], memory: Any) -> None:
        self.kernel, self.special, self.memory = kernel, special, memory
        self.regs = [0] * len(kernel.regs)
        self.local: dict[int, int] = {}
        self.stored: dict[int, int] = {}

    def read(self, arg: Any, bits: int = 32) -> int:
        """An operand, unsigned."""
        match arg:
            case Reg():
                return self.regs[arg.index] & (1 << bits) - 1
            case NegatedPredicate():
                return 1 - self.regs[arg.reg.index]
            case SpecialRegister():
                return self.special[arg.name]
        assert isinstance(arg, Imm)
        return int(arg.value) & (1 << bits) - 1

    def write(self, arg: Any, value: int) -> None:
        """A register, or the first of a pair."""
        if isinstance(arg, DestinationPair):
            arg = arg.first
        if isinstance(arg, Reg):
            self.regs[arg.index] = int(value) & (1 << arg.bits) - 1

    def run(self) -> None:
        """Run to the end."""
        at = 0
        while at < len(self.kernel.instrs):
            instr = self.kernel.instrs[at]
            at += 1
            if instr.guard is not None and self.regs[instr.guard.index] == instr.guard_not:
                continue
            if instr.op == "ret":
                return
            if instr.op == "bra":
                at = self.kernel.labels[instr.args[0].name]  # type: ignore[union-attr]
            else:
                getattr(self, f"op_{instr.op}")(instr, set(instr.mods), instr.args)

    # integers

    def arithmetic(self, i: Instr, m: Any, a: Any) -> None:
        """Sums and products of words."""
        if "f32" in m:
            return self.float_arithmetic(i, m, a)
        wide = "wide" in m
        x, y = (self.read(n, 64 if "u64" in m else 32) for n in a[1:3])
        if wide and "s32" in m:
            x, y = signed(x), signed(y)
        z = self.read(a[3], 64) if len(a) > 3 else 0
        value = {"add": x + y, "sub": x - y, "mul": x * y, "mad": x * y + z}[i.op]
        return self.write(a[0], value)

    op_add = op_sub = op_mul = op_mad = op_fma = arithmetic

    def float_arithmetic(self, i: Instr, m: Any, a: Any) -> None:
        """Sums and products of floats; fma in float64, which holds the product exactly."""
        values = [real(self.read(n)) for n in a[1:]]
        if "ftz" in m:
            values = [flush(v) for v in values]
        x, y = values[:2]
        one = {"add": lambda: x + y, "mul": lambda: x * y, "fma": lambda: fused(x, y, values[2])}
        out = one[i.op]()
        self.write(a[0], bits_of(flush(out) if "ftz" in m else out))

    def op_max(self, i: Instr, m: Any, a: Any) -> None:
        self.write(a[0], bits_of(larger(*(real(self.read(n)) for n in a[1:]))))

    def op_and(self, i: Instr, m: Any, a: Any) -> None:
        bits = 1 if "pred" in m else 32
        self.write(a[0], self.read(a[1], bits) & self.read(a[2], bits))

    def op_xor(self, i: Instr, m: Any, a: Any) -> None:
        self.write(a[0], self.read(a[1]) ^ self.read(a[2]))

    def op_shl(self, i: Instr, m: Any, a: Any) -> None:
        by = self.read(a[2])
        self.write(a[0], self.read(a[1]) << by if by < 32 else 0)

    def op_shr(self, i: Instr, m: Any, a: Any) -> None:
        x, by = self.read(a[1]), min(self.read(a[2]), 32)
        self.write(a[0], (signed(x) if "s32" in m else x) >> by)

    def op_prmt(self, i: Instr, m: Any, a: Any) -> None:
        pair, how, out = self.read(a[1]) | self.read(a[2]) << 32, self.read(a[3]), 0
        for n in range(4):
            byte = pair >> (how >> 4 * n & 7) * 8 & 255
            out |= (255 * (byte >> 7) if how >> 4 * n & 8 else byte) << 8 * n
        self.write(a[0], out)

    def op_fns(self, i: Instr, m: Any, a: Any) -> None:
        x = self.read(a[1])
        self.write(a[0], (x & -x).bit_length() - 1 if x else 0xFFFFFFFF)

    # moves, conversions, comparisons

    def op_mov(self, i: Instr, m: Any, a: Any) -> None:
        if isinstance(a[1], Vec):
            low, high = (self.read(n) for n in a[1].items)
            self.write(a[0], low | high << 32)
        elif isinstance(a[1], Imm) and a[1].kind == "f32":
            self.write(a[0], int(a[1].value))
        else:
            self.write(a[0], self.read(a[1], 64))

    def op_selp(self, i: Instr, m: Any, a: Any) -> None:
        self.write(a[0], self.read(a[1] if self.read(a[3], 1) else a[2], 64))

    def op_cvt(self, i: Instr, m: Any, a: Any) -> None:
        if "f32" not in m:
            self.write(a[0], self.read(a[1]))
        elif "rzi" in m:
            x = float(real(self.read(a[1])))
            self.write(a[0], 0 if np.isnan(x) else int(max(min(x, 2**31 - 1), -(2**31))))
        else:
            self.write(a[0], bits_of(F32(signed(self.read(a[1])))))

    def op_setp(self, i: Instr, m: Any, a: Any) -> None:
        kind = i.mods[0]
        if "f32" in m:
            x, y = (real(self.read(n)) for n in a[1:3])
            odd = bool(np.isnan(x) or np.isnan(y))
            yes = bool(COMPARE[kind[:2]](x, y)) or (kind.endswith("u") and odd)
        else:
            yes = COMPARE[kind](*(signed(self.read(n)) for n in a[1:3]))
        self.write(a[0], yes)
        if isinstance(a[0], DestinationPair):
            self.write(a[0].second, not yes)

    # memory

    def op_ld(self, i: Instr, m: Any, a: Any) -> None:
        place = a[1]
        if "param" in m:
            self.write(a[0], self.special[place.base.name])
        elif "local" in m:
            self.write(a[0], self.local.get(place.offset, 0))
        else:
            self.write(a[0], self.memory[self.read(place.base, 64) + place.offset])

    def op_st(self, i: Instr, m: Any, a: Any) -> None:
        place = a[0]
        if "local" in m:
            self.local[place.offset] = self.read(a[1])
        else:
            self.stored[self.read(place.base, 64) + place.offset] = self.read(a[1])


def fused(x: Any, y: Any, z: Any) -> Any:
    """x * y + z rounded once: the sum in float64 is made odd where it is not exact."""
    product, more = np.float64(x) * np.float64(y), np.float64(z)
    total = product + more
    if not np.isfinite(total):
        return F32(total)
    part = total - product
    left = (product - (total - part)) + (more - part)
    word = int(total.view(np.uint64))
    if left and not word & 1:
        total = np.uint64(word + (1 if (left > 0) == (total > 0) else -1)).view(np.float64)
    return F32(total)
