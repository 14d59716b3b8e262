"""Integers, bits and moves as C (PTX ISA 9.7.1, 9.7.2, 9.7.8, 9.7.9)."""

from __future__ import annotations

from ..operands import PRED, TYPES, U32, PtxType
from ..parser.syntax import DestinationPair, Imm, Vec
from . import floating as fl
from .operand_writer import Emit, OperandWriter, unsigned_c_type

S32 = TYPES["s32"]


def _promoted_type(t: PtxType) -> str:
    return unsigned_c_type(max(32, t.bits))


# integers


def _emit_add_sub(w: OperandWriter) -> str:
    t, op = w.type, w.i.op
    sign = "-" if op.startswith("sub") else "+"
    if t.kind in "fx":
        return fl.emit_float_operation(w, f"{{}} {sign} {{}}", 2)
    w.refuse_other_modifiers("cc", "sat")
    u = TYPES[f"u{t.bits}"]
    if w.has_modifier("cc") or op in ("addc", "subc"):
        return _emit_with_carry(w, f"{op[:3]}_carry{t.bits}({w.arg(1, u)}, {w.arg(2, u)}", u)
    if w.has_modifier("sat"):
        return w.result_assignment(f"clamp_s32((int64_t){w.arg(1)} {sign} {w.arg(2)})")
    return w.result_assignment(
        f"({_promoted_type(t)}){w.arg(1)} {sign} ({_promoted_type(t)}){w.arg(2)}"
    )


def _emit_with_carry(w: OperandWriter, call: str, u: PtxType) -> str:
    """A sum or difference that takes and gives the carry flag as its instruction says."""
    flag = w.kernel.carry_register()
    taken = w.operand_expression(flag, U32) if w.i.op.endswith("c") else "0"
    given = w.assignment(flag, U32, "out") if w.has_modifier("cc") else ""
    return f"{{ uint32_t out; {w.result_assignment(f'{call}, {taken}, &out)', u)} {given} }}"


def _product_and_type(w: OperandWriter, t: PtxType) -> tuple[str, PtxType]:
    """Product of operands 1 and 2, and its type."""
    u = TYPES[f"u{t.bits}"]
    if w.has_modifier("wide", "hi"):
        if t.bits == 64:
            big = "__int128" if t.kind == "s" else "unsigned __int128"
            return f"(uint64_t)((({big}){w.arg(1)} * {w.arg(2)}) >> 64)", t
        wide = TYPES[f"{t.kind}{2 * t.bits}"]
        both = f"(({'' if t.kind == 's' else 'u'}int{2 * t.bits}_t){w.arg(1)} * {w.arg(2)})"
        return (both, wide) if w.has_modifier("wide") else (f"({both} >> {t.bits})", t)
    if not w.has_modifier("lo"):
        raise w.make_error("mul needs .lo, .hi or .wide")
    c_type = _promoted_type(t)
    return f"(({c_type}){w.arg(1, u)} * ({c_type}){w.arg(2, u)})", t


def _emit_mul(w: OperandWriter) -> str:
    if w.type.kind in "fx":
        return fl.emit_float_operation(w, "{} * {}", 2)
    value, t = _product_and_type(w, w.type)
    return w.result_assignment(value, t)


def _emit_mad(w: OperandWriter) -> str:
    if w.type.kind in "fx":
        return fl.emit_fma(w)
    value, t = _product_and_type(w, w.type)
    wide, u = _promoted_type(t), TYPES[f"u{t.bits}"]
    if w.has_modifier("cc") or w.i.op == "madc":
        return _emit_with_carry(w, f"add_carry{t.bits}({value}, {w.arg(3, u)}", u)
    if w.has_modifier("sat"):
        return w.result_assignment(f"saturated({value}, {w.arg(3)})")
    return w.result_assignment(f"({wide}){value} + ({wide}){w.arg(3, u)}", t)


