"""Floating point and comparisons as C (PTX ISA 9.7.3 to 9.7.6)."""

from __future__ import annotations

from collections.abc import Callable

from ..operands import PRED, TYPES, U32
from ..parser.syntax import DestinationPair
from .operand_writer import Emit, OperandWriter, UnknownFormError

MODES = {"rz": "FE_TOWARDZERO", "rm": "FE_DOWNWARD", "rp": "FE_UPWARD"}
"""Rounding modes but to nearest, as fenv.h calls them."""


def rounding_mode(w: OperandWriter) -> str:
    """The mode of fenv.h that an instruction rounds in, "" for to nearest."""
    return next((MODES[m] for m in w.mods if m in MODES), "")


def in_rounding_mode(mode: str, kind: str, form: str, *values: str) -> str:
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


def with_result_modifiers(w: OperandWriter, value: str) -> str:
    """A float32 result with .ftz, .sat and .relu."""
    return _with_clamps(w, f"flush({value})" if w.has_modifier("ftz") else value)


def _with_clamps(w: OperandWriter, value: str) -> str:
    if w.has_modifier("sat"):
        value = f"saturate({value})"
    return f"relu({value})" if w.has_modifier("relu") else value


def _input_expressions(w: OperandWriter, count: int) -> list[str]:
    values = [w.arg(n + 1) for n in range(count)]
    return (
        [f"flush({v})" for v in values]
        if w.has_modifier("ftz") and w.type.name == "f32"
        else values
    )


NANS = {"div": (0, 1), "fma": (1, 2, 0), "mad": (1, 2, 0)}
"""Operands whose NaN is the result's, first ones first; others (1, 0)."""


def _emit_float64(w: OperandWriter, mode: str, form: str, count: int) -> str:
    """A float64 result, with the NaN that the GPU gives."""
    if w.has_modifier("sat", "ftz", "relu"):
        raise UnknownFormError
    ins = [w.arg(n + 1) for n in range(count)]
    order = [ins[n] for n in NANS.get(w.i.op, (1, 0)) if n < count]
    nan = f"nan64({', '.join([*order, order[-1], order[-1]][:3])})"
    put = w.result_assignment(f"unlikely(y != y) ? {nan} : y")
    return f"{{ double y = {in_rounding_mode(mode, 'double', form, *ins)}; {put} }}"


def emit_float_operation(w: OperandWriter, form: str, count: int, wide: str = "") -> str:
    """An operation of C on float32 or float64, on halves through float32.

    `wide`: the operation on halves whose result is a float64, rounded to odd.
    """
    w.refuse_other_modifiers(
        "ftz", "sat", "relu", "approx", "full", "NaN", "xorsign", "abs", "rn", *MODES
    )
    name, mode = w.type.name, rounding_mode(w)
    if name == "f32":
        return w.result_assignment(
            with_result_modifiers(
                w, f"canon({in_rounding_mode(mode, 'float', form, *_input_expressions(w, count))})"
            )
        )
    if name == "f64":
        return _emit_float64(w, mode, form, count)
    if mode:
        raise UnknownFormError

    def one(part: str, *bits: str) -> str:
        numbers = (half_as_float(w, part, b) for b in bits)
        half = number_as_half(w, part, (wide or form).format(*numbers), bool(wide))
        return f"flush_half({half})" if part == "f16" and w.has_modifier("ftz") else half

    return _emit_halves(w, count, one)


def half_as_float(w: OperandWriter, part: str, bits: str) -> str:
    """An f16 or bf16 as a float."""
    if part == "bf16":
        return f"from_bf16({bits})"
    return f"from_half({f'flush_half({bits})' if w.has_modifier('ftz') else bits})"


def number_as_half(w: OperandWriter, part: str, value: str, wide: bool = False) -> str:
    """A number, exact or rounded to odd, as f16 or bf16; `wide`: it is a double."""
    value = _with_clamps(w, value)
    if mode := rounding_mode(w):
        return f"{'half' if part == 'f16' else 'bf16'}_in({value}, {mode})"
    if part == "bf16":
        return f"to_bf16({f'odd_float({value})' if wide else value})"
    return f"{'to' if wide else 'narrow'}_half({value})"


def _emit_halves(w: OperandWriter, count: int, one: Callable[..., str]) -> str:
    """A function of f16 or bf16 on its type or on both parts of its packed type."""
    name = w.type.name
    if name in ("f16", "bf16"):
        return w.result_assignment(one(name, *(w.arg(n + 1, TYPES["b16"]) for n in range(count))))
    if name not in ("f16x2", "bf16x2"):
        raise UnknownFormError
    parts = []
    for by in (0, 16):
        ins = [f"(uint16_t)({w.arg(n + 1, U32)} >> {by})" for n in range(count)]
        parts.append(f"(uint32_t){one(name[:-2], *ins)}")
    return w.result_assignment(f"{parts[0]} | {parts[1]} << 16")


