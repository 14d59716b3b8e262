"""Video instructions, scalar and SIMD (PTX ISA 9.7.17, 9.7.18), without lane selectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..state import State
from .floats import Value
from .lower import U32, Op, Site

_U32 = np.dtype(np.uint32)
_SIZES = {"2": 16, "4": 8}
_TWO: dict[str, Callable[[Value, Value], Value]] = {
    "vadd": np.add, "vsub": np.subtract, "vmin": np.minimum, "vmax": np.maximum,
    "vabsdiff": lambda a, b: np.abs(a - b), "vavrg": lambda a, b: _average(a + b),
}  # fmt: skip


def _average(total: Value) -> Value:
    """Half of it, halves away from zero."""
    return (total + (total >= 0)) >> 1


_CMP: dict[str, Any] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip


def _lane(word: Value, n: int, bits: int, signed: bool) -> Value:
    """Part n of a word as int64."""
    kind = np.dtype(f"{'i' if signed else 'u'}{bits // 8}")
    return (word >> np.uint32(n * bits)).astype(f"u{bits // 8}").view(kind).astype(np.int64)


def _limits(signed: bool, bits: int) -> tuple[int, int]:
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)


def simd(site: Site) -> Op:
    """vadd2 and the like: each half or quarter on its own; .add sums them up onto c."""
    op, bits = site.i.op[:-1], _SIZES[site.i.op[-1]]
    site.only("sat", "add", *_CMP)
    signs = [t.kind == "s" for t in site.types]
    compare = op == "vset"
    ta, tb = signs if compare else signs[1:]
    low, high = _limits(signs[0], bits)
    fn: Any = _CMP[next(m for m in site.mods if m in _CMP)] if compare else _TWO[op]
    a, b, c, put = site.src(1, U32), site.src(2, U32), site.src(3, U32), site.dst(0, U32)
    sat, total = site.has("sat"), site.has("add")

    def run(st: State) -> None:
        x, y = a(st), b(st)
        out: Value = c(st).astype(np.int64) if total else np.int64(0)
        for n in range(32 // bits):
            r = np.asarray(fn(_lane(x, n, bits, ta), _lane(y, n, bits, tb))).astype(np.int64)
            if total:
                out = out + r
                continue
            if sat:
                r = np.clip(r, low, high)
            out = out | (r & (1 << bits) - 1) << (n * bits)
        put(st, np.asarray(out).astype(_U32)[()])

    return run


def whole_words(site: Site) -> Op:
    """vadd, vsub, vabsdiff, vmin, vmax, vshl, vshr of whole words."""
    op = site.i.op
    site.only("clamp", "wrap")
    if len(site.i.args) != 3:
        raise site.error()
    signs = [t.kind == "s" for t in site.types]
    kinds = [np.dtype(np.int32 if s else np.uint32) for s in signs[1:]]
    a, b, put = site.src(1, U32), site.src(2, U32), site.dst(0, U32)
    wrap = site.has("wrap")

    def run(st: State) -> None:
        x = a(st).view(kinds[0]).astype(np.int64)
        y = b(st).view(kinds[1]).astype(np.int64)
        if op in ("vshl", "vshr"):
            y = y & 31 if wrap else np.minimum(y, 32)
            r = x << np.minimum(y, 31) << (y >= 32) if op == "vshl" else x >> y
        else:
            r = _TWO[op](x, y)
        put(st, r.astype(_U32))

    return run


def known(site: Site) -> Op:
    """Any video instruction."""
    if site.i.op[-1] in _SIZES:
        return simd(site)
    return whole_words(site)


VIDEO_OPS: dict[str, Callable[[Site], Op]] = {
    **{f"{n}{k}": known for n in (*_TWO, "vset") for k in _SIZES},
    **dict.fromkeys(("vadd", "vsub", "vabsdiff", "vmin", "vmax", "vshl", "vshr"), known),
}
