"""Integers, bits and moves as C (PTX ISA 9.7.1, 9.7.2, 9.7.8, 9.7.9)."""

from __future__ import annotations

from ..operands import PRED, TYPES, U32, Type
from ..parser.syntax import Imm, Pair, Vec
from . import floating as fl
from .values import Emit, Words, unsigned

S32 = TYPES["s32"]


def _wide(t: Type) -> str:
    return unsigned(max(32, t.bits))


def _twice(t: Type) -> Type:
    return TYPES[f"{t.kind}{2 * t.bits}"]


# integers


def _sum(w: Words) -> str:
    t, op = w.t, w.i.op
    sign = "-" if op.startswith("sub") else "+"
    if t.kind in "fx":
        return fl.arithmetic(w, f"{{}} {sign} {{}}", 2)
    w.only("cc", "sat")
    u = TYPES[f"u{t.bits}"]
    if w.has("cc") or op in ("addc", "subc"):
        return _with_carry(w, f"{op[:3]}_carry{t.bits}({w.a(1, u)}, {w.a(2, u)}", u)
    if w.has("sat"):
        return w.d(f"clamp_s32((int64_t){w.a(1)} {sign} {w.a(2)})")
    return w.d(f"({_wide(t)}){w.a(1)} {sign} ({_wide(t)}){w.a(2)}")


def _with_carry(w: Words, call: str, u: Type) -> str:
    """A sum or difference that takes and gives the carry flag as its instruction says."""
    flag = w.kernel.carry()
    taken = w.value(flag, U32) if w.i.op.endswith("c") else "0"
    given = w.put(flag, U32, "out") if w.has("cc") else ""
    return f"{{ uint32_t out; {w.d(f'{call}, {taken}, &out)', u)} {given} }}"


def _product(w: Words, t: Type) -> tuple[str, Type]:
    """Product of operands 1 and 2, and its type."""
    u = TYPES[f"u{t.bits}"]
    if w.has("wide", "hi"):
        if t.bits == 64:
            big = "__int128" if t.kind == "s" else "unsigned __int128"
            return f"(uint64_t)((({big}){w.a(1)} * {w.a(2)}) >> 64)", t
        wide = _twice(t)
        both = f"(({'' if t.kind == 's' else 'u'}int{2 * t.bits}_t){w.a(1)} * {w.a(2)})"
        return (both, wide) if w.has("wide") else (f"({both} >> {t.bits})", t)
    if not w.has("lo"):
        raise w.error("mul needs .lo, .hi or .wide")
    return f"(({_wide(t)}){w.a(1, u)} * ({_wide(t)}){w.a(2, u)})", t


def _mul(w: Words) -> str:
    if w.t.kind in "fx":
        return fl.arithmetic(w, "{} * {}", 2)
    value, t = _product(w, w.t)
    return w.d(value, t)


def _mad(w: Words) -> str:
    if w.t.kind in "fx":
        return fl.fma(w)
    value, t = _product(w, w.t)
    wide, u = _wide(t), TYPES[f"u{t.bits}"]
    if w.has("cc") or w.i.op == "madc":
        return _with_carry(w, f"add_carry{t.bits}({value}, {w.a(3, u)}", u)
    if w.has("sat"):
        return w.d(f"saturated({value}, {w.a(3)})")
    return w.d(f"({wide}){value} + ({wide}){w.a(3, u)}", t)


def _mul24(w: Words) -> str:
    part = "signed24" if w.t.kind == "s" else "unsigned24"
    high = " >> 16" if w.has("hi") else ""
    value = f"(uint32_t)({part}({w.a(1, U32)}) * {part}({w.a(2, U32)}){high})"
    if w.i.op == "mul24":
        return w.d(value)
    return w.d(f"saturated({value}, {w.a(3)})" if w.has("sat") else f"{value} + {w.a(3, U32)}")


def _divide(w: Words) -> str:
    t = w.t
    if t.kind in "fx":
        return fl.divide(w)
    return w.d(f"{'s' if t.kind == 's' else 'u'}{w.i.op}{t.bits}({w.a(1)}, {w.a(2)})")


def _extreme(w: Words) -> str:
    t, op = w.t, w.i.op
    if t.kind in "fx":
        return fl.extreme(w)
    if t.kind not in "us" or w.has("relu"):
        raise w.error("min and max need a signed or unsigned type")
    sign = "<" if op == "min" else ">"
    return f"{{ __auto_type x = {w.a(1)}; __auto_type y = {w.a(2)}; {w.d(f'x {sign} y ? x : y')} }}"


def _sign(w: Words) -> str:
    t = w.t
    if t.kind in "fx":
        return fl.sign(w)
    u = TYPES[f"u{t.bits}"]
    minus = f"(0 - ({_wide(t)}){w.a(1, u)})"
    return w.d(minus if w.i.op == "neg" else f"{w.a(1)} < 0 ? {minus} : ({_wide(t)}){w.a(1, u)}")