def emit_fma(w: OperandWriter) -> str:
    """fma, and mad of floats."""
    form = f"fma{'f' if w.type.bits == 32 else ''}({{}}, {{}}, {{}})"
    return emit_float_operation(w, form, 3, "fma_odd({}, {}, {})")


def emit_div(w: OperandWriter) -> str:
    """div of floats."""
    if w.type.kind == "x" or w.type.bits == 16:
        raise UnknownFormError
    return emit_float_operation(w, "{} / {}", 2)


def emit_min_max(w: OperandWriter) -> str:
    """min and max of floats, two or three of them."""
    op = w.i.op
    if w.type.name == "f64":
        return w.result_assignment(f"{op}_f64({w.arg(1)}, {w.arg(2)})")
    form = f"{op}{'_nan' * w.has_modifier('NaN')}_f32({{}}, {{}})"
    if w.has_modifier("xorsign"):
        form = f"xorsign({{0}}, {{1}}, {form.format('fabsf({0})', 'fabsf({1})')})"
    if len(w.i.args) < 4:
        return emit_float_operation(w, form, 2)
    if w.type.name != "f32":
        raise UnknownFormError
    x, y, z = _input_expressions(w, 3)
    both = with_result_modifiers(w, f"canon({form.format(x, y)})")
    return w.result_assignment(with_result_modifiers(w, f"canon({form.format(both, z)})"))


def emit_neg_abs_copysign(w: OperandWriter) -> str:
    """neg, abs and copysign of floats."""
    t, op = w.type, w.i.op
    if t.name not in ("f32", "f64"):
        prefix = "flush_half" if w.has_modifier("ftz") and t.name.startswith("f16") else ""
        return _emit_halves(w, 1, lambda part, x: f"{op}_{part}({prefix}({x}))")
    u = TYPES[f"u{t.bits}"]
    one = "1ull" if t.bits == 64 else "1u"
    top = f"({one} << {t.bits - 1})"
    if op == "copysign":
        return w.result_assignment(f"{w.arg(2, u)} & ~{top} | {w.arg(1, u)} & {top}", u)
    raw = f"as_u{t.bits}({w.arg(1)})"
    bits = f"{raw} ^ {top}" if op == "neg" else f"{raw} & ~{top}"
    if t.bits == 64:
        return w.result_assignment(f"{w.arg(1)} != {w.arg(1)} ? {raw} | 1ull << 51 : {bits}", u)
    if not w.has_modifier("ftz"):
        return w.result_assignment(bits, u)
    return w.result_assignment(f"canon({'-' if op == 'neg' else 'fabsf'}(flush({w.arg(1)})))")


FTZ_NAN = 0x7FFFFFFF00000000
"""The NaN of rcp.approx.ftz.f64 and rsqrt.approx.ftz.f64."""
_LIBRARY = {"ex2": "exp2", "lg2": "log2", "sin": "sin", "cos": "cos", "tanh": "tanh"}


def emit_special_function(w: OperandWriter) -> str:
    """rcp, sqrt, rsqrt, ex2, lg2, sin, cos, tanh."""
    op, name = w.i.op, w.type.name
    root = "sqrt{f}({{}})" if op == "sqrt" else "1{f} / {{}}"
    if name == "f64":
        if op == "rsqrt" or w.has_modifier("approx"):
            return _emit_approx_float64(w)
        if op not in ("rcp", "sqrt"):
            raise UnknownFormError
        return emit_float_operation(w, root.format(f="" if op == "sqrt" else ".0"), 1)
    if op in ("rcp", "sqrt") and not w.has_modifier("approx"):
        return emit_float_operation(w, root.format(f="f" if op == "sqrt" else ".0f"), 1)
    if rounding_mode(w):
        raise UnknownFormError
    if op in ("rcp", "sqrt", "rsqrt"):
        wide = {"rcp": "1.0 / {}", "sqrt": "sqrt({})", "rsqrt": "1.0 / sqrt({})"}[op]
        return emit_float_operation(w, f"(float)({wide.format('(double)({})')})", 1)
    return emit_float_operation(w, f"canon((float){_LIBRARY[op]}({{}}))", 1)


def _emit_approx_float64(w: OperandWriter) -> str:
    """rcp.approx and rsqrt.approx of float64: the upper word of the exact result."""
    if not w.has_modifier("approx") or w.i.op == "sqrt":
        raise UnknownFormError
    value = f"upper_word({'1.0 / y' if w.i.op == 'rcp' else '1.0 / sqrt(y)'})"
    if not w.has_modifier("ftz"):
        put = w.result_assignment(f"y != y || y < 0 ? nan64(y, y, y) : {value}")
        return f"{{ double y = {w.arg(1)}; {put} }}"
    put = w.result_assignment(f"y != y ? as_f64({FTZ_NAN:#x}) : flush64(y)")
    return f"{{ double y = flush64({w.arg(1)}); y = {value}; {put} }}"


