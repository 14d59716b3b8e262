"""Arithmetic, comparisons, bits and moves as C, to the bit what `instructions/*.py` compute."""

from __future__ import annotations

from collections.abc import Callable

from ..instructions.lower import PRED, TYPES, U32, Type
from ..parser.syntax import Imm, Pair, Vec
from .values import Emit, Unknown, Words, unsigned

S32 = TYPES["s32"]
ROUND = ("rz", "rm", "rp", "rna")


def _wide(t: Type) -> str:
    return unsigned(max(32, t.bits))


def _twice(t: Type) -> Type:
    return TYPES[f"{t.kind}{2 * t.bits}"]


def _refuse(w: Words, *mods: str) -> None:
    if w.has(*mods):
        raise Unknown


def _after(w: Words, value: str) -> str:
    """A float32 result with .ftz, .sat and .relu."""
    if w.has("ftz"):
        value = f"flush({value})"
    if w.has("sat"):
        value = f"saturate({value})"
    return f"relu({value})" if w.has("relu") else value


def _inputs(w: Words, count: int) -> list[str]:
    values = [w.a(n + 1) for n in range(count)]
    return [f"flush({v})" for v in values] if w.has("ftz") and w.t.name == "f32" else values


def _sure64(w: Words, value: str) -> str:
    """A float64 result; a lane with a NaN goes to the interpreter, which knows its payload."""
    _refuse(w, "sat", "ftz", "relu")
    return f"{{ double y = {value}; if (unlikely(y != y)) goto odd; {w.d('y')} }}"


# integers


def _sum(w: Words) -> str:
    t, sign = w.t, "-" if w.i.op == "sub" else "+"
    if t.kind in "fx":
        return _float(w, f"{{}} {sign} {{}}", 2)
    _refuse(w, "cc")
    if w.has("sat"):
        return w.d(f"clamp_s32((int64_t){w.a(1)} {sign} {w.a(2)})")
    u = TYPES[f"u{t.bits}"]
    return w.d(f"({_wide(t)}){w.a(1, u)} {sign} ({_wide(t)}){w.a(2, u)}")


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
        raise Unknown
    return f"(({_wide(t)}){w.a(1, u)} * ({_wide(t)}){w.a(2, u)})", t


def _mul(w: Words) -> str:
    if w.t.kind in "fx":
        return _float(w, "{} * {}", 2)
    value, t = _product(w, w.t)
    return w.d(value, t)


def _mad(w: Words) -> str:
    if w.t.kind in "fx":
        return _fma(w)
    _refuse(w, "cc", "sat")
    value, t = _product(w, w.t)
    wide = _wide(t)
    return w.d(f"({wide}){value} + ({wide}){w.a(3, TYPES[f'u{t.bits}'])}", t)


def _divide(w: Words) -> str:
    t = w.t
    if t.kind in "fx":
        if w.has(*ROUND) or t.name not in ("f32", "f64"):
            raise Unknown
        return _float(w, "{} / {}", 2)
    return w.d(f"{'s' if t.kind == 's' else 'u'}{w.i.op}{t.bits}({w.a(1)}, {w.a(2)})")


def _extreme(w: Words) -> str:
    t, op = w.t, w.i.op
    _refuse(w, "xorsign", "abs")
    if t.name == "f64":
        head = f"double x = {w.a(1)}, z = {w.a(2)}; if (unlikely(x != x || z != z)) goto odd;"
        return f"{{ {head} {w.d(f'{op}_f64(x, z)')} }}"
    if t.name == "f32":
        fn = f"{op}_nan_f32" if w.has("NaN") else f"{op}_f32"
        ins = _inputs(w, len(w.i.args) - 1)
        value = ins[0]
        for other in ins[1:]:
            value = _after(w, f"canon({fn}({value}, {other}))")
        return w.d(value)
    if t.kind not in "us" or w.has("relu"):
        raise Unknown
    sign = "<" if op == "min" else ">"
    return f"{{ __auto_type x = {w.a(1)}; __auto_type y = {w.a(2)}; {w.d(f'x {sign} y ? x : y')} }}"


