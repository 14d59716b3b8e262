"""Floating point and comparisons as C (PTX ISA 9.7.3 to 9.7.6)."""

from __future__ import annotations

from collections.abc import Callable

from ..operands import PRED, TYPES, U32
from ..parser.syntax import Pair
from .values import Emit, Unknown, Words

MODES = {"rz": "FE_TOWARDZERO", "rm": "FE_DOWNWARD", "rp": "FE_UPWARD"}
"""Rounding modes but to nearest, as fenv.h calls them."""


def mode_of(w: Words) -> str:
    """The mode of fenv.h that an instruction rounds in, "" for to nearest."""
    return next((MODES[m] for m in w.mods if m in MODES), "")


def in_mode(mode: str, kind: str, form: str, *values: str) -> str:
    """An expression of C in a rounding mode. Volatile: nothing may pass fesetround."""
    if not mode:
        return form.format(*values)
    names = [f"v{n}" for n in range(len(values))]
    given = " ".join(
        f"volatile __typeof__({v}) {n} = {v};" for n, v in zip(names, values, strict=True)
    )
    return (
        f"({{ {given} const int old = fegetround(); fesetround({mode}); "
        f"volatile {kind} v = {form.format(*names)}; fesetround(old); v; }})"
    )


def after(w: Words, value: str) -> str:
    """A float32 result with .ftz, .sat and .relu."""
    return _clamped(w, f"flush({value})" if w.has("ftz") else value)


def _clamped(w: Words, value: str) -> str:
    if w.has("sat"):
        value = f"saturate({value})"
    return f"relu({value})" if w.has("relu") else value


def _inputs(w: Words, count: int) -> list[str]:
    values = [w.a(n + 1) for n in range(count)]
    return [f"flush({v})" for v in values] if w.has("ftz") and w.t.name == "f32" else values


NANS = {"div": (0, 1), "fma": (1, 2, 0), "mad": (1, 2, 0)}
"""Operands whose NaN is the result's, first ones first; others (1, 0)."""


def _double(w: Words, mode: str, form: str, count: int) -> str:
    """A float64 result, with the NaN that the GPU gives."""
    if w.has("sat", "ftz", "relu"):
        raise Unknown
    ins = [w.a(n + 1) for n in range(count)]
    order = [ins[n] for n in NANS.get(w.i.op, (1, 0)) if n < count]
    nan = f"nan64({', '.join([*order, order[-1], order[-1]][:3])})"
    put = w.d(f"unlikely(y != y) ? {nan} : y")
    return f"{{ double y = {in_mode(mode, 'double', form, *ins)}; {put} }}"


def arithmetic(w: Words, form: str, count: int, wide: str = "") -> str:
    """An operation of C on float32 or float64, on halves through float32.

    `wide`: the operation on halves whose result is a float64, rounded to odd.
    """
    w.only("ftz", "sat", "relu", "approx", "full", "NaN", "xorsign", "abs", "rn", *MODES)
    name, mode = w.t.name, mode_of(w)
    if name == "f32":
        return w.d(after(w, f"canon({in_mode(mode, 'float', form, *_inputs(w, count))})"))
    if name == "f64":
        return _double(w, mode, form, count)
    if mode:
        raise Unknown

    def one(part: str, *bits: str) -> str:
        numbers = (number(w, part, b) for b in bits)
        return _narrowed(w, part, (wide or form).format(*numbers), bool(wide))

    return _halves(w, count, one)


def number(w: Words, part: str, bits: str) -> str:
    """An f16 or bf16 as a float."""
    if part == "bf16":
        return f"from_bf16({bits})"
    return f"from_half({f'flush_half({bits})' if w.has('ftz') else bits})"


def _narrowed(w: Words, part: str, value: str, wide: bool) -> str:
    """A float, or a double that is exact or rounded to odd, as f16 or bf16."""
    value = _clamped(w, value)
    if part == "bf16":
        return f"to_bf16({f'odd_float({value})' if wide else value})"
    half = f"{'to' if wide else 'narrow'}_half({value})"
    return f"flush_half({half})" if w.has("ftz") else half


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


