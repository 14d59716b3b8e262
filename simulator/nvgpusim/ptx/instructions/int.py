"""Integer, bit and move instructions (PTX ISA 9.7.1, 9.7.2, 9.7.8, 9.7.9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..state import CONTAINER, State
from .floats import Value
from .lower import TYPES, U32, Op, Read, Site, Type, Write

_U8, _U16, _U32, _U64 = CONTAINER[8], CONTAINER[16], CONTAINER[32], CONTAINER[64]
_WIDE = {16: 32, 32: 64}


def _unsigned(t: Type) -> Type:
    return TYPES[f"u{t.bits}"]


def twice(t: Type) -> Type:
    """The integer type of double width."""
    return TYPES[f"{t.kind}{_WIDE[t.bits]}"]


def mul_high(a: Value, b: Value, t: Type) -> Value:
    """Upper half of the product."""
    if t.bits < 64:
        wide = twice(t)
        product = a.astype(wide.dt) * b.astype(wide.dt)
        return (product >> wide.dt.type(t.bits)).astype(t.dt)
    ua, ub = a.view(_U64), b.view(_U64)
    low, s32 = np.uint64(0xFFFFFFFF), np.uint64(32)
    al, ah, bl, bh = ua & low, ua >> s32, ub & low, ub >> s32
    mid = ah * bl + ((al * bl) >> s32)
    mid2 = al * bh + (mid & low)
    high = ah * bh + (mid >> s32) + (mid2 >> s32)
    if t.kind == "s":
        high = high - np.where(a < 0, ub, np.uint64(0)) - np.where(b < 0, ua, np.uint64(0))
    return high.view(t.dt)


def divide(a: Value, b: Value, t: Type) -> tuple[Value, Value]:
    """Quotient and remainder, truncated toward zero.

    x / 0 and x % 0 are "unspecified" in PTX; the code that NVIDIA's compiler emits gives all ones
    for both [recorded on an H200].
    """
    one, zero = t.dt.type(1), t.dt.type(0)
    none = b == zero
    safe = np.where(none, one, b)
    if t.kind == "s":
        minus = safe == t.dt.type(-1)
        safe = np.where(minus, one, safe)
        rem = np.fmod(a, safe)
        quo = np.where(minus, -a, (a - rem) // safe)
    else:
        rem = a % safe
        quo = a // safe
    ones = t.dt.type(-1) if t.kind == "s" else np.iinfo(t.dt).max
    return np.where(none, ones, quo).astype(t.dt), np.where(none, ones, rem).astype(t.dt)


def add(site: Site) -> Op:
    """Integer add/sub, with and without carry and saturation."""
    minus = site.i.op in ("sub", "subc")
    if site.has("sat"):

        def saturating(a: Value, b: Value) -> Value:
            wide = a.astype(np.int64) - b.astype(np.int64) if minus else a.astype(np.int64) + b
            return np.clip(wide, -(2**31), 2**31 - 1).astype(np.int32)

        return site.binary(saturating)
    if site.has("cc") or site.i.op in ("addc", "subc"):
        return _carry(site, minus)
    site.only()
    fn: Callable[[Value, Value], Value] = np.subtract if minus else np.add
    return site.binary(fn)


def _carry(site: Site, minus: bool) -> Op:
    t = _unsigned(site.t)
    a, b, put = site.src(1, t), site.src(2, t), site.dst(0, t)
    taken, give = _flag(site)

    def run(st: State) -> None:
        x, y, extra = a(st), b(st), taken(st).astype(t.dt)
        if minus:
            r = x - y - extra
            out = (x < y) | ((x == y) & (extra != 0))
        else:
            r, out = add_with_carry(x, y, extra)
        put(st, r)
        give(st, out)

    return run


def _flag(site: Site) -> tuple[Read, Write]:
    """Reader and writer of the carry flag, as the instruction uses it."""
    flag = site.kernel.carry()
    put = site.write(flag if site.has("cc") else None, U32)
    taken = site.read(flag, U32) if site.i.op.endswith("c") else lambda st: _U32.type(0)
    return taken, lambda st, out: put(st, out.astype(_U32))


def add_with_carry(x: Value, y: Value, extra: Value) -> tuple[Value, Value]:
    """Sum and carry out of unsigned x + y + extra, extra 0 or 1."""
    part = x + y
    r = part + extra
    return r, (part < x) | ((extra != 0) & (r == 0))


def mul(site: Site) -> Op:
    """mul.lo, .hi, .wide of integers."""
    t = site.t
    if site.has("wide"):
        w = twice(t)
        a, b, put = site.src(1), site.src(2), site.dst(0, w)
        return lambda st: put(st, a(st).astype(w.dt) * b(st).astype(w.dt))
    if site.has("hi"):
        return site.binary(lambda x, y: mul_high(x, y, t))
    if not site.has("lo"):
        raise site.error("mul needs .lo, .hi or .wide")
    return site.binary(np.multiply)


def saturated(a: Value, b: Value) -> Value:
    """a + b of int32, clamped to its range."""
    wide = a.astype(np.int64) + b.astype(np.int64)
    return np.clip(wide, -(2**31), 2**31 - 1).astype(np.int32)


def mad(site: Site) -> Op:
    """mad of integers."""
    t = site.t
    if site.has("cc") or site.i.op == "madc":
        return _mad_carry(site)
    if site.has("sat"):
        return site.ternary(lambda x, y, z: saturated(mul_high(x, y, t), z))
    if site.has("wide"):
        w = twice(t)
        a, b, c, put = site.src(1), site.src(2), site.src(3, w), site.dst(0, w)
        return lambda st: put(st, a(st).astype(w.dt) * b(st).astype(w.dt) + c(st))
    if site.has("hi"):
        return site.ternary(lambda x, y, z: mul_high(x, y, t) + z)
    return site.ternary(lambda x, y, z: x * y + z)


def _mad_carry(site: Site) -> Op:
    t, high = site.t, site.has("hi")
    u = _unsigned(t)
    a, b, c, put = site.src(1), site.src(2), site.src(3, u), site.dst(0, u)
    taken, give = _flag(site)

    def run(st: State) -> None:
        x, y = a(st), b(st)
        product = (mul_high(x, y, t) if high else x * y).view(u.dt)
        r, out = add_with_carry(product, c(st), taken(st).astype(u.dt))
        put(st, r)
        give(st, out)

    return run


def dot(site: Site) -> Op:
    """dp4a, dp2a: products of 8-bit parts summed into 32 bits."""
    ta, tb = site.types[0], site.types[1]
    a, b = site.src(1, TYPES["u32"]), site.src(2, TYPES["u32"])
    out = TYPES["s32" if "s" in (ta.kind, tb.kind) else "u32"]
    c, put = site.src(3, out), site.dst(0, out)
    two, high = site.i.op == "dp2a", site.has("hi")

    def part(x: Value, k: int, width: int, kind: str) -> Value:
        narrow = np.dtype(f"{'i' if kind == 's' else 'u'}{width // 8}")
        return (x >> np.uint32(width * k)).astype(narrow).astype(np.int64)

    def run(st: State) -> None:
        x, y = a(st), b(st)
        total = c(st).astype(np.int64)
        for k in range(2 if two else 4):
            other = part(y, k + 2 * high, 8, tb.kind) if two else part(y, k, 8, tb.kind)
            total = total + part(x, k, 16 if two else 8, ta.kind) * other
        put(st, total.astype(_U32).view(out.dt))

    return run


def divrem(site: Site) -> Op:
    """Integer div and rem."""
    t, which = site.t, int(site.i.op == "rem")
    return site.binary(lambda a, b: divide(a, b, t)[which])


def simple(site: Site) -> Op:
    """neg, abs, min, max, sad of integers."""
    op, t = site.i.op, site.t
    if op == "neg":
        return site.unary(np.negative)
    if op == "abs":
        return site.unary(np.abs)
    if op == "sad":
        gap = lambda a, b, c: c + (np.maximum(a, b) - np.minimum(a, b))  # noqa: E731
        return site.ternary(gap)
    if site.has("relu"):
        raise site.error()
    if t.kind == "b":
        raise site.error("min and max need a signed or unsigned type")
    fn: Any = np.minimum if op == "min" else np.maximum
    return site.binary(fn)


def mul24(site: Site) -> Op:
    """mul24, mad24 (.lo, .hi): 24 x 24 bits, 48-bit product."""
    t = site.t
    shift_by = np.int64(16 if site.has("hi") else 0)

    def product(a: Value, b: Value) -> Value:
        def cut(x: Value) -> Value:
            wide = x.astype(np.int64) << np.int64(40)
            return (
                wide >> np.int64(40)
                if t.kind == "s"
                else (wide.view(_U64) >> np.uint64(40)).view(np.int64)
            )

        return ((cut(a) * cut(b)) >> shift_by).astype(_U32).view(t.dt)

    if site.i.op == "mul24":
        return site.binary(product)
    if site.has("sat"):
        return site.ternary(lambda a, b, c: saturated(product(a, b), c))
    return site.ternary(lambda a, b, c: product(a, b) + c)


INT_OPS: dict[str, Callable[[Site], Op]] = {
    "add": add, "sub": add, "addc": add, "subc": add, "mul": mul, "mad": mad, "madc": mad,
    "mul24": mul24, "mad24": mul24, "div": divrem, "rem": divrem, "neg": simple, "abs": simple,
    "min": simple, "max": simple, "sad": simple,
}  # fmt: skip
"""Opcodes that floating-point types share; chosen by the type."""
