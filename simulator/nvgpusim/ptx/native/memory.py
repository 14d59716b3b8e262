"""Loads and stores as C, which checks each address."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..operands import HINTS, PRED, SPACES, TYPES, PtxType, literal_value, state_space
from ..parser.syntax import Addr, Imm, Reg, SymbolAddress
from .operand_writer import Emit, OperandWriter, UnknownFormError, unsigned_c_type

ORDERED = ("volatile", "relaxed", "acquire", "release", "acq_rel", "mmio")
"""Accesses that the sanitizer orders others by; without it they are as any other."""


SPACE = {"global": "g", "shared": "s", "local": "l", "generic": "a"}
"""Letters of spaces in C."""
MISS = "@MISS@"
"""Stands for the statement that gives up at address a of an access."""


def must_be_watched_in_turn(w: OperandWriter) -> bool:
    """True for what the sanitizer must see in its turn: see `Told` of watch.h."""
    return w.frame.watched and (w.has_modifier(*ORDERED) or w.i.op in ("membar", "fence"))


def _access_type_count_space(w: OperandWriter) -> tuple[PtxType, int, str]:
    """Type (as bits unless it is a float), number of elements, state space."""
    w.refuse_other_modifiers(*HINTS, *SPACES)
    t = w.type
    t = t if t.name in ("f32", "f64") or t.kind == "s" else TYPES[f"u{t.bits}"]
    return t, next((int(m[1:]) for m in w.mods if m in ("v2", "v4", "v8")), 1), state_space(w)


def _call_parameter_or_none(w: OperandWriter, n: int) -> Reg | None:
    """The register of a call's parameter, where operand n is one."""
    arg = w.i.args[n]
    if isinstance(arg, Addr) and isinstance(arg.base, SymbolAddress) and "@" in arg.base.name:
        if w.has_modifier("v2", "v4", "v8"):
            raise w.make_error("vector parameters of calls are not supported")
        return w.kernel.call_parameter_register(arg.base.name, arg.offset, w.type.bits)
    return None


def _address_expression(w: OperandWriter, n: int) -> str:
    arg = w.require_operand(n)
    if not isinstance(arg, Addr):
        raise w.make_error(f"operand {n + 1} must be an address")
    if isinstance(arg.base, SymbolAddress):
        variable = SymbolAddress(arg.base.name, arg.offset)
        return f"(uint64_t){w.variable_address_expression(variable, 64)}"
    if isinstance(arg.base, Imm):
        return f"{(int(arg.base.value) + arg.offset) & (1 << 64) - 1:#x}ull"
    bits = arg.base.bits
    offset = f"{arg.offset & (1 << bits) - 1:#x}{'ull' if bits == 64 else 'u'}"
    return f"(uint64_t)({unsigned_c_type(bits)})({w.register_expression(arg.base)} + {offset})"


def _checked_pointer_expression(w: OperandWriter, space: str, size: int, hit: str) -> str:
    """The checked place of address a, 0 where it is not right."""
    match space:
        case "global":
            return f"global(c, {hit}, a, {size}, 0)"
        case "shared":
            return f"shared(c, block, a, {size})"
        case "local":
            return f"local(c, i, a, {size})"
        case "const":
            return f"constant(c, a, {size})"
        case "param":
            return f"parameter(c, a, {size})"
    return f"generic(c, {hit}, i, block, a, {size}, 0)"


def _pointer_declaration(w: OperandWriter, space: str, size: int) -> str:
    """Statements that declare q, the place of address a."""
    if w.frame.watched and space in SPACE:
        site = w.frame.site_number(w.i)
        before = {
            "global": "HIT, &og, i", "shared": "&os, i, block", "local": "i",
            "generic": "HIT, &og, &os, i, block",
        }[space]  # fmt: skip
        where = f"load_{space}(c, {before}, a, {size}, {site})"
        if must_be_watched_in_turn(w):
            where = f"load_told(c, i, '{SPACE[space]}', a, {size}, {site})"
        if "HIT" in where:
            where = where.replace("HIT", w.frame.new_mapping_slot_expression())
        return f"const uint8_t *q = {where}; if (unlikely(!q)) {MISS}"
    hit = w.frame.new_mapping_slot_expression() if space in ("global", "generic") else ""
    where = _checked_pointer_expression(w, space, size, hit)
    if space == "global":
        near = f"likely(hit({hit}, a, {size})) ? ({hit})->base + (a - ({hit})->start)"
        where = f"{near} : {where}"
    return f"const uint8_t *q = {where}; if (unlikely(!q)) {MISS}"


def c_type_of(t: PtxType) -> str:
    """The C type of a value of a PTX type."""
    if t.kind == "f":
        return "float" if t.bits == 32 else "double"
    return f"int{t.bits}_t" if t.kind == "s" else unsigned_c_type(t.bits)