def fma(w: Words) -> str:
    """fma, and mad of floats."""
    form = f"fma{'f' if w.t.bits == 32 else ''}({{}}, {{}}, {{}})"
    return arithmetic(w, form, 3, "fma_odd({}, {}, {})")


def divide(w: Words) -> str:
    """div of floats."""
    if w.t.kind == "x" or w.t.bits == 16:
        raise Unknown
    return arithmetic(w, "{} / {}", 2)


def extreme(w: Words) -> str:
    """min and max of floats, two or three of them."""
    op = w.i.op
    if w.t.name == "f64":
        return w.d(f"{op}_f64({w.a(1)}, {w.a(2)})")
    form = f"{op}{'_nan' * w.has('NaN')}_f32({{}}, {{}})"
    if w.has("xorsign"):
        form = f"xorsign({{0}}, {{1}}, {form.format('fabsf({0})', 'fabsf({1})')})"
    if len(w.i.args) < 4:
        return arithmetic(w, form, 2)
    if w.t.name != "f32":
        raise Unknown
    x, y, z = _inputs(w, 3)
    both = after(w, f"canon({form.format(x, y)})")
    return w.d(after(w, f"canon({form.format(both, z)})"))


def sign(w: Words) -> str:
    """neg, abs and copysign of floats."""
    t, op = w.t, w.i.op
    if t.name not in ("f32", "f64"):
        prefix = "flush_half" if w.has("ftz") and t.name.startswith("f16") else ""
        return _halves(w, 1, lambda part, x: f"{op}_{part}({prefix}({x}))")
    u = TYPES[f"u{t.bits}"]
    one = "1ull" if t.bits == 64 else "1u"
    top = f"({one} << {t.bits - 1})"
    if op == "copysign":
        return w.d(f"{w.a(2, u)} & ~{top} | {w.a(1, u)} & {top}", u)
    raw = f"as_u{t.bits}({w.a(1)})"
    bits = f"{raw} ^ {top}" if op == "neg" else f"{raw} & ~{top}"
    if t.bits == 64:
        return w.d(f"{w.a(1)} != {w.a(1)} ? {raw} | 1ull << 51 : {bits}", u)
    if not w.has("ftz"):
        return w.d(bits, u)
    return w.d(f"canon({'-' if op == 'neg' else 'fabsf'}(flush({w.a(1)})))")


FTZ_NAN = 0x7FFFFFFF00000000
"""The NaN of rcp.approx.ftz.f64 and rsqrt.approx.ftz.f64."""
_LIBRARY = {"ex2": "exp2", "lg2": "log2", "sin": "sin", "cos": "cos", "tanh": "tanh"}


def approximate(w: Words) -> str:
    """rcp, sqrt, rsqrt, ex2, lg2, sin, cos, tanh."""
    op, name = w.i.op, w.t.name
    root = "sqrt{f}({{}})" if op == "sqrt" else "1{f} / {{}}"
    if name == "f64":
        if op == "rsqrt" or w.has("approx"):
            return _upper(w)
        if op not in ("rcp", "sqrt"):
            raise Unknown
        return arithmetic(w, root.format(f="" if op == "sqrt" else ".0"), 1)
    if op in ("rcp", "sqrt") and not w.has("approx"):
        return arithmetic(w, root.format(f="f" if op == "sqrt" else ".0f"), 1)
    if mode_of(w):
        raise Unknown
    if op in ("rcp", "sqrt", "rsqrt"):
        wide = {"rcp": "1.0 / {}", "sqrt": "sqrt({})", "rsqrt": "1.0 / sqrt({})"}[op]
        return arithmetic(w, f"(float)({wide.format('(double)({})')})", 1)
    return arithmetic(w, f"canon((float){_LIBRARY[op]}({{}}))", 1)


def _upper(w: Words) -> str:
    """rcp.approx and rsqrt.approx of float64: the upper word of the exact result."""
    if not w.has("approx") or w.i.op == "sqrt":
        raise Unknown
    value = f"upper_word({'1.0 / y' if w.i.op == 'rcp' else '1.0 / sqrt(y)'})"
    if not w.has("ftz"):
        return f"{{ double y = {w.a(1)}; {w.d(f'y != y || y < 0 ? nan64(y, y, y) : {value}')} }}"
    put = w.d(f"y != y ? as_f64({FTZ_NAN:#x}) : flush64(y)")
    return f"{{ double y = flush64({w.a(1)}); y = {value}; {put} }}"


