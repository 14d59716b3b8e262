"""Bit, shift and move instructions (PTX ISA 9.7.8, 9.7.9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..parser.syntax import Imm, Pair, Vec
from ..state import CONTAINER, State
from .floats import Value, flush
from .int import dot
from .lower import PRED, TYPES, U32, Op, Site, Type

_U32, _U64 = CONTAINER[32], CONTAINER[64]


def _unsigned(t: Type) -> Type:
    return TYPES[f"u{t.bits}"]


def shift(site: Site) -> Op:
    """shl, shr: amounts at or over the width give 0 or the sign."""
    t, left = site.t, site.i.op == "shl"
    dt, bits = t.dt, t.bits
    a, put = site.src(1), site.dst(0)
    known = site.constant(2)
    if known is not None:
        known &= 0xFFFFFFFF
        if known >= bits:
            if t.kind == "s" and not left:
                known = bits - 1
            else:
                return lambda st: put(st, a(st) * dt.type(0))
        by = dt.type(known)
        if left:
            return lambda st: put(st, a(st) << by)
        return lambda st: put(st, a(st) >> by)
    b = site.src(2, U32)
    limit = np.uint32(bits - 1)

    def run(st: State) -> None:
        x, y = a(st), b(st)
        amount = np.minimum(y, limit).astype(dt)
        if left:
            r = x << amount
        else:
            r = x >> amount
            if t.kind == "s":
                put(st, r)
                return
        put(st, np.where(y > limit, dt.type(0), r))

    return run


def funnel(site: Site) -> Op:
    """shf.l/.r .wrap/.clamp: shift of the 64-bit pair {b, a}."""
    left, clamp = site.has("l"), site.has("clamp")
    a, b, c, put = site.src(1, U32), site.src(2, U32), site.src(3, U32), site.dst(0, U32)

    def run(st: State) -> None:
        by = np.minimum(c(st), np.uint32(32)) if clamp else c(st) & np.uint32(31)
        pair = (b(st).astype(_U64) << np.uint64(32)) | a(st)
        wide = by.astype(_U64)
        r = (pair << wide) >> np.uint64(32) if left else pair >> wide
        put(st, r.astype(_U32))

    return run


def logic(site: Site) -> Op:
    """and, or, xor, not, cnot on bits and predicates."""
    t = site.t
    op = site.i.op
    if op == "not":
        return site.unary(np.invert)
    if op == "cnot":
        return site.unary(lambda x: (x == 0).astype(t.dt))
    fn: Any = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op]
    return site.binary(fn)


def lop3(site: Site) -> Op:
    """Any function of three bits, by its table."""
    table = site.constant(4)
    if table is None:
        raise site.error("the table must be a literal")

    def run(x: Value, y: Value, z: Value) -> Value:
        r = np.uint32(0)
        for row in range(8):
            if table >> row & 1:
                term = x if row & 4 else ~x
                term = term & (y if row & 2 else ~y)
                r = r | (term & (z if row & 1 else ~z))
        return r

    site.only("and", "or")
    d, kind = site.i.args[0], next((m for m in site.mods if m in ("and", "or")), None)
    if kind is None:
        if isinstance(d, Pair):
            raise site.error("a predicate needs .and or .or")
        return site.ternary(run, U32)
    if not isinstance(d, Pair):
        raise site.error("two destinations are needed")
    x, y, z, q = (*(site.src(n, U32) for n in (1, 2, 3)), site.src(5, PRED))
    put, put_test = site.write(d.first, U32), site.write(d.second, PRED)
    combine = np.logical_or if kind == "or" else np.logical_and

    def both(st: State) -> None:
        value = run(x(st), y(st), z(st))
        test = combine(value != 0, q(st))
        put(st, value)
        put_test(st, test)

    return both


def popcount(x: Value) -> Value:
    """Number of ones, as u32."""
    x = x.astype(_U64)
    x = x - ((x >> np.uint64(1)) & np.uint64(0x5555555555555555))
    m = np.uint64(0x3333333333333333)
    x = (x & m) + ((x >> np.uint64(2)) & m)
    x = (x + (x >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return ((x * np.uint64(0x0101010101010101)) >> np.uint64(56)).astype(_U32)


def highest(x: Value) -> Value:
    """Index of the highest one, 0xFFFFFFFF for 0, as u32."""
    x = x.astype(_U64)
    for by in (1, 2, 4, 8, 16, 32):
        x = x | (x >> np.uint64(by))
    return popcount(x) - np.uint32(1)


def reverse(x: Value, bits: int) -> Value:
    """Bits in opposite order."""
    x = x.astype(_U64)
    pairs = (
        (1, 0x5555555555555555), (2, 0x3333333333333333), (4, 0x0F0F0F0F0F0F0F0F),
        (8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF),
    )  # fmt: skip
    for by, mask in pairs:
        s, m = np.uint64(by), np.uint64(mask)
        x = ((x >> s) & m) | ((x & m) << s)
    x = (x >> np.uint64(32)) | (x << np.uint64(32))
    return (x >> np.uint64(64 - bits)).astype(CONTAINER[bits])


def count(site: Site) -> Op:
    """popc, clz, brev, bfind."""
    t = site.t
    u, op = _unsigned(t), site.i.op
    if op == "popc":
        return site.unary(popcount, u, U32)
    if op == "brev":
        return site.unary(lambda x: reverse(x, t.bits), u)
    if op == "clz":
        return site.unary(lambda x: np.uint32(t.bits - 1) - highest(x), u, U32)
    amount = site.has("shiftamt")

    def bfind(x: Value) -> Value:
        v = np.where(x < 0, ~x, x).view(u.dt) if t.kind == "s" else x
        r = highest(v)
        return np.where(r == 0xFFFFFFFF, r, np.uint32(t.bits - 1) - r) if amount else r

    return site.unary(bfind, t, U32)


_FIELD = {32: np.uint32(0xFF), 64: np.uint32(0xFFFFFFFF)}
"""Bits of position and length that count: PTX says eight; the 64-bit forms, which the compiler
builds from shifts, take all [recorded on an H200]."""


def bfe(site: Site) -> Op:
    """Bit-field extract; beyond the top it repeats the sign (s) or zero (u)."""
    t = site.t
    a, b, c, put = site.src(1), site.src(2, U32), site.src(3, U32), site.dst()
    u = _unsigned(t).dt
    field = _FIELD[t.bits]

    def run(st: State) -> None:
        x = a(st)
        pos, length = (b(st) & field).astype(np.int64), (c(st) & field).astype(np.int64)
        fill = np.where(x < 0, -1, 0) if t.kind == "s" else np.int64(0) * x.astype(np.int64)
        # the sign of the field is bit min(pos + len - 1, msb) of x
        top = np.minimum(pos + length - 1, t.bits - 1)
        inside = pos < t.bits
        shifted = np.where(inside, x >> np.minimum(pos, t.bits - 1).astype(t.dt), fill.astype(t.dt))
        bit = (x.view(u) >> np.maximum(top, 0).astype(u)) & u.type(1)
        keep = np.minimum(length, t.bits)
        mask = np.where(
            keep >= t.bits,
            ~u.type(0),
            (u.type(1) << np.minimum(keep, t.bits - 1).astype(u)) - u.type(1),
        )
        r = shifted.astype(t.dt).view(u) & mask
        if t.kind == "s":
            r = np.where((bit != 0) & (length > 0), r | ~mask, r)
        put(st, r.astype(u, copy=False).view(t.dt))

    return run


def bfi(site: Site) -> Op:
    """Bit-field insert."""
    t = site.t
    u = _unsigned(t).dt
    a, b, put = site.src(1), site.src(2), site.dst()
    c, d = site.src(3, U32), site.src(4, U32)
    bits = t.bits
    field = _FIELD[bits]

    def run(st: State) -> None:
        pos, length = c(st) & field, d(st) & field
        short = np.minimum(length, np.uint32(bits - 1)).astype(u)
        mask = np.where(length >= bits, ~u.type(0), (u.type(1) << short) - u.type(1))
        by = np.minimum(pos, np.uint32(bits - 1)).astype(u)
        mask = np.where(pos >= bits, u.type(0), mask << by)
        put(st, ((a(st) << by) & mask) | (b(st) & ~mask))

    return run


def bmsk(site: Site) -> Op:
    """Mask of `b` ones from bit `a` (clamp or wrap)."""
    wrap = site.has("wrap")

    def run(a: Value, b: Value) -> Value:
        a, b = (a & np.uint32(31), b & np.uint32(31)) if wrap else (a, b)
        ones = np.where(
            b >= 32,
            np.uint64(0xFFFFFFFF),
            (np.uint64(1) << np.minimum(b, np.uint32(31)).astype(_U64)) - np.uint64(1),
        )
        moved = np.where(a >= 32, np.uint64(0), ones << np.minimum(a, np.uint32(31)).astype(_U64))
        return moved.astype(_U32)

    return site.binary(run, U32)


def prmt(site: Site) -> Op:
    """Pick four bytes of the pair {b, a}; the nibble's top bit repeats the byte's sign."""
    a, b, c, put = site.src(1, U32), site.src(2, U32), site.src(3, U32), site.dst(0, U32)
    mode = next((m for m in site.mods if m in _PRMT), "")

    def run(st: State) -> None:
        pair = (b(st).astype(_U64) << np.uint64(32)) | a(st)
        control = c(st)
        r: Value = np.uint32(0)
        for k in range(4):
            nibble = (
                _PRMT[mode](control & np.uint32(3), k)
                if mode
                else control >> np.uint32(4 * k) & np.uint32(15)
            )
            by = (nibble & np.uint32(7)).astype(_U64) << np.uint64(3)
            byte = ((pair >> by) & np.uint64(255)).astype(_U32)
            sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
            r = r | (np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * k))
        put(st, r.astype(_U32))

    return run


def _edge(n: Value, k: int, low: bool) -> Value:
    return np.maximum(n, np.uint32(k)) if low else np.minimum(n, np.uint32(k))


_PRMT: dict[str, Callable[[Value, int], Value]] = {
    "f4e": lambda n, k: n + np.uint32(k),
    "b4e": lambda n, k: (n - np.uint32(k)) & np.uint32(7),
    "rc8": lambda n, k: n,
    "ecl": lambda n, k: _edge(n, k, True),
    "ecr": lambda n, k: _edge(n, k, False),
    "rc16": lambda n, k: (n & np.uint32(1)) * np.uint32(2) + np.uint32(k & 1),
}


def mov(site: Site) -> Op:
    """mov: scalars, packing and unpacking."""
    site.only()
    t = site.t
    d, s = site.i.args[0], site.i.args[1]
    if isinstance(s, Vec):
        part = t.bits // len(s.items)
        kind = TYPES[f"u{part}"]
        reads = [site.read(item, kind) for item in s.items]
        put, wide = site.dst(), CONTAINER[t.bits]

        def pack(st: State) -> None:
            value = reads[0](st).astype(wide)
            for k, read in enumerate(reads[1:], 1):
                value = value | (read(st).astype(wide) << wide.type(part * k))
            put(st, value)

        return pack
    if isinstance(d, Vec):
        part = t.bits // len(d.items)
        kind = TYPES[f"u{part}"]
        puts = [site.write(item, kind) for item in d.items]
        a, wide = site.src(1, _unsigned(t)), CONTAINER[t.bits]

        def unpack(st: State) -> None:
            value = a(st)
            for k, put in enumerate(puts):
                put(st, (value >> wide.type(part * k)).astype(kind.dt))

        return unpack
    if isinstance(s, Imm) and t.kind == "f" and s.kind == "int":
        t = TYPES[f"u{t.bits}"]  # mov.f16 %h, 0x3C00: bits
    a, put = site.src(1, t), site.dst(0, t)
    return lambda st: put(st, a(st))


def selp(site: Site) -> Op:
    """d = p ? a : b."""
    t = site.t
    a, b, p, put = site.src(1), site.src(2), site.src(3, PRED), site.dst(0, t)
    return lambda st: put(st, np.where(p(st), a(st), b(st)))


def slct(site: Site) -> Op:
    """d = c >= 0 ? a : b."""
    t, tc = site.types
    a, b, c, put = site.src(1, t), site.src(2, t), site.src(3, tc), site.dst(0, t)
    if site.has("ftz"):
        return lambda st: put(st, np.where(flush(c(st)) >= 0, a(st), b(st)))
    return lambda st: put(st, np.where(c(st) >= 0, a(st), b(st)))


def fns(site: Site) -> Op:
    """Position of the n-th set bit of a mask, counted from a base upwards or downwards."""
    a, b, c, put = site.src(1, U32), site.src(2, U32), site.src(3, TYPES["s32"]), site.dst(0, U32)

    def run(st: State) -> None:
        mask, base, count = (st.spread(read(st)) for read in (a, b, c))
        bit = np.arange(32, dtype=np.int64)[None, :]
        base, count = base.astype(np.int64)[:, None], count.astype(np.int64)[:, None]
        is_set = (mask[:, None] >> bit.astype(_U32)) & np.uint32(1) != 0
        up = is_set & (bit >= base)
        down = is_set & (bit <= base) & (base < 32)
        rank_up = np.cumsum(up, 1)
        rank_down = np.cumsum(down[:, ::-1], 1)[:, ::-1]
        hit = np.where(
            count == 0,
            is_set & (bit == base),
            np.where(count > 0, up & (rank_up == count), down & (rank_down == -count)),
        )
        put(st, np.where(hit.any(1), hit.argmax(1), 0xFFFFFFFF).astype(_U32))

    return run


def szext(site: Site) -> Op:
    """Sign- or zero-extend the lower b bits (.clamp, .wrap)."""
    t, wrap = site.t, site.has("wrap")

    def run(a: Value, b: Value) -> Value:
        bits = (b & np.uint32(31)) if wrap else np.minimum(b, np.uint32(32))
        up = (np.uint32(32) - bits).astype(_U64)
        high = (a.view(_U32).astype(_U64) << up).astype(_U32)
        if t.kind == "s":
            r = high.view(np.int32).astype(np.int64) >> up.astype(np.int64)
        else:
            r = (high.astype(_U64) >> up).astype(np.int64)
        return np.where(bits == 0, 0, r).astype(_U32).view(t.dt)

    x, y, put = site.src(1), site.src(2, U32), site.dst()
    return lambda st: put(st, run(x(st), y(st)))


BIT_OPS: dict[str, Callable[[Site], Op]] = {
    "and": logic, "or": logic, "xor": logic, "not": logic, "cnot": logic, "lop3": lop3,
    "shl": shift, "shr": shift, "shf": funnel, "popc": count, "clz": count, "brev": count,
    "bfind": count, "bfe": bfe, "bfi": bfi, "bmsk": bmsk, "prmt": prmt, "dp4a": dot, "dp2a": dot,
    "mov": mov, "selp": selp, "slct": slct, "fns": fns, "szext": szext,
}  # fmt: skip
