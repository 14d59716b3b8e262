"""Instructions that all lanes of a group do together as C: of whole warps, atomics, mbarriers.

Each is a call of groups.h that first looks whether everything is right, and else does nothing:
lanes may name others than are here with them, addresses lead nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..operands import HINTS, SPACES, TYPES, literal, space_of
from ..parser.syntax import Addr, Imm, Neg, Operand, Pair, Reg, Special, Sym
from .memory import SPACE, base_of
from .values import CLOCKS, Unknown, Words

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
    if isinstance(arg, Special) and not arg.name.startswith(tuple(CLOCKS)):
        number = w.frame.special(arg.name)
        return lambda place: f"special(c, {number})"
    if isinstance(arg, Sym):
        address = w.address_of(arg, bits)
        return lambda place: f"(Source){{0, {address}}}"
    raise Unknown


def address_of(w: Words, n: int) -> Callable[[Place], str]:
    """Operand n, an address, as a Place of groups.h."""
    arg = w.arg(n)
    if not isinstance(arg, Addr):
        raise Unknown
    base, offset = base_of(w, arg)
    if isinstance(base, str):
        return lambda place: f"(Place){{{{0, {base}}}, 1, {offset:#x}ull}}"
    source, bits = column(w, base, base.bits), base.bits
    offset &= (1 << bits) - 1
    return lambda place: f"(Place){{{source(place)}, {int(bits == 64)}, {offset:#x}ull}}"


def _flag(arg: Operand | None) -> Callable[[Place], str]:
    """A predicate as a Flag."""
    if isinstance(arg, Neg):
        index = arg.reg.index
        return lambda place: f"(Flag){{{place(index)}, 1}}"
    if isinstance(arg, Reg) and arg.bits == 1:
        number = arg.index
        return lambda place: f"(Flag){{{place(number)}, 0}}"
    if isinstance(arg, Imm):
        inverted = int(arg.value != 0)
        return lambda place: f"(Flag){{0, {inverted}}}"
    raise Unknown


def goal(arg: Operand | None, bits: int) -> Callable[[Place], str]:
    """Text of the place of a result."""
    arg = arg.first if isinstance(arg, Pair) else arg
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


def _real(w: Words, op: str | None) -> str:
    """The kind of an atomic: of sums of floats, or of integers."""
    kinds = {"f16": "H", "f16x2": "H", "bf16": "B", "f32": "F", "f64": "F"}
    if w.t.name in kinds and op == "add":
        return f"K_{kinds[w.t.name]}"
    if w.t.kind not in "usb":
        raise Unknown
    return "K_S" if w.t.kind == "s" else "K_U"


NOTHING = "(Source){0, 0}"


def _atom(w: Words) -> Group:
    """atom and red."""
    red = w.i.op == "red"
    op = next((m for m in w.mods if m in _ATOMIC), None)
    space = SPACE.get(space_of(w))
    if op is None or space is None or w.t.bits not in (16, 32, 64) or w.has("v2", "v4", "v8"):
        raise Unknown
    w.only(*HINTS, *SPACES, op, "noftz")
    first, bits = 1 if red else 2, w.t.bits
    where = address_of(w, first - 1)
    parts = (
        (lambda place: "0") if red else goal(w.i.args[0], bits),
        where,
        column(w, w.arg(first), bits),
        column(w, w.arg(first + 1), bits) if op == "cas" else lambda place: NOTHING,
    )
    head = f"{_told(w)}atomic{bits}(c, {_ATOMIC[op]}, {_real(w, op)}, '{space}'"
    return Group(lambda place: _call(head.replace("@", where(place)), parts, place))


def _told(w: Words, size: int = 0) -> str:
    """C that tells the sanitizer of an atomic at @ before it is done."""
    if not w.frame.watched:
        return ""
    size = size or w.t.bits // 8
    return f"tell_atomic(c, {w.frame.site(w.i)}, '{SPACE[space_of(w)]}', @, {size}) && "


def mbarrier(w: Words) -> Group:
    """init, inval, arrive, arrive_drop, test_wait, try_wait."""
    generic = int(space_of(w) == "generic")
    if w.has("init", "inval"):
        count = column(w, w.arg(1), 32) if w.has("init") else lambda place: NOTHING
        parts, head = (address_of(w, 0), count), f"barrier_init(c, {generic}"
        if not w.frame.watched:
            return Group(lambda place: _call(head, parts, place))
        tell = f"tell_init(c, {w.frame.site(w.i)}, '{SPACE[space_of(w)]}'"
        return Group(lambda place: f"{_call(tell, parts, place)} && {_call(head, parts, place)}")
    if w.has("test_wait", "try_wait"):
        parity, where = w.has("parity"), address_of(w, 1)
        tests = goal(w.i.args[0], 1), where, column(w, w.arg(2), 32 if parity else 64)
        head = f"{_told(w, 8)}barrier_test(c, {generic}, {int(parity)}"

        def text(place: Place) -> str:
            test = _call(head.replace("@", where(place)), tests, place)
            ended = tests[0](place)
            tell = w.frame.watched and ended != "0"
            return f"{test} && tell_lanes(c, 'p', {ended})" if tell else test

        return Group(text)
    if not w.has("arrive", "arrive_drop") or w.has("expect_tx"):
        raise Unknown
    return Group(_arrival(w))


def _arrival(w: Words) -> Callable[[Place], str]:
    at = 0 if len(w.i.args) == 1 else 1
    one, where = "(Source){0, 1}", address_of(w, at)
    given = column(w, w.arg(at + 1), 32) if len(w.i.args) > at + 1 else lambda place: one
    parts = goal(w.i.args[0], 64) if at else lambda place: "0", where, given
    fence = f"tell_fence(c, {w.frame.site(w.i)}) && " if w.frame.watched else ""
    head = f"barrier_arrive(c, {int(space_of(w) == 'generic')}, {int(w.has('arrive_drop'))}"
    head = fence + _told(w, 8) + head
    return lambda place: _call(head.replace("@", where(place)), parts, place)


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
    mask, tell = column(w, w.arg(0), 32), " && tell_meeting(c, @)" if w.frame.watched else ""
    return Group(lambda place: f"!odd_warps(c, @){tell}".replace("@", mask(place)))


def _copies(w: Words) -> Group:
    """cp.async, its commits, waits and arrivals at an mbarrier."""
    told = "_told" if w.frame.watched else ""
    if w.has("mbarrier"):
        return _copies_arrive(w, f"end_copies{told}(c, -1{', 1' if told else ''}) && ")
    if w.has("commit_group"):
        return Group(lambda place: "commit_copies(c)")
    if w.has("wait_group", "wait_all"):
        keep = -1 if w.has("wait_all") else w.constant(0)
        if keep is None:
            raise Unknown
        return Group(lambda place: f"end_copies{told}(c, {keep}{', 0' if told else ''})")
    size = w.constant(2)
    if not w.has("shared", "shared::cta") or not w.has("global"):
        raise Unknown
    if size not in (4, 8, 16) or (w.has("cg") and size != 16):
        raise w.error("cp-size must be 4, 8 or 16 (.cg: 16)")
    real = column(w, w.arg(3), 32) if len(w.i.args) > 3 else lambda place: f"(Source){{0, {size}}}"
    parts = address_of(w, 0), address_of(w, 1), real
    tell = f" && tell_copies(c, {w.frame.site(w.i)})" if told else ""
    return Group(lambda place: _call(f"begin_copies(c, {size}", parts, place) + tell)


def _copies_arrive(w: Words, land: str) -> Group:
    """cp.async.mbarrier.arrive: the copies land at once, the earliest that may be.

    Without .noinc, the barrier expects one arrival more, which the landed copies make.
    """
    if not w.has("async") or not w.has("arrive") or w.has("shared::cluster"):
        raise Unknown
    if w.has("noinc"):
        arrives = _arrival(w)
        return Group(lambda place: land + arrives(place))
    generic, place_of = int(space_of(w) == "generic"), address_of(w, 0)
    return Group(lambda place: f"{land}barriers(c, {generic}, {place_of(place)})")


GROUPS: dict[str, Callable[[Words], Group]] = {
    "shfl": _shfl, "vote": _vote, "redux": _redux, "activemask": _active, "match": _match,
    "atom": _atom, "red": _atom, "bar": _warp_barrier, "barrier": _warp_barrier, "cp": _copies,
    "mbarrier": mbarrier,
}  # fmt: skip