def testp(w: Words) -> str:
    """testp of float32 and float64."""
    tests = {
        "finite": "isfinite(x)", "infinite": "isinf(x)", "number": "x == x",
        "notanumber": "x != x", "normal": "isnormal(x) || x == 0",
        "subnormal": "x != 0 && isfinite(x) && !isnormal(x)",
    }  # fmt: skip
    test = next((tests[m] for m in w.mods if m in tests), None)
    if test is None or w.t.name not in ("f32", "f64"):
        raise Unknown
    return f"{{ __auto_type x = {w.a(1)}; {w.d(f'!!({test})', PRED)} }}"


# comparisons

ORDERED = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=",
    "hi": ">", "hs": ">=",
}  # fmt: skip
BOOL = {"and": "&", "or": "|", "xor": "^"}
TRUE = {"f16": 0x3C00, "bf16": 0x3F80, "f32": 0x3F800000, "f16x2": 0x3C003C00,
        "bf16x2": 0x3F803F80}  # fmt: skip
"""The value that set writes where the comparison holds; all ones for integers."""


def _compared(w: Words, n: int, by: int) -> str:
    t = w.t
    if t.name in ("f16", "bf16"):
        return number(w, t.name, w.a(n, TYPES["b16"]))
    if t.name in ("f16x2", "bf16x2"):
        return number(w, t.name[:-2], f"(uint16_t)({w.a(n, U32)} >> {by})")
    if t.kind == "x":
        raise Unknown
    return f"flush({w.a(n)})" if w.has("ftz") and t.name == "f32" else w.a(n)


def _outcome(w: Words, by: int = 0) -> str:
    """The outcome of a comparison; of packed halves that of the one `by` bits up."""
    mods = [m for m in w.mods if m in ORDERED or m in ("num", "nan") or m[:-1] in ORDERED]
    name, real = mods[0], w.t.kind in "fx"
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
    x, y = _compared(w, 1, by), _compared(w, 2, by)
    return f"({{ __auto_type x = {x}; __auto_type y = {y}; (uint8_t)({test}); }})"


def _outcomes(w: Words) -> tuple[str, str]:
    """Statements that leave a comparison's outcomes in p and q, and what combines them with c."""
    second = _outcome(w, 16) if w.t.name.endswith("x2") else "!p"
    head = f"uint8_t p = {_outcome(w)}; uint8_t q = {second};"
    kind = next((m for m in w.mods if m in BOOL), None)
    if kind is None:
        return head, ""
    return f"{head} uint8_t z = {w.a(3, PRED)};", f" {BOOL[kind]} z"


def setp(w: Words) -> str:
    """setp with one or two destinations; packed types give one for each half."""
    test, more = _outcomes(w)
    d = w.i.args[0]
    first, second = (d.first, d.second) if isinstance(d, Pair) else (d, None)
    return f"{{ {test} {w.put(first, PRED, f'p{more}')} {w.put(second, PRED, f'q{more}')} }}"


def set_(w: Words) -> str:
    """set: all ones or 1.0 where the comparison holds; packed sources fill a half each."""
    td = w.types[0]
    test, more = _outcomes(w)
    true = TRUE.get(td.name, (1 << td.bits) - 1)
    if w.t.name.endswith("x2"):
        value = f"((p{more}) ? 0xFFFFu : 0) | ((q{more}) ? 0xFFFF0000u : 0)"
        return f"{{ {test} {w.d(f'({value}) & {true:#x}', TYPES[f'u{td.bits}'])} }}"
    return f"{{ {test} {w.d(f'(p{more}) ? {true:#x}u : 0', TYPES[f'u{td.bits}'])} }}"


FLOATING: dict[str, Emit] = {
    "fma": fma, "copysign": sign, "testp": testp, "setp": setp, "set": set_,
    **dict.fromkeys(("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh"), approximate),
}  # fmt: skip