def emit_load(w: OperandWriter) -> str:
    """ld: scalar and vector, kernel and call parameters."""
    if (slot := _call_parameter_or_none(w, 1)) is not None:
        return w.result_assignment(w.operand_expression(slot, w.type))
    t, count, space = _access_type_count_space(w)
    size, items = t.bits // 8, w.operand_items(0)
    if len(items) != count:
        raise w.make_error(f"{count} destinations are needed")
    puts = []
    for k, item in enumerate(items):
        puts.append(
            f"{{ {c_type_of(t)} v; memcpy(&v, q + {size * k}, {size}); "
            f"{w.assignment(item, t, 'v')} }}"
        )
    arg = w.i.args[1]
    if space == "param" and isinstance(arg, Addr) and isinstance(arg.base, SymbolAddress):
        param = w.kernel.params.get(arg.base.name)
        at = arg.offset + (param.offset if param is not None else 0)
        if param is not None and at >= 0 and at % (size * count) == 0:
            end = at + size * count
            miss = f"{{ uint64_t a = c->param - c->bank0 + {at}; {MISS} }}"
            test = f"if (unlikely(c->param_bytes < {end})) {miss}"
            return f"{{ {test} const uint8_t *q = c->param + {at}; {' '.join(puts)} }}"
    moved = f"moved += {size * count}; " if space in ("global", "generic") else ""
    found = _pointer_declaration(w, space, size * count)
    if space in SPACE and space != "local":
        found += f" seen(c, {w.frame.numbers[id(w.i)]}, '{SPACE[space]}', i, a);"
    return f"{{ uint64_t a = {_address_expression(w, 1)}; {found} {moved}{' '.join(puts)} }}"


def emit_call_parameter_store(w: OperandWriter) -> str:
    """st to a call's parameter: a register."""
    slot = _call_parameter_or_none(w, 0)
    if slot is None:
        raise UnknownFormError
    return w.assignment(slot, w.type, w.arg(1))


class MemoryStore(NamedTuple):
    """A store to memory: space, address, elements of `size` bytes that are registers or bits.

    `address`: a register, or C of what is the same for all lanes.
    """

    space: str
    address: Reg | str
    offset: int
    size: int
    values: list[Reg | int]


def make_memory_store(w: OperandWriter) -> MemoryStore:
    """st to memory."""
    t, count, space = _access_type_count_space(w)
    items, arg = w.operand_items(1), w.i.args[0]
    if not isinstance(arg, Addr):
        raise w.make_error("operand 1 must be an address")
    if len(items) != count:
        raise w.make_error(f"{count} sources are needed")
    address, offset = base_and_offset(w, arg)
    values: list[Reg | int] = []
    for item in items:
        if isinstance(item, Reg) and item.bits >= t.bits:
            values.append(item)
        elif isinstance(item, Imm):
            word = np.asarray(literal_value(item, t, w))
            values.append(int(word.reshape(1).view(f"u{word.itemsize}")[0]))
        else:
            raise w.make_error("this operand cannot be stored")
    return MemoryStore(space, address, offset, t.bits // 8, values)


def base_and_offset(w: OperandWriter, arg: Addr) -> tuple[Reg | str, int]:
    """The base of an address, a register or C of what all lanes have, and what is added to it."""
    if isinstance(arg.base, SymbolAddress):
        address = w.variable_address_expression(SymbolAddress(arg.base.name, 0), 64)
        return address, arg.offset & (1 << 64) - 1
    if isinstance(arg.base, Imm):
        return "0", (int(arg.base.value) + arg.offset) & (1 << 64) - 1
    if arg.base.bits < 32:
        raise UnknownFormError
    return arg.base, arg.offset & (1 << 64) - 1


def emit_hint_or_fence(w: OperandWriter) -> str:
    """Hints, and fences, which only the sanitizer needs to know: all accesses are in order here."""
    return (
        f"note_told(c->watch, 'f', 0, i, 0, 0, {w.frame.site_number(w.i)});"
        if must_be_watched_in_turn(w)
        else ""
    )


def emit_isspacep(w: OperandWriter) -> str:
    """Test if a generic address lies in a space."""
    inside = {name: f"a - c->{name}_window < 1ull << 32" for name in ("shared", "local")}
    test = {**inside, "global": f"!({inside['shared']}) && !({inside['local']})"}
    put = w.result_assignment(test.get(state_space(w), "0"), PRED)
    return f"{{ const uint64_t a = {w.arg(1, TYPES['u64'])}; {put} }}"


MEMORY: dict[str, Emit] = {
    "ld": emit_load, "ldu": emit_load, "st": emit_call_parameter_store, "isspacep": emit_isspacep,
    **dict.fromkeys(
        ("membar", "fence", "nanosleep", "pmevent", "griddepcontrol", "prefetch", "prefetchu",
         "discard", "applypriority"), emit_hint_or_fence,
    ),
}  # fmt: skip
