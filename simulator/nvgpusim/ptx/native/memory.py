"""Loads and stores as C: an address that is not plainly right goes to the interpreter."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..instructions.lower import PRED, TYPES, Type, literal
from ..instructions.mem import space_of
from ..parser.syntax import Addr, Imm, Reg, Sym
from .values import Emit, Unknown, Words, unsigned

ORDERED = ("volatile", "relaxed", "acquire", "release", "acq_rel", "mmio")
"""Accesses that the sanitizer orders others by; without it they are as any other."""
SPACE = {"global": "g", "shared": "s", "local": "l", "generic": "a"}
"""Letters of spaces in C."""


def ordered(w: Words) -> bool:
    """True for what the sanitizer must see in its turn: see `Told` of watch.h."""
    return w.frame.watched and (w.has(*ORDERED) or w.i.op in ("membar", "fence"))


def _shape(w: Words) -> tuple[Type, int, str]:
    """Type (as bits unless it is a float), number of elements, state space."""
    if w.has("v8"):
        raise Unknown
    t = w.t
    t = t if t.name in ("f32", "f64") or t.kind == "s" else TYPES[f"u{t.bits}"]
    return t, next((int(m[1:]) for m in w.mods if m in ("v2", "v4")), 1), space_of(w)


def _slot(w: Words, n: int) -> Reg | None:
    """The register of a call's parameter, where operand n is one."""
    arg = w.i.args[n]
    if isinstance(arg, Addr) and isinstance(arg.base, Sym) and "@" in arg.base.name:
        return w.kernel.slot(arg.base.name, arg.offset, w.t.bits)
    return None


def _address(w: Words, n: int) -> str:
    arg = w.i.args[n]
    if not isinstance(arg, Addr):
        raise Unknown
    if isinstance(arg.base, Sym):
        return f"(uint64_t){w.address_of(Sym(arg.base.name, arg.offset), 64)}"
    if isinstance(arg.base, Imm):
        return f"{(int(arg.base.value) + arg.offset) & (1 << 64) - 1:#x}ull"
    bits = arg.base.bits
    offset = f"{arg.offset & (1 << bits) - 1:#x}{'ull' if bits == 64 else 'u'}"
    return f"(uint64_t)({unsigned(bits)})({w.bits_of(arg.base)} + {offset})"


def _pointer(w: Words, space: str, size: int) -> str:
    """The checked place of address a, 0 where it is not plainly right."""
    if w.frame.watched and space in ("global", "shared", "local", "generic"):
        if ordered(w):
            return f"load_told(c, i, '{SPACE[space]}', a, {size}, {w.frame.site(w.i)})"
        before = {
            "global": f"{w.frame.hit()}, &og, i", "shared": "&os, i, block", "local": "i",
            "generic": f"{w.frame.hit()}, &og, &os, i, block",
        }[space]  # fmt: skip
        return f"load_{space}(c, {before}, a, {size}, {w.frame.site(w.i)})"
    if space == "global":
        return f"global(c, {w.frame.hit()}, a, {size}, 0)"
    if space == "shared":
        return f"shared(c, block, a, {size})"
    if space == "local":
        return f"local(c, i, a, {size})"
    if space == "const":
        return f"constant(c, a, {size})"
    if space != "generic":
        raise Unknown
    return f"generic(c, {w.frame.hit()}, i, block, a, {size}, 0)"


def _c(t: Type) -> str:
    if t.kind == "f":
        return "float" if t.bits == 32 else "double"
    return f"int{t.bits}_t" if t.kind == "s" else unsigned(t.bits)


