"""Loads and stores as C: an address that is not plainly right goes to the interpreter."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..instructions.lower import TYPES, Type, literal
from ..instructions.mem import space_of
from ..parser.syntax import Addr, Imm, Reg, Sym
from .values import Unknown, Words, unsigned

OTHERS = ("volatile", "relaxed", "acquire", "release", "acq_rel", "v8", "L2::cache_hint", "mmio")


def _shape(w: Words) -> tuple[Type, int, str]:
    """Type (as bits unless it is a float), number of elements, state space."""
    if w.has(*OTHERS):
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
        before = {
            "global": f"{w.frame.hit()}, &og", "shared": "&os, block", "local": "i",
            "generic": f"{w.frame.hit()}, &og, &os, i, block",
        }[space]  # fmt: skip
        site = "" if space == "local" else f", {w.frame.site(w.i)}"
        return f"load_{space}(c, {before}, a, {size}{site})"
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
    """A store to memory: space, address, elements of `size` bytes that are registers or bits."""

    space: str
    address: Reg
    offset: int
    size: int
    values: list[Reg | int]


def store(w: Words) -> Store:
    """st to memory."""
    t, count, space = _shape(w)
    items, arg = w.items(1), w.i.args[0]
    if not isinstance(arg, Addr) or not isinstance(arg.base, Reg) or len(items) != count:
        raise Unknown
    if space not in ("global", "shared", "local", "generic") or arg.base.bits < 32:
        raise Unknown
    values: list[Reg | int] = []
    for item in items:
        if isinstance(item, Reg) and item.bits >= t.bits:
            values.append(item)
        elif isinstance(item, Imm):
            word = np.asarray(literal(item, t, w))
            values.append(int(word.reshape(1).view(f"u{word.itemsize}")[0]))
        else:
            raise Unknown
    return Store(space, arg.base, arg.offset & (1 << 64) - 1, t.bits // 8, values)
