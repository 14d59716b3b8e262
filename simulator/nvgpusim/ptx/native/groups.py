"""Instructions that all lanes of a group do together as C: of whole warps, and atomics.

Each is a call of groups.h that first looks whether everything is plain, and else does nothing, so
that the interpreter runs the instruction: lanes that name others than are here with them, memory
that needs a look.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..instructions.lower import TYPES, literal
from ..instructions.mem import space_of
from ..parser.syntax import Addr, Imm, Neg, Operand, Pair, Reg
from .memory import base_of
from .values import Unknown, Words

Place = Callable[[int], str]
"""The memory of a register, "0" for one that nobody reads."""
HERE = "(Source){0, HERE}"
"""The membermask of an instruction without one."""
_COMBINE = ("add", "min", "max", "and", "or", "xor")
_ATOMIC = {name: f"A_{name.upper()}" for name in (*_COMBINE, "exch", "inc", "dec", "cas")}


class Group(NamedTuple):
    """A call: what makes its text from the places of registers."""

    text: Callable[[Place], str]


def column(w: Words, arg: Operand | None, bits: int) -> Callable[[Place], str]:
    """A register of `bits` or a literal as a Source."""
    if isinstance(arg, Reg) and arg.bits == bits:
        index = arg.index
        return lambda place: f"(Source){{{place(index)}, 0}}"
    if isinstance(arg, Imm):
        word = np.asarray(literal(arg, TYPES[f"u{bits}"], w)).reshape(1)
        raw = int(word.view(f"u{word.itemsize}")[0])
        return lambda place: f"(Source){{0, {raw:#x}ull}}"
    raise Unknown


def address_of(w: Words, arg: Addr) -> tuple[Callable[[Place], str], int, int]:
    """The base of an address as a Source, whether it has 64 bits, and what is added to it."""
    base, offset = base_of(w, arg)
    if isinstance(base, str):
        return (lambda place: f"(Source){{0, {base}}}"), 1, offset
    return column(w, base, base.bits), int(base.bits == 64), offset & (1 << base.bits) - 1


def _flag(arg: Operand | None) -> Callable[[Place], str]:
    """A predicate as a Flag."""
    if isinstance(arg, Neg):
        index = arg.reg.index
        return lambda place: f"(Flag){{{place(index)}, 1}}"
    if isinstance(arg, Reg) and arg.bits == 1:
        number = arg.index
        return lambda place: f"(Flag){{{place(number)}, 0}}"
    raise Unknown


def goal(arg: Operand | None, bits: int) -> Callable[[Place], str]:
    """Text of the place of a result."""
    if arg is None:
        return lambda place: "0"
    if not isinstance(arg, Reg) or arg.bits != bits:
        raise Unknown
    index = arg.index
    return lambda place: place(index)


def _mask(w: Words, n: int) -> Callable[[Place], str]:
    if not w.has("sync"):
        return lambda place: HERE
    return column(w, w.arg(n), 32)


def _shfl(w: Words) -> Group:
    mode = next((m for m in ("up", "down", "bfly", "idx") if w.has(m)), None)
    d, source = w.i.args[0], w.i.args[1]
    first, second = (d.first, d.second) if isinstance(d, Pair) else (d, None)
    if mode is None or not isinstance(source, Reg):
        raise Unknown
    parts = (
        goal(first, 32), goal(second, 1), column(w, source, 32), column(w, w.arg(2), 32),
        column(w, w.arg(3), 32), _mask(w, 4),
    )  # fmt: skip
    return Group(lambda place: _call(f"shuffle(c, S_{mode.upper()}", parts, place))


def _call(head: str, parts: tuple[Callable[[Place], str], ...], place: Place) -> str:
    return ", ".join([head, *(part(place) for part in parts)]) + ")"


def _vote(w: Words) -> Group:
    mode = next((m for m in ("all", "any", "uni", "ballot") if w.has(m)), None)
    if mode is None:
        raise Unknown
    parts = goal(w.i.args[0], 32 if mode == "ballot" else 1), _flag(w.arg(1)), _mask(w, 2)
    return Group(lambda place: _call(f"vote(c, V_{mode.upper()}", parts, place))


def _redux(w: Words) -> Group:
    op = next((m for m in _COMBINE if w.has(m)), None)
    if op is None or w.t.bits != 32 or w.has("abs", "NaN") or w.t.kind not in "usb":
        raise Unknown
    parts = goal(w.i.args[0], 32), column(w, w.arg(1), 32), _mask(w, 2)
    kind = f"A_{op.upper()}, {int(w.t.kind == 's')}"
    return Group(lambda place: _call(f"reduce(c, {kind}", parts, place))


def _atom(w: Words) -> Group:
    """Atomics of 32 and 64 bits on integers, and sums of f32."""
    red = w.i.op == "red"
    op = next((m for m in w.mods if m in _ATOMIC), None)
    arg, t = w.i.args[0 if red else 1], w.t
    space = {"global": "g", "shared": "s", "generic": "a"}.get(space_of(w))
    real = t.name == "f32" and op == "add"
    if op is None or space is None or t.bits not in (32, 64) or not (real or t.kind in "usb"):
        raise Unknown
    if w.has("v2", "v4", "v8"):
        raise Unknown
    if not isinstance(arg, Addr):
        raise Unknown
    address, wide, offset = address_of(w, arg)
    first = 1 if red else 2
    none: Callable[[Place], str] = lambda place: "(Source){0, 0}"  # noqa: E731
    parts = (
        (lambda place: "0") if red else goal(w.i.args[0], t.bits),
        address,
        column(w, w.arg(first), t.bits),
        column(w, w.arg(first + 1), t.bits) if op == "cas" else none,
    )
    kind = "F" if real else "S" if t.kind == "s" else "U"
    head = f"atomic{t.bits}(c, {_ATOMIC[op]}, K_{kind}, '{space}', {wide}, {offset:#x}ull"
    if not w.frame.watched:
        return Group(lambda place: _call(head, parts, place))
    tell = f"tell_atomic(c, {w.frame.site(w.i)}, '{space}', "
    ends = f", {wide}, {offset:#x}ull}}, {t.bits // 8}) && "
    return Group(lambda place: f"{tell}(Place){{{address(place)}{ends}{_call(head, parts, place)}")


def _active(w: Words) -> Group:
    place_of = goal(w.i.args[0], 32)
    return Group(lambda place: _call("active(c", (place_of,), place))


def _match(w: Words) -> Group:
    d = w.i.args[0]
    first, second = (d.first, d.second) if isinstance(d, Pair) else (d, None)
    parts = (
        goal(first, 32), goal(second, 1), column(w, w.arg(1), w.t.bits), _mask(w, 2),
    )  # fmt: skip
    head = f"match(c, {int(w.has('all'))}, {int(w.t.bits == 64)}"
    return Group(lambda place: _call(head, parts, place))


def _warp_barrier(w: Words) -> Group:
    """bar.warp.sync, of which the sanitizer keeps the order."""
    if not w.has("warp"):
        raise Unknown
    mask = column(w, w.arg(0), 32)
    if not w.frame.watched:
        return Group(lambda place: f"!odd_warps(c, {mask(place)})")
    return Group(lambda place: f"!odd_warps(c, {mask(place)}) && tell_meeting(c, {mask(place)})")


def _copies(w: Words) -> Group:
    """cp.async, its commits and waits."""
    if w.has("mbarrier"):
        raise Unknown
    if w.has("commit_group"):
        return Group(lambda place: "commit_copies(c)")
    if w.has("wait_group", "wait_all"):
        keep = -1 if w.has("wait_all") else w.constant(0)
        if keep is None:
            raise Unknown
        told = "_told" if w.frame.watched else ""
        return Group(lambda place: f"end_copies{told}(c, {keep})")
    size, (dst, src) = w.constant(2), w.i.args[:2]
    given = w.arg(3) if len(w.i.args) > 3 else None
    if size not in (4, 8, 16) or not isinstance(dst, Addr) or not isinstance(src, Addr):
        raise Unknown
    if given is not None and not isinstance(given, Reg):
        raise Unknown
    ends = [address_of(w, arg) for arg in (dst, src)]
    real = (lambda place: "(Source){0, 0}") if given is None else column(w, given, 32)
    number = w.kernel.instrs.index(w.i)
    site = w.frame.site(w.i) if w.frame.watched else 0

    def text(place: Place) -> str:
        to, frm = (f"(Place){{{base(place)}, {wide}, {off:#x}ull}}" for base, wide, off in ends)
        begin = f"begin_copies(c, {size}, {number}, {to}, {frm}, {real(place)})"
        return begin + (f" && tell_copies(c, {site})" if site else "")

    return Group(text)


GROUPS: dict[str, Callable[[Words], Group]] = {
    "shfl": _shfl, "vote": _vote, "redux": _redux, "activemask": _active, "match": _match,
    "atom": _atom, "red": _atom, "bar": _warp_barrier, "barrier": _warp_barrier, "cp": _copies,
}  # fmt: skip