def _sign(w: Words) -> str:
    t, neg = w.t, w.i.op == "neg"
    if t.name in ("f32", "f64"):
        u = TYPES[f"u{t.bits}"]
        one = "1ull" if t.bits == 64 else "1u"
        top = f"({one} << {t.bits - 1})"
        bits = f"{w.a(1, u)} ^ {top}" if neg else f"{w.a(1, u)} & ~{top}"
        if not w.has("ftz"):
            return w.d(bits, u)
        return w.d(f"canon({'-' if neg else 'fabsf'}(flush({w.a(1)})))")
    if t.kind in "fx":
        raise Unknown
    u = TYPES[f"u{t.bits}"]
    minus = f"(0 - ({_wide(t)}){w.a(1, u)})"
    return w.d(minus if neg else f"{w.a(1)} < 0 ? {minus} : ({_wide(t)}){w.a(1, u)}")


def _sad(w: Words) -> str:
    u = TYPES[f"u{w.t.bits}"]
    x, y = w.a(1), w.a(2)
    gap = f"({x} > {y} ? ({_wide(u)}){x} - ({_wide(u)}){y} : ({_wide(u)}){y} - ({_wide(u)}){x})"
    return w.d(f"{gap} + {w.a(3, u)}")


def _dot(w: Words) -> str:
    if w.i.op != "dp4a":
        raise Unknown
    ta, tb = w.types[0], w.types[1]
    parts = []
    for k in range(4):
        x, y = (
            f"({'u' if t.kind == 'u' else ''}int8_t)({w.a(n, U32)} >> {8 * k})"
            for n, t in ((1, ta), (2, tb))
        )
        parts.append(f"(int32_t)({x}) * (int32_t)({y})")
    out = TYPES["s32" if "s" in (ta.kind, tb.kind) else "u32"]
    return w.d(f"(uint32_t)({' + '.join(parts)}) + {w.a(3, U32)}", out)


# floating point


def _float(w: Words, form: str, count: int) -> str:
    """An operation of C, rounded to nearest."""
    t = w.t
    if w.has(*ROUND):
        raise Unknown
    if t.name == "f32":
        return w.d(_after(w, f"canon({form.format(*_inputs(w, count))})"))
    if t.name == "f64":
        return _sure64(w, form.format(*_inputs(w, count)))
    _refuse(w, "ftz", "sat", "relu")
    return _halves(w, count, lambda part, *x: _widened(part, form, *x))


def _widened(part: str, form: str, *x: str) -> str:
    if part == "bf16":
        return f"to_bf16({form.format(*(f'from_bf16({v})' for v in x))})"
    return f"narrow_half({form.format(*(f'from_half({v})' for v in x))})"


def _halves(w: Words, count: int, one: Callable[..., str]) -> str:
    """A function of f16 or bf16 on its type or on both parts of its packed type."""
    name = w.t.name
    if name in ("f16", "bf16"):
        return w.d(one(name, *(w.a(n + 1, TYPES["b16"]) for n in range(count))))
    if name not in ("f16x2", "bf16x2"):
        raise Unknown
    parts = []
    for by in (0, 16):
        ins = [f"(uint16_t)({w.a(n + 1, U32)} >> {by})" for n in range(count)]
        parts.append(f"(uint32_t){one(name[:-2], *ins)}")
    return w.d(f"{parts[0]} | {parts[1]} << 16")


def _fma(w: Words) -> str:
    t = w.t
    if w.has(*ROUND):
        raise Unknown
    if t.name == "f32":
        return w.d(_after(w, f"canon(fmaf({', '.join(_inputs(w, 3))}))"))
    if t.name == "f64":
        return _sure64(w, f"fma({w.a(1)}, {w.a(2)}, {w.a(3)})")
    _refuse(w, "ftz", "sat", "relu")
    if t.name not in ("f16", "f16x2"):
        raise Unknown
    return _halves(w, 3, lambda part, *x: f"fma_half({', '.join(x)})")


def _approximate(w: Words) -> str:
    op, name = w.i.op, w.t.name
    if w.has(*ROUND):
        raise Unknown
    if name == "f64":
        if op not in ("rcp", "sqrt") or w.has("approx"):
            raise Unknown
        return _sure64(w, f"1.0 / {w.a(1)}" if op == "rcp" else f"sqrt({w.a(1)})")
    if name != "f32":
        raise Unknown
    x = _inputs(w, 1)[0]
    if op in ("rcp", "sqrt", "rsqrt"):
        if op != "rsqrt" and not w.has("approx"):
            value = f"1.0f / {x}" if op == "rcp" else f"sqrtf({x})"
        else:
            root = f"sqrt((double){x})" if op != "rcp" else f"(double){x}"
            value = f"(float)({root if op == 'sqrt' else f'1.0 / {root}'})"
        return w.d(_after(w, f"canon({value})"))
    fn = {"ex2": "exp2", "lg2": "log2", "sin": "sin", "cos": "cos", "tanh": "tanh"}[op]
    then = w.d(_after(w, "canon((float)y)"))
    return f"{{ double y = {fn}({x}); if (unlikely(!sure(y))) goto odd; {then} }}"