def _sad(w: Words) -> str:
    u = TYPES[f"u{w.t.bits}"]
    x, y = w.a(1), w.a(2)
    gap = f"({x} > {y} ? ({_wide(u)}){x} - ({_wide(u)}){y} : ({_wide(u)}){y} - ({_wide(u)}){x})"
    return w.d(f"{gap} + {w.a(3, u)}")


def _dot(w: Words) -> str:
    """dp4a, dp2a: products of 8-bit parts, of dp2a with 16-bit parts, summed onto c."""
    ta, tb = w.types[0], w.types[1]
    two = w.i.op == "dp2a"
    width, first = (16, 2 * w.has("hi")) if two else (8, 0)
    parts = []
    for k in range(2 if two else 4):
        x = f"({'u' if ta.kind == 'u' else ''}int{width}_t)({w.a(1, U32)} >> {width * k})"
        y = f"({'u' if tb.kind == 'u' else ''}int8_t)({w.a(2, U32)} >> {8 * (k + first)})"
        parts.append(f"(int32_t)({x}) * (int32_t)({y})")
    out = TYPES["s32" if "s" in (ta.kind, tb.kind) else "u32"]
    return w.d(f"(uint32_t)({' + '.join(parts)}) + {w.a(3, U32)}", out)


# bits and moves


def _logic(w: Words) -> str:
    op, t = w.i.op, w.t
    if op == "not":
        return w.d(f"!{w.a(1)}" if t.name == "pred" else f"~{w.a(1)}")
    if op == "cnot":
        return w.d(f"{w.a(1)} == 0")
    return w.d(f"{w.a(1)} {fl.BOOL[op]} {w.a(2)}")


def _lop3(w: Words) -> str:
    table = w.constant(4)
    kind = next((m for m in w.mods if m in ("and", "or")), None)
    if table is None:
        raise w.error("the table must be a literal")
    if isinstance(w.i.args[0], Pair) and kind is None:
        raise w.error("a predicate needs .and or .or")
    if kind is not None and not isinstance(w.i.args[0], Pair):
        raise w.error("two destinations are needed")
    terms = []
    for row in range(8):
        if table >> row & 1:
            names = (f"{'' if row & bit else '~'}{v}" for bit, v in ((4, "x"), (2, "y"), (1, "z")))
            terms.append(f"({' & '.join(names)})")
    ins = "".join(f"uint32_t {v} = {w.a(n, U32)}; " for n, v in ((1, "x"), (2, "y"), (3, "z")))
    value, d = " | ".join(terms) or "0", w.i.args[0]
    if not isinstance(d, Pair):
        return f"{{ {ins}{w.d(value, U32)} }}"
    test = f"(v != 0) {'|' if w.has('or') else '&'} {w.a(5, PRED)}"
    puts = f"{w.put(d.first, U32, 'v')} {w.put(d.second, PRED, 't')}"
    return f"{{ {ins}uint32_t v = {value}; uint8_t t = {test}; {puts} }}"


def _shift(w: Words) -> str:
    t, left = w.t, w.i.op == "shl"
    x, by = w.a(1), w.a(2, U32)
    if not left and t.kind == "s":
        return f"{{ uint32_t y = {by}; {w.d(f'{x} >> (y < {t.bits} ? y : {t.bits - 1})')} }}"
    moved = f"({_wide(t)}){x} {'<<' if left else '>>'} y"
    return f"{{ uint32_t y = {by}; {w.d(f'y < {t.bits} ? {moved} : 0')} }}"


def _funnel(w: Words) -> str:
    by = f"uint32_t y = {w.a(3, U32)}; "
    by += "y = y < 32 ? y : 32; " if w.has("clamp") else "y &= 31; "
    pair = f"uint64_t x = (uint64_t){w.a(2, U32)} << 32 | {w.a(1, U32)}; "
    return f"{{ {by}{pair}{w.d('x << y >> 32' if w.has('l') else 'x >> y', U32)} }}"


def _count(w: Words) -> str:
    t, op = w.t, w.i.op
    u, end = TYPES[f"u{t.bits}"], "ll" if t.bits == 64 else ""
    if op == "popc":
        return w.d(f"__builtin_popcount{end}({w.a(1, u)})", U32)
    if op == "clz":
        value = w.d(f"x ? __builtin_clz{end}(x) : {t.bits}", U32)
        return f"{{ {unsigned(t.bits)} x = {w.a(1, u)}; {value} }}"
    if op == "brev":
        return w.d(f"reverse{t.bits}({w.a(1, u)})", u)
    turn = "x = x >> (sizeof x * 8 - 1) ? ~x : x; " if t.kind == "s" else ""
    above = "" if w.has("shiftamt") else f"{t.bits - 1} - "
    value = w.d(f"x ? {above}__builtin_clz{end}(x) : 0xFFFFFFFFu", U32)
    return f"{{ {unsigned(t.bits)} x = {w.a(1, u)}; {turn}{value} }}"