def _emit_mul24(w: OperandWriter) -> str:
    part = "signed24" if w.type.kind == "s" else "unsigned24"
    high = " >> 16" if w.has_modifier("hi") else ""
    value = f"(uint32_t)({part}({w.arg(1, U32)}) * {part}({w.arg(2, U32)}){high})"
    if w.i.op == "mul24":
        return w.result_assignment(value)
    return w.result_assignment(
        f"saturated({value}, {w.arg(3)})" if w.has_modifier("sat") else f"{value} + {w.arg(3, U32)}"
    )


def _emit_div_rem(w: OperandWriter) -> str:
    t = w.type
    if t.kind in "fx":
        return fl.emit_div(w)
    return w.result_assignment(
        f"{'s' if t.kind == 's' else 'u'}{w.i.op}{t.bits}({w.arg(1)}, {w.arg(2)})"
    )


def _emit_min_max(w: OperandWriter) -> str:
    t, op = w.type, w.i.op
    if t.kind in "fx":
        return fl.emit_min_max(w)
    if t.kind not in "us" or w.has_modifier("relu"):
        raise w.make_error("min and max need a signed or unsigned type")
    sign = "<" if op == "min" else ">"
    put = w.result_assignment(f"x {sign} y ? x : y")
    return f"{{ __auto_type x = {w.arg(1)}; __auto_type y = {w.arg(2)}; {put} }}"


def _emit_neg_abs(w: OperandWriter) -> str:
    t = w.type
    if t.kind in "fx":
        return fl.emit_neg_abs_copysign(w)
    u = TYPES[f"u{t.bits}"]
    x = f"({_promoted_type(t)}){w.arg(1, u)}"
    return w.result_assignment(f"0 - {x}" if w.i.op == "neg" else f"{w.arg(1)} < 0 ? 0 - {x} : {x}")


def _emit_sad(w: OperandWriter) -> str:
    u = TYPES[f"u{w.type.bits}"]
    x, y = w.arg(1), w.arg(2)
    wide = f"({_promoted_type(u)})"
    gap = f"({x} > {y} ? {wide}{x} - {wide}{y} : {wide}{y} - {wide}{x})"
    return w.result_assignment(f"{gap} + {w.arg(3, u)}")


def _emit_dot_product(w: OperandWriter) -> str:
    """dp4a, dp2a: products of 8-bit parts, of dp2a with 16-bit parts, summed onto c."""
    ta, tb = w.types[0], w.types[1]
    two = w.i.op == "dp2a"
    width, first = (16, 2 * w.has_modifier("hi")) if two else (8, 0)
    parts = []
    for k in range(2 if two else 4):
        x = f"({'u' if ta.kind == 'u' else ''}int{width}_t)({w.arg(1, U32)} >> {width * k})"
        y = f"({'u' if tb.kind == 'u' else ''}int8_t)({w.arg(2, U32)} >> {8 * (k + first)})"
        parts.append(f"(int32_t)({x}) * (int32_t)({y})")
    out = TYPES["s32" if "s" in (ta.kind, tb.kind) else "u32"]
    return w.result_assignment(f"(uint32_t)({' + '.join(parts)}) + {w.arg(3, U32)}", out)


# bits and moves


def _emit_logic(w: OperandWriter) -> str:
    op, t = w.i.op, w.type
    if op == "not":
        return w.result_assignment(f"!{w.arg(1)}" if t.name == "pred" else f"~{w.arg(1)}")
    if op == "cnot":
        return w.result_assignment(f"{w.arg(1)} == 0")
    return w.result_assignment(f"{w.arg(1)} {fl.BOOL[op]} {w.arg(2)}")