# comparisons

ORDERED = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=",
    "hi": ">", "hs": ">=",
}  # fmt: skip
BOOL = {"and": "&", "or": "|", "xor": "^"}


def _compared(w: Words, n: int) -> str:
    t = w.t
    if t.name == "f16":
        bits = w.a(n, TYPES["b16"])
        return f"from_half({f'flush_half({bits})' if w.has('ftz') else bits})"
    if t.name == "bf16":
        return f"from_bf16({w.a(n, TYPES['b16'])})"
    if t.kind == "x":
        raise Unknown
    return f"flush({w.a(n)})" if w.has("ftz") and t.name == "f32" else w.a(n)


def _outcome(w: Words) -> tuple[str, str]:
    """Statements that leave a comparison's outcome in p, and what combines it with operand c."""
    mods = [m for m in w.mods if m in ORDERED or m in ("num", "nan") or m[:-1] in ORDERED]
    name, real = mods[0], w.t.kind in "fx"
    head = f"__auto_type x = {_compared(w, 1)}; __auto_type y = {_compared(w, 2)}; uint8_t p = "
    if name in ("num", "nan"):
        test = "x == x && y == y" if name == "num" else "x != x || y != y"
    elif name in ORDERED:
        test = f"x {ORDERED[name]} y"
        if real and name == "ne":
            test += " && x == x && y == y"
    elif real and name.endswith("u"):
        test = f"x {ORDERED[name[:-1]]} y || x != x || y != y"
    else:
        raise Unknown
    kind = next((m for m in w.mods if m in BOOL), None)
    if kind is None:
        return f"{head}{test};", ""
    return f"{head}{test}; uint8_t z = {w.a(3, PRED)};", f" {BOOL[kind]} z"


def _setp(w: Words) -> str:
    test, more = _outcome(w)
    d = w.i.args[0]
    first, second = (d.first, d.second) if isinstance(d, Pair) else (d, None)
    return f"{{ {test} {w.put(first, PRED, f'p{more}')} {w.put(second, PRED, f'!p{more}')} }}"


def _set(w: Words) -> str:
    td = w.types[0]
    test, more = _outcome(w)
    if td.name == "f32":
        value = f"(p{more}) ? 1.0f : 0.0f"
    elif td.kind in "us":
        value = f"(p{more}) ? ({unsigned(td.bits)})-1 : 0"
    else:
        raise Unknown
    return f"{{ {test} {w.d(value, td)} }}"


# bits and moves


def _logic(w: Words) -> str:
    op, t = w.i.op, w.t
    if op == "not":
        return w.d(f"!{w.a(1)}" if t.name == "pred" else f"~{w.a(1)}")
    if op == "cnot":
        return w.d(f"{w.a(1)} == 0")
    return w.d(f"{w.a(1)} {BOOL[op]} {w.a(2)}")


def _lop3(w: Words) -> str:
    table = w.constant(4)
    if table is None:
        raise Unknown
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


def _prmt(w: Words) -> str:
    _refuse(w, "f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    return w.d(f"permute({w.a(1, U32)}, {w.a(2, U32)}, {w.a(3, U32)})", U32)


def _mov(w: Words) -> str:
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
    "add": _sum, "sub": _sum, "mul": _mul, "mad": _mad, "fma": _fma, "div": _divide,
    "rem": _divide, "min": _extreme, "max": _extreme, "neg": _sign, "abs": _sign, "sad": _sad,
    "dp4a": _dot, "setp": _setp, "set": _set, "and": _logic, "or": _logic, "xor": _logic,
    "not": _logic, "cnot": _logic, "lop3": _lop3, "shl": _shift, "shr": _shift, "shf": _funnel,
    "popc": _count, "clz": _count, "brev": _count, "bfind": _count, "bfe": _field, "bfi": _field,
    "prmt": _prmt, "mov": _mov, "selp": _selp, "slct": _slct,
    **dict.fromkeys(("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh"), _approximate),
}  # fmt: skip
