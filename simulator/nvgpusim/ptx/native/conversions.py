"""cvt and cvta as calls of c/numbers.h, which rounds (PTX ISA 9.7.9)."""

from __future__ import annotations

from ..operands import SPACES, TYPES, U32, PtxType
from .floating import MODES, in_rounding_mode, number_as_half, rounding_mode, with_result_modifiers
from .memory import c_type_of
from .operand_writer import Emit, OperandWriter, UnknownFormError, unsigned_c_type

INTEGRAL = {"rni": "nearbyint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


def _source_as_number(w: OperandWriter, frm: PtxType) -> str:
    """The source as a number of C."""
    if frm.name in ("f16", "bf16"):
        return f"from_{'half' if frm.name == 'f16' else 'bf16'}({w.arg(1, TYPES['b16'])})"
    return w.arg(1, frm)


def emit_cvt(w: OperandWriter) -> str:
    """cvt with one source, or two packed into .f16x2/.bf16x2, or cvt.pack."""
    if w.has_modifier("pack"):
        return _emit_packed_integers(w)
    w.refuse_other_modifiers("ftz", "sat", "relu", "rn", "rna", *MODES, *INTEGRAL)
    if len(w.types) != 2:
        raise w.make_error("cvt needs two types")
    to, frm = w.types
    if to.name in ("f16x2", "bf16x2"):
        low, high = (number_as_half(w, to.name[:-2], w.arg(n, TYPES["f32"])) for n in (2, 1))
        return w.result_assignment(f"(uint32_t){high} << 16 | {low}", U32)
    if to.kind in "fx" and frm.kind in "fx":
        return _emit_float_to_float(w, to, frm)
    if frm.kind in "fx":
        return _emit_float_to_int(w, to, frm)
    return _emit_int_to_float(w, to, frm) if to.kind in "fx" else _emit_int_to_int(w, to, frm)


def _emit_packed_integers(w: OperandWriter) -> str:
    """cvt.pack.sat: two saturated integers, above the lower part of c where there is one."""
    name = next(m for m in w.mods if m not in ("pack", "sat"))
    bits = int(name[1:])
    top = 1 << bits - 1
    low, high = (-top, top - 1) if name[0] == "s" else (0, 2 * top - 1)
    s32 = TYPES["s32"]

    def cut(n: int) -> str:
        x = w.arg(n, s32)
        return f"((uint32_t)({x} < {low} ? {low} : {x} > {high} ? {high} : {x}) & {2 * top - 1:#x})"

    if bits == 32:
        raise UnknownFormError
    rest = f" | {w.arg(3, U32)} << {2 * bits}" if len(w.i.args) > 3 else ""
    return w.result_assignment(f"{cut(1)} << {bits} | {cut(2)}{rest}", U32)


def _emit_float_to_float(w: OperandWriter, to: PtxType, frm: PtxType) -> str:
    integral = next((INTEGRAL[m] for m in w.mods if m in INTEGRAL), "")
    x, mode = _source_as_number(w, frm), rounding_mode(w)
    if to.name == "tf32":
        return w.result_assignment(f"to_tf32({w.arg(1, U32)})", U32)
    if "x" in (to.kind, frm.kind) and not {to.name, frm.name} <= {"bf16", "f32", "f64", "f16"}:
        raise UnknownFormError
    if w.has_modifier("ftz") and frm.name in ("f32", "bf16") and to.name != "f16":
        x = f"flush({x})"
    if integral:
        x = f"{integral}{'' if frm.name == 'f64' else 'f'}({x})"
    if to.name == "bf16" or (to.name == "f16" and frm.name != "f64"):
        return w.result_assignment(number_as_half(w, to.name, x, frm.name == "f64"), to)
    if frm.name == "f64" and to.name in ("f16", "f32"):  # a NaN keeps what fits of its payload
        if to.name == "f16":
            nan = "0" if w.has_modifier("sat") else "half_of_nan(y)"
            put = w.result_assignment(f"y != y ? {nan} : {number_as_half(w, 'f16', 'y', True)}", to)
        else:
            near = in_rounding_mode(mode, "float", "(float){}", "y")
            put = w.result_assignment(
                with_result_modifiers(w, f"(y != y ? float_of_nan(y) : {near})"), to
            )
        return f"{{ double y = {x}; {put} }}"
    if to.name == "f64":
        x = f"canon({x})" if w.has_modifier("ftz") and frm.name == "f32" else x
        return w.result_assignment(
            f"saturate((double){x})" if w.has_modifier("sat") else f"(double){x}", to
        )
    plain = frm.name in ("f32", "bf16") and not integral and not w.has_modifier("ftz", "relu")
    return w.result_assignment(with_result_modifiers(w, x if plain else f"canon({x})"), to)


def _emit_float_to_int(w: OperandWriter, to: PtxType, frm: PtxType) -> str:
    integral = next((INTEGRAL[m] for m in w.mods if m in INTEGRAL), "trunc")
    x = _source_as_number(w, frm)
    if w.has_modifier("ftz") and frm.name == "f32":
        x = f"flush({x})"
    u, top = unsigned_c_type(to.bits), 1 << to.bits - 1
    low, high = (-top, top - 1) if to.kind == "s" else (0, 2 * top - 1)
    nan = top if 64 in (frm.bits, to.bits) else 0
    kind = f"{'' if to.kind == 's' else 'u'}int{to.bits}_t"
    ends = (
        f"y >= {float(high)!r} ? ({u}){high & 2 * top - 1:#x}ull : "
        f"y <= {float(low)!r} ? ({u}){low & 2 * top - 1:#x}ull : ({u})({kind})y"
    )
    value = f"y != y ? ({u}){nan:#x}ull : {ends}"
    return f"{{ double y = {integral}((double){x}); {w.result_assignment(value, to)} }}"


def _emit_int_to_float(w: OperandWriter, to: PtxType, frm: PtxType) -> str:
    x = w.arg(1, frm)
    if to.name in ("f16", "bf16"):
        exact = f"odd_{frm.kind}64({x})" if frm.bits == 64 else f"(double){x}"
        return w.result_assignment(number_as_half(w, to.name, exact, True), to)
    if to.name not in ("f32", "f64"):
        raise UnknownFormError
    value = in_rounding_mode(rounding_mode(w), c_type_of(to), f"({c_type_of(to)}){{}}", x)
    return w.result_assignment(f"saturate({value})" if w.has_modifier("sat") else value, to)


def _emit_int_to_int(w: OperandWriter, to: PtxType, frm: PtxType) -> str:
    if not w.has_modifier("sat"):
        return w.result_assignment(w.arg(1, frm), to)
    low = max(-(1 << to.bits - 1) if to.kind == "s" else 0, -(1 << frm.bits - 1))
    high = min((1 << to.bits - (to.kind == "s")) - 1, (1 << frm.bits - (frm.kind == "s")) - 1)
    kind = f"{'' if frm.kind == 's' else 'u'}int{frm.bits}_t"
    up = f"x < ({kind}){low & (1 << 64) - 1:#x}ull ? ({kind}){low & (1 << 64) - 1:#x}ull : "
    cut = f"{up if frm.kind == 's' else ''}x > ({kind}){high:#x}ull ? ({kind}){high:#x}ull : x"
    return f"{{ {kind} x = {w.arg(1, frm)}; {w.result_assignment(cut, to)} }}"


def emit_cvta(w: OperandWriter) -> str:
    """Generic addresses from and to those of a space."""
    space = next((m for m in w.mods if m in SPACES), None)
    if space is None:
        raise w.make_error("no state space")
    base = w.frame.symbol_expression("base", space)
    u = TYPES[f"u{w.type.bits}"]
    return w.result_assignment(
        f"({unsigned_c_type(u.bits)})({w.arg(1, u)} {'-' if w.has_modifier('to') else '+'} {base})",
        u,
    )


CONVERSIONS: dict[str, Emit] = {"cvt": emit_cvt, "cvta": emit_cvta}