def _field(w: Words) -> str:
    t = TYPES[f"u{w.t.bits}"]
    if w.i.op == "bfi":
        places = f"{w.a(3, U32)}, {w.a(4, U32)}"
        return w.d(f"insert_{t.name}({w.a(1, t)}, {w.a(2, t)}, {places})", t)
    sign = "s" if w.t.kind == "s" else "u"
    return w.d(f"field_{sign}{t.bits}({w.a(1, t)}, {w.a(2, U32)}, {w.a(3, U32)})", t)


_PRMT = {
    "f4e": "n + {k}", "b4e": "(n - {k}) & 7", "rc8": "n", "ecl": "n > {k} ? n : {k}",
    "ecr": "n < {k} ? n : {k}", "rc16": "(n & 1) * 2 + ({k} & 1)",
}  # fmt: skip


def _prmt(w: Words) -> str:
    mode = next((m for m in w.mods if m in _PRMT), "")
    if not mode:
        return w.d(f"permute({w.a(1, U32)}, {w.a(2, U32)}, {w.a(3, U32)})", U32)
    control = " | ".join(f"({_PRMT[mode].format(k=k)}) << {4 * k}" for k in range(4))
    put = w.d(f"permute({w.a(1, U32)}, {w.a(2, U32)}, {control})", U32)
    return f"{{ uint32_t n = {w.a(3, U32)} & 3; {put} }}"


def _mask(w: Words) -> str:
    """bmsk, szext, fns."""
    x, y, t = w.a(1, U32), w.a(2, U32), w.t
    if w.i.op == "fns":
        return w.d(f"nth_one({x}, {y}, {w.a(3, S32)})", U32)
    if w.i.op == "bmsk":
        pair = f"{x} & 31, {y} & 31" if w.has("wrap") else f"{x}, {y}"
        return w.d(f"ones_from({pair})", U32)
    return w.d(f"extend_{t.name}({x}, {f'{y} & 31' if w.has('wrap') else y})", U32)


def _mov(w: Words) -> str:
    w.only()
    t = w.t
    d, s = w.i.args[0], w.i.args[1]
    wide = TYPES[f"u{t.bits}"] if t.kind != "p" else PRED
    if isinstance(s, Vec):
        part = t.bits // len(s.items)
        values = (
            f"({unsigned(t.bits)}){w.value(x, TYPES[f'u{part}'])} << {part * k}"
            for k, x in enumerate(s.items)
        )
        return w.d(" | ".join(values), wide)
    if isinstance(d, Vec):
        part = t.bits // len(d.items)
        puts = (w.put(x, TYPES[f"u{part}"], f"x >> {part * k}") for k, x in enumerate(d.items))
        return f"{{ {unsigned(t.bits)} x = {w.a(1, wide)}; {' '.join(puts)} }}"
    if t.name not in ("f32", "f64") or (isinstance(s, Imm) and s.kind == "int"):
        t = wide
    return w.d(w.a(1, t), t)


def _selp(w: Words) -> str:
    t = w.t if w.t.name in ("f32", "f64") else TYPES[f"u{w.t.bits}"]
    return w.d(f"{w.a(3, PRED)} ? {w.a(1, t)} : {w.a(2, t)}", t)


def _slct(w: Words) -> str:
    t, tc = w.types
    c = f"flush({w.a(3, tc)})" if w.has("ftz") else w.a(3, tc)
    t = t if t.name in ("f32", "f64") else TYPES[f"u{t.bits}"]
    return w.d(f"{c} >= 0 ? {w.a(1, t)} : {w.a(2, t)}", t)


ARITHMETIC: dict[str, Emit] = {
    **dict.fromkeys(("add", "sub", "addc", "subc"), _sum), "mul": _mul, "mad": _mad, "madc": _mad,
    "mul24": _mul24, "mad24": _mul24, "div": _divide, "rem": _divide, "min": _extreme,
    "max": _extreme, "neg": _sign, "abs": _sign, "sad": _sad, "dp4a": _dot, "dp2a": _dot,
    **dict.fromkeys(("and", "or", "xor", "not", "cnot"), _logic), "lop3": _lop3, "shl": _shift,
    "shr": _shift, "shf": _funnel, **dict.fromkeys(("popc", "clz", "brev", "bfind"), _count),
    "bfe": _field, "bfi": _field, **dict.fromkeys(("bmsk", "szext", "fns"), _mask),
    "prmt": _prmt, "mov": _mov, "selp": _selp, "slct": _slct,
}  # fmt: skip
