"""Floating-point instructions and comparisons (PTX ISA 9.7.3 to 9.7.6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..parser.syntax import Pair
from ..state import CONTAINER, State
from . import floats as fl
from .floats import F16, F32, F64, Value
from .int import INT_OPS
from .lower import PRED, TYPES, Op, Site, Type

_U16, _U32 = CONTAINER[16], CONTAINER[32]
_ROUND = ("rn", "rz", "rm", "rp")
_BASIC: dict[str, Any] = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}

Fn1 = Callable[[Value], Value]
Fn2 = Callable[[Value, Value], Value]


def rounding(site: Site) -> str:
    """The rounding mode of an arithmetic instruction."""
    return next((m for m in site.mods if m in _ROUND), "rn")


def _after(site: Site, fn: Any) -> Any:
    """Wrap fn, which works on one kind of lane, with .ftz on inputs and result, .sat, .relu.

    Packed and bfloat16 functions are wrapped before they are applied to halves and bits.
    """
    ftz = site.has("ftz") and site.t.bits < 64
    sat, relu = site.has("sat"), site.has("relu")
    if not (ftz or sat or relu):
        return fn

    def run(*args: Value) -> Value:
        r = fl.flush(fn(*map(fl.flush, args))) if ftz else fn(*args)
        if sat:
            r = fl.saturate(r)
        if relu:
            r = fl.relu(r)
        return r

    return run


def _bf16_after(site: Site, fn: Any) -> Any:
    """The same for functions on bfloat16 bits: only .relu exists."""
    return (lambda *args: fl.relu_bf16(fn(*args))) if site.has("relu") else fn


def halves(fn: Any) -> Any:
    """Apply a float16 function to both halves of packed uint32 values."""

    def run(*args: Value) -> Value:
        parts = [np.ascontiguousarray(a).reshape(-1).view(F16) for a in np.broadcast_arrays(*args)]
        r = np.ascontiguousarray(fn(*parts), dtype=F16).view(_U32)
        return r if any(a.ndim for a in args) else r[0]

    return run


def packed_bf16(fn: Any) -> Any:
    """Apply a function on bfloat16 bits to both halves of packed uint32 values."""

    def run(*args: Value) -> Value:
        parts = [np.ascontiguousarray(a).reshape(-1).view(_U16) for a in np.broadcast_arrays(*args)]
        r = np.ascontiguousarray(fn(*parts), dtype=_U16).view(_U32)
        return r if any(a.ndim for a in args) else r[0]

    return run


def bf16(fn: Any) -> Any:
    """A float32 function on bfloat16 bits, rounded to bfloat16."""
    return lambda *args: fl.to_bf16(fn(*(fl.from_bf16(a) for a in args)))


def _typed(site: Site, f16: Any, f32: Any, f64: Any, b16: Any = None) -> Any:
    """The function for the instruction's type, with its modifiers."""
    name = site.t.name
    b16 = _bf16_after(site, bf16(f32) if b16 is None else b16)
    f16 = _after(site, f16)
    f64 = fl.with_nan(f64, *((1, 2, 0) if site.i.op in ("fma", "mad") else (1, 0)))
    table = {
        "f16": f16, "f32": _after(site, f32), "f64": f64, "f16x2": halves(f16), "bf16": b16,
        "bf16x2": packed_bf16(b16),
    }  # fmt: skip
    if name not in table:
        raise site.error()
    return table[name]


def basic(site: Site) -> Op:
    """add, sub, mul."""
    site.only("ftz", "sat", *_ROUND)
    plain: Fn2 = fl.in_mode(_BASIC[site.i.op], rounding(site))
    checked: Fn2 = lambda a, b: fl.canonical(plain(a, b))  # noqa: E731
    return site.binary(_typed(site, checked, checked, plain))


