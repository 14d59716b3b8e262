"""cvt and cvta as C, to the bit what `instructions/cvt.py` computes."""

from __future__ import annotations

from ..instructions.lower import TYPES, Type
from ..spaces import SPACES
from .arithmetic import ROUND
from .values import Emit, Unknown, Words, unsigned

INTEGRAL = {"rni": "nearbyint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


def _source(w: Words, frm: Type) -> str:
    """The source as a number of C."""
    if frm.name in ("f16", "bf16"):
        return f"from_{'half' if frm.name == 'f16' else 'bf16'}({w.a(1, TYPES['b16'])})"
    return w.a(1, frm)


def cvt(w: Words) -> str:
    """All conversions to nearest, or to an integer."""
    if len(w.types) != 2 or w.has("pack", *ROUND):
        raise Unknown
    to, frm = w.types
    if "x" in (to.kind, frm.kind) and not {to.name, frm.name} <= {"bf16", "f32"}:
        raise Unknown
    if to.kind in "fx" and frm.kind in "fx":
        return _float_float(w, to, frm)
    if frm.kind in "fx":
        return _float_int(w, to, frm)
    return _int_float(w, to, frm) if to.kind in "fx" else _int_int(w, to, frm)


def _float_float(w: Words, to: Type, frm: Type) -> str:
    integral = next((INTEGRAL[m] for m in w.mods if m in INTEGRAL), "")
    x = _source(w, frm)
    if "f64" in (to.name, frm.name):
        if {to.name, frm.name} - {"f32", "f64"} or w.has("ftz", "sat", "relu"):
            raise Unknown
        value = f"{integral}({x})" if integral else x  # a NaN's payload is the interpreter's
        if integral and to.name == "f32":
            raise Unknown
        then = w.d(f"({_c(to)})y", to)
        return f"{{ double y = {value}; if (unlikely(y != y)) goto odd; {then} }}"
    ftz = w.has("ftz")
    if ftz and frm.name in ("f32", "bf16") and to.name != "f16":
        x = f"flush({x})"
    if integral:
        x = f"{integral}f({x})"
    if to.name == "bf16":
        if w.has("sat"):
            raise Unknown
        return w.d(f"to_bf16({f'relu({x})' if w.has('relu') else x})", to)
    if to.name == "f16":
        if w.has("sat", "relu", "ftz"):
            raise Unknown
        return w.d(f"narrow_half({x})", to)
    x = f"canon({x})"
    x = f"flush({x})" if ftz else x
    x = f"relu({x})" if w.has("relu") else x
    return w.d(f"saturate({x})" if w.has("sat") else x, to)


def _c(t: Type) -> str:
    return "float" if t.name == "f32" else "double"


def _float_int(w: Words, to: Type, frm: Type) -> str:
    integral = next((INTEGRAL[m] for m in w.mods if m in INTEGRAL), "trunc")
    x = _source(w, frm)
    if w.has("ftz") and frm.name == "f32":
        x = f"flush({x})"
    u, top = unsigned(to.bits), 1 << to.bits - 1
    low, high = (-top, top - 1) if to.kind == "s" else (0, 2 * top - 1)
    nan = top if 64 in (frm.bits, to.bits) else 0
    kind = f"{'' if to.kind == 's' else 'u'}int{to.bits}_t"
    ends = (
        f"y >= {float(high)!r} ? ({u}){high & 2 * top - 1:#x}ull : "
        f"y <= {float(low)!r} ? ({u}){low & 2 * top - 1:#x}ull : ({u})({kind})y"
    )
    value = f"y != y ? ({u}){nan:#x}ull : {ends}"
    return f"{{ double y = {integral}((double){x}); {w.d(value, to)} }}"


def _int_float(w: Words, to: Type, frm: Type) -> str:
    x = w.a(1, frm)
    if to.name == "f16":
        if w.has("sat") or frm.bits == 64:
            raise Unknown
        return w.d(f"to_half((double){x})", to)
    if to.name not in ("f32", "f64") or (w.has("sat") and to.name == "f64"):
        raise Unknown
    value = f"({_c(to)}){x}"
    return w.d(f"saturate({value})" if w.has("sat") else value, to)


def _int_int(w: Words, to: Type, frm: Type) -> str:
    if not w.has("sat"):
        return w.d(w.a(1, frm), to)
    low = max(-(1 << to.bits - 1) if to.kind == "s" else 0, -(1 << frm.bits - 1))
    high = min((1 << to.bits - (to.kind == "s")) - 1, (1 << frm.bits - (frm.kind == "s")) - 1)
    kind = f"{'' if frm.kind == 's' else 'u'}int{frm.bits}_t"
    up = f"x < ({kind}){low & (1 << 64) - 1:#x}ull ? ({kind}){low & (1 << 64) - 1:#x}ull : "
    cut = f"{up if frm.kind == 's' else ''}x > ({kind}){high:#x}ull ? ({kind}){high:#x}ull : x"
    return f"{{ {kind} x = {w.a(1, frm)}; {w.d(cut, to)} }}"


def cvta(w: Words) -> str:
    """Generic addresses from and to those of a space."""
    space = next((m for m in w.mods if m in SPACES), None)
    if space is None:
        raise Unknown
    base = w.frame.symbol("base", space)
    u = TYPES[f"u{w.t.bits}"]
    return w.d(f"({unsigned(u.bits)})({w.a(1, u)} {'-' if w.has('to') else '+'} {base})", u)


CONVERSIONS: dict[str, Emit] = {"cvt": cvt, "cvta": cvta}