def emit_testp(w: OperandWriter) -> str:
    """testp of float32 and float64."""
    tests = {
        "finite": "isfinite(x)", "infinite": "isinf(x)", "number": "x == x",
        "notanumber": "x != x", "normal": "isnormal(x) || x == 0",
        "subnormal": "x != 0 && isfinite(x) && !isnormal(x)",
    }  # fmt: skip
    test = next((tests[m] for m in w.mods if m in tests), None)
    if test is None or w.type.name not in ("f32", "f64"):
        raise UnknownFormError
    return f"{{ __auto_type x = {w.arg(1)}; {w.result_assignment(f'!!({test})', PRED)} }}"


# comparisons

ORDERED = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=",
    "hi": ">", "hs": ">=",
}  # fmt: skip
BOOL = {"and": "&", "or": "|", "xor": "^"}
TRUE = {"f16": 0x3C00, "bf16": 0x3F80, "f32": 0x3F800000, "f16x2": 0x3C003C00,
        "bf16x2": 0x3F803F80}  # fmt: skip
"""The value that set writes where the comparison holds; all ones for integers."""


def _comparison_operand(w: OperandWriter, n: int, by: int) -> str:
    t = w.type
    if t.name in ("f16", "bf16"):
        return half_as_float(w, t.name, w.arg(n, TYPES["b16"]))
    if t.name in ("f16x2", "bf16x2"):
        return half_as_float(w, t.name[:-2], f"(uint16_t)({w.arg(n, U32)} >> {by})")
    if t.kind == "x":
        raise UnknownFormError
    return f"flush({w.arg(n)})" if w.has_modifier("ftz") and t.name == "f32" else w.arg(n)


def _comparison_expression(w: OperandWriter, by: int = 0) -> str:
    """The outcome of a comparison; of packed halves that of the one `by` bits up."""
    mods = [m for m in w.mods if m in ORDERED or m in ("num", "nan") or m[:-1] in ORDERED]
    name, real = mods[0], w.type.kind in "fx"
    if name in ("num", "nan"):
        test = "x == x && y == y" if name == "num" else "x != x || y != y"
    elif name in ORDERED:
        test = f"x {ORDERED[name]} y"
        if real and name == "ne":
            test += " && x == x && y == y"
    elif real and name.endswith("u"):
        test = f"x {ORDERED[name[:-1]]} y || x != x || y != y"
    else:
        raise UnknownFormError
    x, y = _comparison_operand(w, 1, by), _comparison_operand(w, 2, by)
    return f"({{ __auto_type x = {x}; __auto_type y = {y}; (uint8_t)({test}); }})"


def _comparison_and_combiner(w: OperandWriter) -> tuple[str, str]:
    """Statements that leave a comparison's outcomes in p and q, and what combines them with c."""
    second = _comparison_expression(w, 16) if w.type.name.endswith("x2") else "!p"
    head = f"uint8_t p = {_comparison_expression(w)}; uint8_t q = {second};"
    kind = next((m for m in w.mods if m in BOOL), None)
    if kind is None:
        return head, ""
    return f"{head} uint8_t z = {w.arg(3, PRED)};", f" {BOOL[kind]} z"


def emit_setp(w: OperandWriter) -> str:
    """setp with one or two destinations; packed types give one for each half."""
    test, more = _comparison_and_combiner(w)
    d = w.i.args[0]
    first, second = (d.first, d.second) if isinstance(d, DestinationPair) else (d, None)
    puts = w.assignment(first, PRED, f"p{more}"), w.assignment(second, PRED, f"q{more}")
    return f"{{ {test} {puts[0]} {puts[1]} }}"


def emit_set(w: OperandWriter) -> str:
    """set: all ones or 1.0 where the comparison holds; packed sources fill a half each."""
    td = w.types[0]
    test, more = _comparison_and_combiner(w)
    true = TRUE.get(td.name, (1 << td.bits) - 1)
    if w.type.name.endswith("x2"):
        value = f"((p{more}) ? 0xFFFFu : 0) | ((q{more}) ? 0xFFFF0000u : 0)"
        return f"{{ {test} {w.result_assignment(f'({value}) & {true:#x}', TYPES[f'u{td.bits}'])} }}"
    return (
        f"{{ {test} {w.result_assignment(f'(p{more}) ? {true:#x}u : 0', TYPES[f'u{td.bits}'])} }}"
    )


FLOATING: dict[str, Emit] = {
    "fma": emit_fma, "copysign": emit_neg_abs_copysign, "testp": emit_testp, "setp": emit_setp,
    "set": emit_set, **dict.fromkeys(("rcp", "sqrt", "rsqrt", *_LIBRARY), emit_special_function),
}  # fmt: skip