def _emit_lop3(w: OperandWriter) -> str:
    table = w.integer_literal_or_none(4)
    kind = next((m for m in w.mods if m in ("and", "or")), None)
    if table is None:
        raise w.make_error("the table must be a literal")
    if isinstance(w.i.args[0], DestinationPair) and kind is None:
        raise w.make_error("a predicate needs .and or .or")
    if kind is not None and not isinstance(w.i.args[0], DestinationPair):
        raise w.make_error("two destinations are needed")
    terms = []
    for row in range(8):
        if table >> row & 1:
            names = (f"{'' if row & bit else '~'}{v}" for bit, v in ((4, "x"), (2, "y"), (1, "z")))
            terms.append(f"({' & '.join(names)})")
    ins = "".join(f"uint32_t {v} = {w.arg(n, U32)}; " for n, v in ((1, "x"), (2, "y"), (3, "z")))
    value, d = " | ".join(terms) or "0", w.i.args[0]
    if not isinstance(d, DestinationPair):
        return f"{{ {ins}{w.result_assignment(value, U32)} }}"
    test = f"(v != 0) {'|' if w.has_modifier('or') else '&'} {w.arg(5, PRED)}"
    puts = f"{w.assignment(d.first, U32, 'v')} {w.assignment(d.second, PRED, 't')}"
    return f"{{ {ins}uint32_t v = {value}; uint8_t t = {test}; {puts} }}"


def _emit_shift(w: OperandWriter) -> str:
    t, left = w.type, w.i.op == "shl"
    x, by = w.arg(1), w.arg(2, U32)
    if not left and t.kind == "s":
        moved = f"{x} >> (y < {t.bits} ? y : {t.bits - 1})"
    else:
        moved = f"y < {t.bits} ? ({_promoted_type(t)}){x} {'<<' if left else '>>'} y : 0"
    return f"{{ uint32_t y = {by}; {w.result_assignment(moved)} }}"


def _emit_funnel_shift(w: OperandWriter) -> str:
    by = f"uint32_t y = {w.arg(3, U32)}; "
    by += "y = y < 32 ? y : 32; " if w.has_modifier("clamp") else "y &= 31; "
    pair = f"uint64_t x = (uint64_t){w.arg(2, U32)} << 32 | {w.arg(1, U32)}; "
    moved = "x << y >> 32" if w.has_modifier("l") else "x >> y"
    return f"{{ {by}{pair}{w.result_assignment(moved, U32)} }}"


def _emit_popc_clz_brev_bfind(w: OperandWriter) -> str:
    t, op = w.type, w.i.op
    u, end = TYPES[f"u{t.bits}"], "ll" if t.bits == 64 else ""
    if op == "popc":
        return w.result_assignment(f"__builtin_popcount{end}({w.arg(1, u)})", U32)
    if op == "clz":
        value = w.result_assignment(f"x ? __builtin_clz{end}(x) : {t.bits}", U32)
        return f"{{ {unsigned_c_type(t.bits)} x = {w.arg(1, u)}; {value} }}"
    if op == "brev":
        return w.result_assignment(f"reverse{t.bits}({w.arg(1, u)})", u)
    turn = "x = x >> (sizeof x * 8 - 1) ? ~x : x; " if t.kind == "s" else ""
    above = "" if w.has_modifier("shiftamt") else f"{t.bits - 1} - "
    value = w.result_assignment(f"x ? {above}__builtin_clz{end}(x) : 0xFFFFFFFFu", U32)
    return f"{{ {unsigned_c_type(t.bits)} x = {w.arg(1, u)}; {turn}{value} }}"


def _emit_bfe_bfi(w: OperandWriter) -> str:
    t = TYPES[f"u{w.type.bits}"]
    if w.i.op == "bfi":
        places = f"{w.arg(3, U32)}, {w.arg(4, U32)}"
        return w.result_assignment(f"insert_{t.name}({w.arg(1, t)}, {w.arg(2, t)}, {places})", t)
    sign = "s" if w.type.kind == "s" else "u"
    return w.result_assignment(
        f"field_{sign}{t.bits}({w.arg(1, t)}, {w.arg(2, U32)}, {w.arg(3, U32)})", t
    )


_PRMT = {
    "f4e": "n + {k}", "b4e": "(n - {k}) & 7", "rc8": "n", "ecl": "n > {k} ? n : {k}",
    "ecr": "n < {k} ? n : {k}", "rc16": "(n & 1) * 2 + ({k} & 1)",
}  # fmt: skip