def fma(site: Site) -> Op:
    """fma and mad: one rounding."""
    site.only("ftz", "sat", "relu", *_ROUND)
    mode = rounding(site)
    double: Any = fl.fma64 if mode == "rn" else fl.in_mode(fl.fma64_lanes, mode)
    fn = _typed(
        site,
        lambda a, b, c: fl.fma16(a, b, c, mode),
        lambda a, b, c: fl.fma32(a, b, c, mode),
        double,
        fl.fma_bf16,
    )
    return site.ternary(fn)


def div(site: Site) -> Op:
    """div: .rn exact, .approx and .full as the quotient (both promise 2 ulp)."""
    site.only("ftz", "approx", "full", *_ROUND)
    plain: Fn2 = fl.in_mode(np.divide, rounding(site))
    if site.t.name == "f64":
        return site.binary(fl.with_nan(plain, 0, 1))
    if site.t.name != "f32":
        raise site.error()
    return site.binary(_after(site, lambda a, b: fl.canonical(plain(a, b))))


def approximate(site: Site) -> Op:
    """rcp, sqrt, rsqrt, ex2, lg2, sin, cos, tanh."""
    op, mode, name = site.i.op, rounding(site), site.t.name
    site.only("ftz", "approx", *_ROUND)
    if name == "f64":
        wide: dict[str, Fn1] = {
            "rcp": lambda x: 1.0 / x,
            "sqrt": np.sqrt,
            "rsqrt": lambda x: 1.0 / np.sqrt(x),
        }
        if op not in wide:
            raise site.error()
        fn = fl.with_nan(fl.in_mode(wide[op], mode), 0)
        if site.has("approx") and op in ("rcp", "rsqrt"):  # .approx.ftz.f64: upper word only
            exact = fn

            def fn(x: Value) -> Value:
                ftz = site.has("ftz")
                r = exact(fl.flush64(x) if ftz else x)
                word = (r.view(np.uint64) & np.uint64(0xFFFFFFFF << 32)).view(F64)
                if ftz:
                    return np.where(r != r, fl.NAN64, fl.flush64(word))
                return np.where(r != r, r, word)

        return site.unary(fn)
    single: Fn1 = lambda x: fl.approx(op, x)  # noqa: E731
    if op in ("rcp", "sqrt") and not site.has("approx"):
        single = fl.in_mode(np.sqrt if op == "sqrt" else lambda x: np.float32(1) / x, mode)
    checked: Fn1 = lambda x: fl.canonical(single(x).astype(F32, copy=False))  # noqa: E731
    half: Fn1 = lambda x: fl.canonical(checked(x.astype(F32)).astype(F16))  # noqa: E731
    return site.unary(_typed(site, half, checked, None))


