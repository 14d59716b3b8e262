"""cvt and cvta as C (PTX ISA 9.7.9)."""

from __future__ import annotations

from ..operands import SPACES, TYPES, U32, Type
from .floating import MODES, after, in_mode, mode_of
from .values import Emit, Unknown, Words, unsigned

INTEGRAL = {"rni": "nearbyint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


def _source(w: Words, frm: Type) -> str:
    """The source as a number of C."""
    if frm.name in ("f16", "bf16"):
        return f"from_{'half' if frm.name == 'f16' else 'bf16'}({w.a(1, TYPES['b16'])})"
    return w.a(1, frm)


def cvt(w: Words) -> str:
    """cvt with one source, or two packed into .f16x2/.bf16x2, or cvt.pack."""
    if w.has("pack"):
        return _pack_integers(w)
    w.only("ftz", "sat", "relu", "rn", "rna", *MODES, *INTEGRAL)
    if len(w.types) != 2:
        raise w.error("cvt needs two types")
    to, frm = w.types
    if to.name in ("f16x2", "bf16x2"):
        low, high = (_narrow(w, to.name[:-2], w.a(n, TYPES["f32"])) for n in (2, 1))
        return w.d(f"(uint32_t){high} << 16 | {low}", U32)
    if to.kind in "fx" and frm.kind in "fx":
        return _float_float(w, to, frm)
    if frm.kind in "fx":
        return _float_int(w, to, frm)
    return _int_float(w, to, frm) if to.kind in "fx" else _int_int(w, to, frm)


def _narrow(w: Words, to: str, value: str, wide: bool = False) -> str:
    """A number, exact or rounded to odd, as f16 or bf16; `wide`: it is a double."""
    for mod, clamp in (("sat", "saturate"), ("relu", "relu")):
        value = f"{clamp}({value})" if w.has(mod) else value
    name = "half" if to == "f16" else "bf16"
    if mode := mode_of(w):
        return f"{name}_in({value}, {mode})"
    if to == "bf16":
        return f"to_bf16({f'odd_float({value})' if wide else value})"
    return f"{'to' if wide else 'narrow'}_half({value})"


def _pack_integers(w: Words) -> str:
    """cvt.pack.sat: two saturated integers, above the lower part of c where there is one."""
    name = next(m for m in w.mods if m not in ("pack", "sat"))
    bits = int(name[1:])
    top = 1 << bits - 1
    low, high = (-top, top - 1) if name[0] == "s" else (0, 2 * top - 1)
    s32 = TYPES["s32"]

    def cut(n: int) -> str:
        x = w.a(n, s32)
        return f"((uint32_t)({x} < {low} ? {low} : {x} > {high} ? {high} : {x}) & {2 * top - 1:#x})"

    if bits == 32:
        raise Unknown
    rest = f" | {w.a(3, U32)} << {2 * bits}" if len(w.i.args) > 3 else ""
    return w.d(f"{cut(1)} << {bits} | {cut(2)}{rest}", U32)


def _float_float(w: Words, to: Type, frm: Type) -> str:
    integral = next((INTEGRAL[m] for m in w.mods if m in INTEGRAL), "")
    x, mode = _source(w, frm), mode_of(w)
    if to.name == "tf32":
        return w.d(f"to_tf32({w.a(1, U32)})", U32)
    if "x" in (to.kind, frm.kind) and not {to.name, frm.name} <= {"bf16", "f32", "f64", "f16"}:
        raise Unknown
    if w.has("ftz") and frm.name in ("f32", "bf16") and to.name != "f16":
        x = f"flush({x})"
    if integral:
        x = f"{integral}{'' if frm.name == 'f64' else 'f'}({x})"
    if to.name == "bf16" or (to.name == "f16" and frm.name != "f64"):
        return w.d(_narrow(w, to.name, x, frm.name == "f64"), to)
    if frm.name == "f64" and to.name in ("f16", "f32"):  # a NaN keeps what fits of its payload
        if to.name == "f16":
            nan = "0" if w.has("sat") else "half_of_nan(y)"
            put = w.d(f"y != y ? {nan} : {_narrow(w, 'f16', 'y', True)}", to)
        else:
            near = in_mode(mode, "float", "(float){}", "y")
            put = w.d(after(w, f"(y != y ? float_of_nan(y) : {near})"), to)
        return f"{{ double y = {x}; {put} }}"
    if to.name == "f64":
        x = f"canon({x})" if w.has("ftz") and frm.name == "f32" else x
        return w.d(f"saturate((double){x})" if w.has("sat") else f"(double){x}", to)
    plain = frm.name in ("f32", "bf16") and not integral and not w.has("ftz", "relu")
    return w.d(after(w, x if plain else f"canon({x})"), to)


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
    if to.name in ("f16", "bf16"):
        exact = f"odd_{frm.kind}64({x})" if frm.bits == 64 else f"(double){x}"
        return w.d(_narrow(w, to.name, exact, True), to)
    if to.name not in ("f32", "f64"):
        raise Unknown
    value = in_mode(mode_of(w), _c(to), f"({_c(to)}){{}}", x)
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
        raise w.error("no state space")
    base = w.frame.symbol("base", space)
    u = TYPES[f"u{w.t.bits}"]
    return w.d(f"({unsigned(u.bits)})({w.a(1, u)} {'-' if w.has('to') else '+'} {base})", u)


CONVERSIONS: dict[str, Emit] = {"cvt": cvt, "cvta": cvta}