def _emit_prmt(w: OperandWriter) -> str:
    mode = next((m for m in w.mods if m in _PRMT), "")
    if not mode:
        return w.result_assignment(
            f"permute({w.arg(1, U32)}, {w.arg(2, U32)}, {w.arg(3, U32)})", U32
        )
    control = " | ".join(f"({_PRMT[mode].format(k=k)}) << {4 * k}" for k in range(4))
    put = w.result_assignment(f"permute({w.arg(1, U32)}, {w.arg(2, U32)}, {control})", U32)
    return f"{{ uint32_t n = {w.arg(3, U32)} & 3; {put} }}"


def _emit_bmsk_szext_fns(w: OperandWriter) -> str:
    """bmsk, szext, fns."""
    x, y, t = w.arg(1, U32), w.arg(2, U32), w.type
    if w.i.op == "fns":
        return w.result_assignment(f"nth_one({x}, {y}, {w.arg(3, S32)})", U32)
    if w.i.op == "bmsk":
        pair = f"{x} & 31, {y} & 31" if w.has_modifier("wrap") else f"{x}, {y}"
        return w.result_assignment(f"ones_from({pair})", U32)
    return w.result_assignment(
        f"extend_{t.name}({x}, {f'{y} & 31' if w.has_modifier('wrap') else y})", U32
    )


def _emit_mov(w: OperandWriter) -> str:
    w.refuse_other_modifiers()
    t = w.type
    d, s = w.i.args[0], w.i.args[1]
    wide = TYPES[f"u{t.bits}"] if t.kind != "p" else PRED
    if isinstance(s, Vec):
        part = t.bits // len(s.items)
        values = (
            f"({unsigned_c_type(t.bits)}){w.operand_expression(x, TYPES[f'u{part}'])} << {part * k}"
            for k, x in enumerate(s.items)
        )
        return w.result_assignment(" | ".join(values), wide)
    if isinstance(d, Vec):
        part = t.bits // len(d.items)
        puts = (
            w.assignment(x, TYPES[f"u{part}"], f"x >> {part * k}") for k, x in enumerate(d.items)
        )
        return f"{{ {unsigned_c_type(t.bits)} x = {w.arg(1, wide)}; {' '.join(puts)} }}"
    if t.name not in ("f32", "f64") or (isinstance(s, Imm) and s.kind == "int"):
        t = wide
    return w.result_assignment(w.arg(1, t), t)


def _emit_selp(w: OperandWriter) -> str:
    t = w.type if w.type.name in ("f32", "f64") else TYPES[f"u{w.type.bits}"]
    return w.result_assignment(f"{w.arg(3, PRED)} ? {w.arg(1, t)} : {w.arg(2, t)}", t)


def _emit_slct(w: OperandWriter) -> str:
    t, tc = w.types
    c = f"flush({w.arg(3, tc)})" if w.has_modifier("ftz") else w.arg(3, tc)
    t = t if t.name in ("f32", "f64") else TYPES[f"u{t.bits}"]
    return w.result_assignment(f"{c} >= 0 ? {w.arg(1, t)} : {w.arg(2, t)}", t)


ARITHMETIC: dict[str, Emit] = {
    **dict.fromkeys(("add", "sub", "addc", "subc"), _emit_add_sub), "mul": _emit_mul,
    "mad": _emit_mad, "madc": _emit_mad, "mul24": _emit_mul24, "mad24": _emit_mul24,
    "div": _emit_div_rem, "rem": _emit_div_rem, "min": _emit_min_max, "max": _emit_min_max,
    "neg": _emit_neg_abs, "abs": _emit_neg_abs, "sad": _emit_sad, "dp4a": _emit_dot_product,
    "dp2a": _emit_dot_product, **dict.fromkeys(("and", "or", "xor", "not", "cnot"), _emit_logic),
    "lop3": _emit_lop3, "shl": _emit_shift, "shr": _emit_shift, "shf": _emit_funnel_shift,
    **dict.fromkeys(("popc", "clz", "brev", "bfind"), _emit_popc_clz_brev_bfind),
    **dict.fromkeys(("bmsk", "szext", "fns"), _emit_bmsk_szext_fns),
    **dict.fromkeys(("bfe", "bfi"), _emit_bfe_bfi),
    "prmt": _emit_prmt, "mov": _emit_mov, "selp": _emit_selp, "slct": _emit_slct,
}  # fmt: skip