def load(w: Words) -> str:
    """ld: scalar and vector, kernel and call parameters."""
    if (slot := _slot(w, 1)) is not None:
        return w.d(w.value(slot, w.t))
    t, count, space = _shape(w)
    size, items = t.bits // 8, w.items(0)
    puts = []
    for k, item in enumerate(items):
        puts.append(f"{{ {_c(t)} v; memcpy(&v, q + {size * k}, {size}); {w.put(item, t, 'v')} }}")
    arg = w.i.args[1]
    if space == "param":
        known = isinstance(arg, Addr) and isinstance(arg.base, Sym)
        param = w.kernel.params.get(arg.base.name) if known else None  # type: ignore[union-attr]
        at = 0 if param is None else param.offset + arg.offset  # type: ignore[union-attr]
        if param is None or at < 0 or at % (size * count):
            raise Unknown
        w.frame.param_end = max(w.frame.param_end, at + size * count)
        return f"{{ const uint8_t *q = c->param + {at}; {' '.join(puts)} }}"
    where = _pointer(w, space, size * count)
    moved = f"moved += {size * count}; " if space in ("global", "generic") else ""
    slow = f"const uint8_t *q = {where}; if (unlikely(!q)) goto miss;"
    if space == "global" and not w.frame.watched:
        near = where[where.index("&h") : where.index("]") + 1]
        slow = (
            f"const uint8_t *q; if (likely(hit({near}, a, {size * count}))) "
            f"q = ({near})->base + (a - ({near})->start); else if (!(q = {where})) goto miss;"
        )
    return f"{{ uint64_t a = {_address(w, 1)}; {slow} {moved}{' '.join(puts)} }}"


def store_call_parameter(w: Words) -> str:
    """st to a call's parameter: a register."""
    slot = _slot(w, 0)
    if slot is None:
        raise Unknown
    return w.put(slot, w.t, w.a(1))


class Store(NamedTuple):
    """A store to memory: space, address, elements of `size` bytes that are registers or bits.

    `address`: a register, or C of what is the same for all lanes.
    """

    space: str
    address: Reg | str
    offset: int
    size: int
    values: list[Reg | int]


def store(w: Words) -> Store:
    """st to memory."""
    t, count, space = _shape(w)
    items, arg = w.items(1), w.i.args[0]
    if not isinstance(arg, Addr) or len(items) != count:
        raise Unknown
    if space not in ("global", "shared", "local", "generic"):
        raise Unknown
    address, offset = base_of(w, arg)
    values: list[Reg | int] = []
    for item in items:
        if isinstance(item, Reg) and item.bits >= t.bits:
            values.append(item)
        elif isinstance(item, Imm):
            word = np.asarray(literal(item, t, w))
            values.append(int(word.reshape(1).view(f"u{word.itemsize}")[0]))
        else:
            raise Unknown
    return Store(space, address, offset, t.bits // 8, values)


def base_of(w: Words, arg: Addr) -> tuple[Reg | str, int]:
    """The base of an address, a register or C of what all lanes have, and what is added to it."""
    if isinstance(arg.base, Sym):
        return w.address_of(Sym(arg.base.name, 0), 64), arg.offset & (1 << 64) - 1
    if isinstance(arg.base, Imm):
        return "0", (int(arg.base.value) + arg.offset) & (1 << 64) - 1
    if arg.base.bits < 32:
        raise Unknown
    return arg.base, arg.offset & (1 << 64) - 1


def nothing(w: Words) -> str:
    """Hints, and fences, which only the sanitizer needs to know: all accesses are in order here."""
    return f"note_told(c->watch, 'f', 0, i, 0, 0, {w.frame.site(w.i)});" if ordered(w) else ""


def isspacep(w: Words) -> str:
    """Test if a generic address lies in a space."""
    inside = {name: f"a - c->{name}_window < 1ull << 32" for name in ("shared", "local")}
    test = {**inside, "global": f"!({inside['shared']}) && !({inside['local']})"}
    put = w.d(test.get(space_of(w), "0"), PRED)
    return f"{{ const uint64_t a = {w.a(1, TYPES['u64'])}; {put} }}"


MEMORY: dict[str, Emit] = {
    "ld": load, "ldu": load, "st": store_call_parameter, "isspacep": isspacep,
    **dict.fromkeys(
        ("membar", "fence", "nanosleep", "pmevent", "griddepcontrol", "prefetch", "prefetchu",
         "discard", "applypriority"), nothing,
    ),
}  # fmt: skip
