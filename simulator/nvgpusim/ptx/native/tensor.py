"""mma and ldmatrix as C: calls of tensor.h."""

from __future__ import annotations

from collections.abc import Callable

from ..instructions.mem import space_of
from ..instructions.warp import MMA_SHAPES
from ..parser.syntax import Addr, Operand
from .groups import Group, Place, address_of, column, goal
from .values import Unknown, Words

_ELEMENTS = {"f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "s8": 8, "u8": 8}


def _fragment(w: Words, items: list[Operand | None], kind: str, per: int) -> Callable[[Place], str]:
    bits = 64 if kind == "f64" else 32
    registers = [column(w, item, bits) for item in items]
    return lambda place: (
        f"&(Fragment){{E_{kind.upper()}, {per}, {{{', '.join(r(place) for r in registers)}}}}}"
    )


def _goals(w: Words, bits: int) -> Callable[[Place], str]:
    goals = [goal(item, bits) for item in w.items(0)]
    return lambda place: f"(void *[]){{{', '.join(g(place) for g in goals)}}}"


def mma(w: Words) -> Group:
    """mma.sync row.col of f16, bf16, tf32, f64 and 8-bit integers."""
    shape = next((m for m in w.mods if m in MMA_SHAPES), None)
    if shape is None or not w.has("row") or not w.has("col") or w.has("sp"):
        raise Unknown
    rows, depth = MMA_SHAPES[shape]
    td, ta, tb, tc = (t.name for t in w.types)
    if ta not in _ELEMENTS or tb not in _ELEMENTS or any(r is None for r in w.items(0)):
        raise Unknown
    per = (64 if ta == "f64" else 32) // _ELEMENTS[ta]
    parts = (
        _goals(w, 64 if td == "f64" else 32), _fragment(w, w.items(1), ta, per),
        _fragment(w, w.items(2), tb, per), _fragment(w, w.items(3), tc, 2 if tc == "f16" else 1),
    )  # fmt: skip
    head = f"multiply(c, {rows}, {depth}, E_{td.upper()}, {int(w.has('satfinite'))}"
    return Group(lambda place: ", ".join([head, *(part(place) for part in parts)]) + ")")


def ldmatrix(w: Words) -> Group:
    """ldmatrix .m8n8 .x1/.x2/.x4, with or without .trans."""
    items, arg = w.items(0), w.i.args[1]
    space = {"shared": "s", "generic": "a"}.get(space_of(w))
    if not isinstance(arg, Addr) or space is None or any(item is None for item in items):
        raise Unknown
    address, wide, offset = address_of(w, arg)
    goals = _goals(w, 32)
    site = w.frame.site(w.i) if w.frame.watched else 0
    head = (
        f"load_matrices(c, {len(items)}, {int(w.has('trans'))}, '{space}', {wide}, "
        f"{offset:#x}ull, {site}"
    )
    return Group(lambda place: f"{head}, {address(place)}, (uint32_t *const *){goals(place)})")


TENSOR: dict[str, Callable[[Words], Group]] = {"mma": mma, "ldmatrix": ldmatrix}
