"""Instructions that all lanes of a group do together as C: of whole warps, atomics, mbarriers.

Each is a call of groups.h that first looks whether everything is right, and else does nothing:
lanes may name others than are here with them, addresses lead nowhere.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..operands import HINTS, SPACES, TYPES, literal_value, state_space
from ..parser.syntax import (
    Addr,
    DestinationPair,
    Imm,
    NegatedPredicate,
    Operand,
    Reg,
    SpecialRegister,
    SymbolAddress,
)
from .memory import SPACE, base_and_offset
from .operand_writer import CLOCKS, OperandWriter, UnknownFormError

Place = Callable[[int], str]
"""The memory of a register, "0" for one that nobody reads."""
Writer = Callable[[Place], str]
"""C of a call, or of an argument, from the places of registers."""
HERE = "(Source){0, HERE}"
"""The membermask of an instruction without one."""
_COMBINE = ("add", "min", "max", "and", "or", "xor")
_ATOMIC = {name: f"A_{name.upper()}" for name in (*_COMBINE, "exch", "inc", "dec", "cas")}


def source_writer(w: OperandWriter, arg: Operand | None, bits: int) -> Writer:
    """A register of `bits` or a literal as a Source."""
    if isinstance(arg, Reg) and arg.bits == bits:
        index = arg.index
        return lambda place: f"(Source){{{place(index)}, 0}}"
    if isinstance(arg, Imm):
        word = np.asarray(literal_value(arg, TYPES[f"u{bits}"], w)).reshape(1)
        raw = int(word.view(f"u{word.itemsize}")[0])
        return lambda place: f"(Source){{0, {raw:#x}ull}}"
    if isinstance(arg, SpecialRegister) and not arg.name.startswith(tuple(CLOCKS)):
        number = w.frame.special_register_number(arg.name)
        return lambda place: f"special(c, {number})"
    if isinstance(arg, SymbolAddress):
        address = w.variable_address_expression(arg, bits)
        return lambda place: f"(Source){{0, {address}}}"
    raise UnknownFormError


def address_writer(w: OperandWriter, n: int) -> Writer:
    """Operand n, an address, as a Place of groups.h."""
    arg = w.require_operand(n)
    if not isinstance(arg, Addr):
        raise UnknownFormError
    base, offset = base_and_offset(w, arg)
    if isinstance(base, str):
        return lambda place: f"(Place){{{{0, {base}}}, 1, {offset:#x}ull}}"
    source, bits = source_writer(w, base, base.bits), base.bits
    offset &= (1 << bits) - 1
    return lambda place: f"(Place){{{source(place)}, {int(bits == 64)}, {offset:#x}ull}}"


def _predicate_writer(arg: Operand | None) -> Writer:
    """A predicate as a Flag."""
    if isinstance(arg, NegatedPredicate):
        index = arg.reg.index
        return lambda place: f"(Flag){{{place(index)}, 1}}"
    if isinstance(arg, Reg) and arg.bits == 1:
        number = arg.index
        return lambda place: f"(Flag){{{place(number)}, 0}}"
    if isinstance(arg, Imm):
        inverted = int(arg.value != 0)
        return lambda place: f"(Flag){{0, {inverted}}}"
    raise UnknownFormError


def result_place_writer(arg: Operand | None, bits: int) -> Writer:
    """Text of the place of a result."""
    arg = arg.first if isinstance(arg, DestinationPair) else arg
    if arg is None:
        return lambda place: "0"
    if not isinstance(arg, Reg) or arg.bits != bits:
        raise UnknownFormError
    index = arg.index
    return lambda place: place(index)


def _membermask_writer(w: OperandWriter, n: int) -> Writer:
    if not w.has_modifier("sync"):
        return lambda place: HERE
    return source_writer(w, w.require_operand(n), 32)


def _emit_shfl(w: OperandWriter) -> Writer:
    mode = next((m for m in ("up", "down", "bfly", "idx") if w.has_modifier(m)), None)
    d, source = w.i.args[0], w.i.args[1]
    first, second = (d.first, d.second) if isinstance(d, DestinationPair) else (d, None)
    if mode is None or not isinstance(source, Reg):
        raise UnknownFormError
    parts = (
        result_place_writer(first, 32), result_place_writer(second, 1),
        source_writer(w, source, 32), source_writer(w, w.require_operand(2), 32),
        source_writer(w, w.require_operand(3), 32), _membermask_writer(w, 4),
    )  # fmt: skip
    return lambda place: _call_text(f"shuffle(c, S_{mode.upper()}", parts, place)


def _call_text(head: str, parts: tuple[Writer, ...], place: Place) -> str:
    return ", ".join([head, *(part(place) for part in parts)]) + ")"


def _emit_vote(w: OperandWriter) -> Writer:
    mode = next((m for m in ("all", "any", "uni", "ballot") if w.has_modifier(m)), None)
    if mode is None:
        raise UnknownFormError
    parts = (
        result_place_writer(w.i.args[0], 32 if mode == "ballot" else 1),
        _predicate_writer(w.require_operand(1)),
        _membermask_writer(w, 2),
    )
    return lambda place: _call_text(f"vote(c, V_{mode.upper()}", parts, place)


def _emit_redux(w: OperandWriter) -> Writer:
    op = next((m for m in _COMBINE if w.has_modifier(m)), None)
    if op is None or w.type.bits != 32 or w.has_modifier("abs", "NaN") or w.type.kind not in "usb":
        raise UnknownFormError
    parts = (
        result_place_writer(w.i.args[0], 32),
        source_writer(w, w.require_operand(1), 32),
        _membermask_writer(w, 2),
    )
    kind = f"A_{op.upper()}, {int(w.type.kind == 's')}"
    return lambda place: _call_text(f"reduce(c, {kind}", parts, place)


def _atomic_kind(w: OperandWriter, op: str | None) -> str:
    """The kind of an atomic: of sums of floats, or of integers."""
    kinds = {"f16": "H", "f16x2": "H", "bf16": "B", "f32": "F", "f64": "F"}
    if w.type.name in kinds and op == "add":
        return f"K_{kinds[w.type.name]}"
    if w.type.kind not in "usb":
        raise UnknownFormError
    return "K_S" if w.type.kind == "s" else "K_U"


NOTHING = "(Source){0, 0}"


def _emit_atomic(w: OperandWriter) -> Writer:
    """atom and red."""
    red = w.i.op == "red"
    op = next((m for m in w.mods if m in _ATOMIC), None)
    space = SPACE.get(state_space(w))
    if (
        op is None
        or space is None
        or w.type.bits not in (16, 32, 64)
        or w.has_modifier("v2", "v4", "v8")
    ):
        raise UnknownFormError
    w.refuse_other_modifiers(*HINTS, *SPACES, op, "noftz")
    first, bits = 1 if red else 2, w.type.bits
    where = address_writer(w, first - 1)
    parts = (
        (lambda place: "0") if red else result_place_writer(w.i.args[0], bits),
        where,
        source_writer(w, w.require_operand(first), bits),
        source_writer(w, w.require_operand(first + 1), bits)
        if op == "cas"
        else lambda place: NOTHING,
    )
    head = f"{_tell_atomic_text(w)}atomic{bits}(c, {_ATOMIC[op]}, {_atomic_kind(w, op)}, '{space}'"
    return lambda place: _call_text(head.replace("@", where(place)), parts, place)


def _tell_atomic_text(w: OperandWriter, size: int = 0) -> str:
    """C that tells the sanitizer of an atomic at @ before it is done."""
    if not w.frame.watched:
        return ""
    size = size or w.type.bits // 8
    return f"tell_atomic(c, {w.frame.site_number(w.i)}, '{SPACE[state_space(w)]}', @, {size}) && "


def emit_mbarrier(w: OperandWriter) -> Writer:
    """init, inval, arrive, arrive_drop, test_wait, try_wait."""
    generic = int(state_space(w) == "generic")
    if w.has_modifier("init", "inval"):
        count = (
            source_writer(w, w.require_operand(1), 32)
            if w.has_modifier("init")
            else lambda place: NOTHING
        )
        parts, head = (address_writer(w, 0), count), f"barrier_init(c, {generic}"
        if not w.frame.watched:
            return lambda place: _call_text(head, parts, place)
        tell = f"tell_init(c, {w.frame.site_number(w.i)}, '{SPACE[state_space(w)]}'"
        return lambda place: f"{_call_text(tell, parts, place)} && {_call_text(head, parts, place)}"
    if w.has_modifier("test_wait", "try_wait"):
        parity, where = w.has_modifier("parity"), address_writer(w, 1)
        tests = (
            result_place_writer(w.i.args[0], 1),
            where,
            source_writer(w, w.require_operand(2), 32 if parity else 64),
        )
        head = f"{_tell_atomic_text(w, 8)}barrier_test(c, {generic}, {int(parity)}"

        def text(place: Place) -> str:
            test = _call_text(head.replace("@", where(place)), tests, place)
            ended = tests[0](place)
            tell = w.frame.watched and ended != "0"
            return f"{test} && tell_lanes(c, 'p', {ended})" if tell else test

        return text
    if not w.has_modifier("arrive", "arrive_drop") or w.has_modifier("expect_tx"):
        raise UnknownFormError
    return _arrival_writer(w)


def _arrival_writer(w: OperandWriter) -> Writer:
    at = 0 if len(w.i.args) == 1 else 1
    one, where = "(Source){0, 1}", address_writer(w, at)
    given = (
        source_writer(w, w.require_operand(at + 1), 32)
        if len(w.i.args) > at + 1
        else lambda place: one
    )
    parts = result_place_writer(w.i.args[0], 64) if at else lambda place: "0", where, given
    fence = f"tell_fence(c, {w.frame.site_number(w.i)}) && " if w.frame.watched else ""
    generic, drops = int(state_space(w) == "generic"), int(w.has_modifier("arrive_drop"))
    head = fence + _tell_atomic_text(w, 8) + f"barrier_arrive(c, {generic}, {drops}"
    return lambda place: _call_text(head.replace("@", where(place)), parts, place)


def _emit_activemask(w: OperandWriter) -> Writer:
    place_of = result_place_writer(w.i.args[0], 32)
    return lambda place: _call_text("active(c", (place_of,), place)


def _emit_match(w: OperandWriter) -> Writer:
    d = w.i.args[0]
    first, second = (d.first, d.second) if isinstance(d, DestinationPair) else (d, None)
    parts = (
        result_place_writer(first, 32), result_place_writer(second, 1),
        source_writer(w, w.require_operand(1), w.type.bits), _membermask_writer(w, 2),
    )  # fmt: skip
    head = f"match(c, {int(w.has_modifier('all'))}, {int(w.type.bits == 64)}"
    return lambda place: _call_text(head, parts, place)


def _emit_warp_barrier(w: OperandWriter) -> Writer:
    """bar.warp.sync, of which the sanitizer keeps the order."""
    mask, tell = (
        source_writer(w, w.require_operand(0), 32),
        " && tell_meeting(c, @)" if w.frame.watched else "",
    )
    return lambda place: f"!odd_warps(c, @){tell}".replace("@", mask(place))


def _emit_cp_async(w: OperandWriter) -> Writer:
    """cp.async, its commits, waits and arrivals at an mbarrier."""
    told = "_told" if w.frame.watched else ""
    if w.has_modifier("mbarrier"):
        return _emit_cp_async_arrive(w, f"end_copies{told}(c, -1{', 1' if told else ''}) && ")
    if w.has_modifier("commit_group"):
        return lambda place: "commit_copies(c)"
    if w.has_modifier("wait_group", "wait_all"):
        keep = -1 if w.has_modifier("wait_all") else w.integer_literal_or_none(0)
        if keep is None:
            raise UnknownFormError
        return lambda place: f"end_copies{told}(c, {keep}{', 0' if told else ''})"
    size = w.integer_literal_or_none(2)
    if not w.has_modifier("shared", "shared::cta") or not w.has_modifier("global"):
        raise UnknownFormError
    if size not in (4, 8, 16) or (w.has_modifier("cg") and size != 16):
        raise w.make_error("cp-size must be 4, 8 or 16 (.cg: 16)")
    real = (
        source_writer(w, w.require_operand(3), 32)
        if len(w.i.args) > 3
        else lambda place: f"(Source){{0, {size}}}"
    )
    parts = address_writer(w, 0), address_writer(w, 1), real
    tell = f" && tell_copies(c, {w.frame.site_number(w.i)})" if told else ""
    return lambda place: _call_text(f"begin_copies(c, {size}", parts, place) + tell


def _emit_cp_async_arrive(w: OperandWriter, land: str) -> Writer:
    """cp.async.mbarrier.arrive: the copies land at once, the earliest that may be.

    Without .noinc, the barrier expects one arrival more, which the landed copies make.
    """
    if (
        not w.has_modifier("async")
        or not w.has_modifier("arrive")
        or w.has_modifier("shared::cluster")
    ):
        raise UnknownFormError
    if w.has_modifier("noinc"):
        arrives = _arrival_writer(w)
        return lambda place: land + arrives(place)
    generic, place_of = int(state_space(w) == "generic"), address_writer(w, 0)
    return lambda place: f"{land}barriers(c, {generic}, {place_of(place)})"


GROUPS: dict[str, Callable[[OperandWriter], Writer]] = {
    "shfl": _emit_shfl, "vote": _emit_vote, "redux": _emit_redux, "activemask": _emit_activemask,
    "match": _emit_match, "atom": _emit_atomic, "red": _emit_atomic, "bar": _emit_warp_barrier,
    "barrier": _emit_warp_barrier, "cp": _emit_cp_async, "mbarrier": emit_mbarrier,
}  # fmt: skip