def sign(site: Site) -> Op:
    """neg, abs, copysign on bits; float16 and .ftz forms make NaNs canonical [recorded, H200]."""
    op, t = site.i.op, site.t
    u = TYPES[f"u{t.bits}"]
    lane = 16 if t.name.endswith("x2") else t.bits
    mask = sum(1 << (lane * k + lane - 1) for k in range(t.bits // lane))
    top, rest = u.dt.type(mask), u.dt.type(~mask & (1 << t.bits) - 1)
    if op == "copysign":
        return site.binary(lambda a, b: (b & rest) | (a & top), u)
    fn: Fn1 = (lambda x: x ^ top) if op == "neg" else (lambda x: x & rest)
    ftz = site.has("ftz")
    if t.name == "f64":
        return site.unary(fl.with_nan(lambda x: fn(x.view(np.uint64)).view(F64), 0))
    if t.name == "f32" and not ftz:
        return site.unary(fn, u)
    if t.name == "f32":
        bits = fn
        return site.unary(lambda x: fl.canonical(bits(fl.flush(x).view(_U32)).view(F32)))
    one, flip = np.uint16(0x8000), op == "neg"

    def word(x: Value) -> Value:
        return x.view(_U16) ^ one if flip else x.view(_U16) & np.uint16(0x7FFF)

    def half(x: Value) -> Value:
        return fl.canonical(word(fl.flush(x) if ftz else x).view(F16))

    def brain(x: Value) -> Value:
        nan = (x & np.uint16(0x7FFF)) > np.uint16(0x7F80)
        return np.where(nan, fl.NANB16, word(x)).astype(_U16, copy=False)

    if t.name in ("bf16", "bf16x2"):
        return site.unary(brain if t.name == "bf16" else packed_bf16(brain))
    return site.unary(halves(half) if t.name == "f16x2" else half)


def extreme(site: Site) -> Op:
    """min and max, with two or three inputs."""
    site.only("ftz", "NaN", "xorsign", "abs")
    nan = site.has("NaN")
    pick = fl.minimum if site.i.op == "min" else fl.maximum
    if site.has("xorsign"):
        pick = fl.xorsign(pick)
    plain: Fn2 = lambda a, b: pick(a, b, nan)  # noqa: E731
    checked: Fn2 = lambda a, b: fl.canonical(pick(a, b, nan).astype(a.dtype, copy=False))  # noqa: E731
    fn = _typed(site, checked, checked, plain)
    if len(site.i.args) == 4:
        return site.ternary(lambda a, b, c: fn(fn(a, b), c))
    return site.binary(fn)


def by_type(float_fn: Callable[[Site], Op], int_fn: Callable[[Site], Op]) -> Callable[[Site], Op]:
    """Integer or floating-point, by the instruction's type."""
    return lambda site: float_fn(site) if site.t.kind in "fx" else int_fn(site)


_ORDERED: dict[str, Any] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal,
}  # fmt: skip
_BOOL: dict[str, Any] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(name: str, t: Type) -> Fn2:
    """The comparison `name` for values of type t; bf16 values come as float32."""
    floating = t.kind in "fx"
    if name == "num":
        return lambda a, b: (a == a) & (b == b)
    if name == "nan":
        return lambda a, b: (a != a) | (b != b)
    if floating and name.endswith("u") and name[:-1] in _ORDERED:
        ordered = _ORDERED[name[:-1]]
        return lambda a, b: ordered(a, b) | (a != a) | (b != b)
    fn = _ORDERED[name]
    if floating and name == "ne":
        return lambda a, b: (a != b) & (a == a) & (b == b)
    result: Fn2 = fn
    return result


def _comparison_of(site: Site) -> str:
    name = next((m for m in site.mods if m in _ORDERED or m in _MORE), None)
    if name is None:
        raise site.error("no comparison")
    return name


def _compare(site: Site, first: int) -> tuple[Callable[[State], Value], Any]:
    """Reader of the comparison's outcome, combined with operand c where .and/.or/.xor asks."""
    t = site.t
    fn = comparison(_comparison_of(site), t)
    a, b = site.src(first, t), site.src(first + 1, t)
    change = _comparable(site, t.name)
    outcome = lambda st: fn(change(a(st)), change(b(st)))  # noqa: E731
    return outcome, _combined(site, first)


def _comparable(site: Site, name: str) -> Fn1:
    """Conversion of one lane's bits to a number that numpy compares, .ftz included."""
    if name == "bf16":
        return fl.from_bf16
    if site.has("ftz") and name in ("f32", "f16"):
        return fl.flush
    return lambda x: x


def _combined(site: Site, first: int) -> Any:
    """(function, reader) of the predicate that .and/.or/.xor combines with."""
    kind = next((m for m in site.mods if m in _BOOL), None)
    return None if kind is None else (_BOOL[kind], site.read(site.arg(first + 2), PRED))


def _compare_halves(site: Site, first: int) -> Callable[[State], tuple[Value, Value]]:
    """Outcomes of the lower and the upper halves of packed operands, combined with operand c."""
    t = site.t
    one = TYPES[t.name[:-2]]
    fn, change = comparison(_comparison_of(site), one), _comparable(site, one.name)
    a, b, extra = site.src(first, t), site.src(first + 1, t), _combined(site, first)

    def run(st: State) -> tuple[Value, Value]:
        x, y = st.spread(a(st)), st.spread(b(st))
        x, y = (np.ascontiguousarray(v).view(one.dt) for v in (x, y))
        r = fn(change(x), change(y))
        low, high = r[::2], r[1::2]
        if extra is not None:
            c = extra[1](st)
            low, high = extra[0](low, c), extra[0](high, c)
        return low, high

    return run


_MORE = ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def setp(site: Site) -> Op:
    """setp with one or two destinations; packed types give one for each half."""
    d = site.i.args[0]
    first = site.write(d.first if isinstance(d, Pair) else d, PRED)
    second = site.write(d.second, PRED) if isinstance(d, Pair) else None
    if site.t.name in ("f16x2", "bf16x2"):
        both = _compare_halves(site, 1)

        def packed(st: State) -> None:
            low, high = both(st)
            first(st, low)
            if second is not None:
                second(st, high)

        return packed
    outcome, extra = _compare(site, 1)

    def run(st: State) -> None:
        r = outcome(st)
        q = ~r
        if extra is not None:
            c = extra[1](st)
            r, q = extra[0](r, c), extra[0](q, c)
        first(st, r)
        if second is not None:
            second(st, q)

    return run


_TRUE = {"f16": 0x3C00, "bf16": 0x3F80, "f16x2": 0x3C003C00, "bf16x2": 0x3F803F80}


def set_(site: Site) -> Op:
    """set: all ones or 1.0 where the comparison holds; packed sources fill a half each."""
    td = site.types[0]
    put = site.dst(0, td)
    word = CONTAINER[td.bits]
    true = word.type(_TRUE.get(td.name, (1 << td.bits) - 1)).view(td.dt)
    if td.name == "f32":
        true = np.float32(1)
    if site.t.name in ("f16x2", "bf16x2"):
        both = _compare_halves(site, 1)
        ones = np.uint32(_TRUE.get(td.name, 0xFFFFFFFF))

        def packed(st: State) -> None:
            low, high = both(st)
            r = np.where(low, np.uint32(0xFFFF), np.uint32(0))
            r = r | np.where(high, np.uint32(0xFFFF0000), np.uint32(0))
            put(st, (r & ones).view(td.dt))

        return packed
    outcome, extra = _compare(site, 1)

    def run(st: State) -> None:
        r = outcome(st)
        if extra is not None:
            r = extra[0](r, extra[1](st))
        put(st, np.where(r, true, td.dt.type(0)))

    return run


def testp(site: Site) -> Op:
    """testp.finite/infinite/number/notanumber/normal/subnormal."""
    t = site.t
    small = np.finfo(t.dt).tiny
    tests: dict[str, Fn1] = {
        "finite": np.isfinite, "infinite": np.isinf, "number": lambda x: x == x,
        "notanumber": lambda x: x != x,
        "normal": lambda x: np.isfinite(x) & ((np.abs(x) >= small) | (x == 0)),
        "subnormal": lambda x: (np.abs(x) < small) & (x != 0),
    }  # fmt: skip
    name = next((m for m in site.mods if m in tests), None)
    if name is None:
        raise site.error()
    fn = tests[name]
    return site.unary(fn, t, PRED)


FLOAT_OPS: dict[str, Callable[[Site], Op]] = {
    "add": by_type(basic, INT_OPS["add"]), "sub": by_type(basic, INT_OPS["sub"]),
    "mul": by_type(basic, INT_OPS["mul"]), "mad": by_type(fma, INT_OPS["mad"]), "fma": fma,
    "div": by_type(div, INT_OPS["div"]), "rem": INT_OPS["rem"],
    **{name: INT_OPS[name] for name in ("addc", "subc", "madc", "mul24", "mad24", "sad")},
    "neg": by_type(sign, INT_OPS["neg"]),
    "abs": by_type(sign, INT_OPS["abs"]), "copysign": sign, "min": by_type(extreme, INT_OPS["min"]),
    "max": by_type(extreme, INT_OPS["max"]), "rcp": approximate, "sqrt": approximate,
    "rsqrt": approximate, "ex2": approximate, "lg2": approximate, "sin": approximate,
    "cos": approximate, "tanh": approximate, "setp": setp, "set": set_, "testp": testp,
}  # fmt: skip
