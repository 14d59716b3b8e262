"""Video instructions as C (PTX ISA 9.7.17, 9.7.18), without lane selectors."""

from __future__ import annotations

from ..operands import U32
from .floating import ORDERED
from .operand_writer import Emit, OperandWriter, UnknownFormError

_TWO = {
    "vadd": "x + y", "vsub": "x - y", "vmin": "x < y ? x : y", "vmax": "x > y ? x : y",
    "vabsdiff": "x > y ? x - y : y - x", "vavrg": "(x + y + (x + y >= 0)) >> 1",
}  # fmt: skip


def emit_simd(w: OperandWriter) -> str:
    """vadd2 and the like: each half or quarter on its own; .add sums them up onto c."""
    w.refuse_other_modifiers("sat", "add", *ORDERED)
    op, bits = w.i.op[:-1], {"2": 16, "4": 8}[w.i.op[-1]]
    kinds = ["int" if t.kind == "s" else "uint" for t in w.types]
    compare = next((ORDERED[m] for m in w.mods if m in ORDERED), "")
    first, second = kinds if op == "vset" else kinds[1:]
    form = f"x {compare} y" if op == "vset" else _TWO[op]
    if w.has_modifier("sat") and not w.has_modifier("add"):
        top = 1 << bits - 1
        low, high = (-top, top - 1) if kinds[0] == "int" else (0, 2 * top - 1)
        form = f"({form}), r = r < {low} ? {low} : r > {high} ? {high} : r"
    lines = []
    for by in range(0, 32, bits):
        lines += [f"x = ({first}{bits}_t)(a >> {by}); y = ({second}{bits}_t)(b >> {by});"]
        added = (
            "+= r" if w.has_modifier("add") else f"|= (uint32_t)(r & {(1 << bits) - 1:#x}) << {by}"
        )
        lines += [f"r = {form}; v {added};"]
    start = w.arg(3, U32) if w.has_modifier("add") else "0"
    head = f"uint32_t a = {w.arg(1, U32)}, b = {w.arg(2, U32)}, v = {start}; int32_t x, y, r;"
    return f"{{ {head} {' '.join(lines)} {w.result_assignment('v', U32)} }}"


def emit_scalar_video(w: OperandWriter) -> str:
    """vadd, vsub, vabsdiff, vmin, vmax, vshl, vshr of whole words."""
    w.refuse_other_modifiers("clamp", "wrap")
    if len(w.i.args) != 3:
        raise UnknownFormError
    x, y = (
        f"({'' if t.kind == 's' else 'u'}int32_t){w.arg(n, U32)}"
        for n, t in enumerate(w.types[1:], 1)
    )
    form = {"vshl": "x << y", "vshr": "x >> y"}.get(w.i.op) or _TWO[w.i.op]
    by = ""
    if w.i.op in ("vshl", "vshr"):
        by = "y &= 31; " if w.has_modifier("wrap") else "y = y < 32 ? y : 32; "
    return f"{{ int64_t x = {x}, y = {y}; {by}{w.result_assignment(form, U32)} }}"


VIDEO: dict[str, Emit] = {
    **{f"{name}{k}": emit_simd for name in (*_TWO, "vset") for k in "24"},
    **dict.fromkeys(
        ("vadd", "vsub", "vabsdiff", "vmin", "vmax", "vshl", "vshr"), emit_scalar_video
    ),
}
