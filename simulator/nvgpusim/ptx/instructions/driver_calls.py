"""Calls of what the driver provides: CUDA's printf (vprintf), assert (__assertfail), malloc."""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable

import numpy as np

from ..parser.syntax import Sym
from ..spaces import load
from ..state import CONTAINER, Heap, KernelFault, State
from .lower import TYPES, Op, Read, Site

_SPEC = re.compile(r"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d+))?(hh|h|ll|l|z|j|t)?([diouxXcsaAeEfFgGp%])")
_MOST = 1 << 16
"""Bytes of a string that are looked at."""


def _text(st: State, address: int) -> str:
    """The C string at a generic address."""
    out = bytearray()
    while len(out) < _MOST:
        byte = load(st, "generic", np.array([address + len(out)], np.uint64), CONTAINER[8], 1)[0]
        if byte[0] == 0:
            break
        out.append(int(byte[0]))
    return out.decode(errors="replace")


def _value(st: State, at: int, size: int) -> bytes:
    got = load(st, "generic", np.array([at], np.uint64), CONTAINER[8 * size], 1)[0]
    return bytes(got.tobytes())


def formatted(st: State, form: str, buffer: int) -> str:
    """printf's text; its arguments lie in `buffer`, each aligned to its size."""
    place = buffer

    def take(size: int, kind: str) -> float | int:
        nonlocal place
        place = -(-place // size) * size
        (value,) = struct.unpack(f"<{kind}", _value(st, place, size))
        place += size
        return value  # type: ignore[no-any-return]

    def one(match: re.Match[str]) -> str:
        flags, width, precision, length, kind = match.groups()
        if kind == "%":
            return "%"
        if width == "*":
            width = str(take(4, "i"))
        if precision == "*":
            precision = str(take(4, "i"))
        spec = "%" + flags + (width or "") + (f".{precision}" if precision is not None else "")
        wide = length in ("l", "ll", "z", "j", "t")
        if kind == "s":
            return (spec + "s") % _text(st, int(take(8, "Q")))
        if kind == "c":
            return (spec + "s") % chr(int(take(4, "i")) & 255)
        if kind == "p":
            return (spec + "s") % hex(int(take(8, "Q")))
        if kind in "di":
            return (spec + "d") % take(8, "q") if wide else (spec + "d") % take(4, "i")
        if kind in "ouxX":
            code = "d" if kind == "u" else kind
            return (spec + code) % (take(8, "Q") if wide else take(4, "I"))
        return (spec + kind.lower().replace("a", "e")) % take(8, "d")

    return _SPEC.sub(one, form)


def _arguments(site: Site) -> list[Read]:
    """Readers of the call's parameters, result first."""
    out: list[Read] = []
    for arg in site.i.args:
        assert isinstance(arg, Sym)
        reg = site.kernel.slots[arg.name, 0]
        out.append(_spread(site.read(reg, TYPES[f"u{reg.bits}"])))
    return out


def _spread(read: Read) -> Read:
    return lambda st: st.spread(read(st))


def _each(st: State, fn: Callable[[int], None]) -> None:
    """Call fn for every active lane, alone."""
    lanes, mask, watch = st.lanes(), st.m, st.shadow
    st.shadow = None
    try:
        for n, lane in enumerate(lanes):
            st.m = lanes[n : n + 1]
            del lane
            fn(n)
    finally:
        st.m, st.shadow = mask, watch


def vprintf(site: Site) -> Op:
    """printf: thread after thread, to the program's output."""
    _, form, buffer = _arguments(site)
    arg = site.i.args[0]
    assert isinstance(arg, Sym)
    put = site.write(site.kernel.slots[arg.name, 0], TYPES["u32"])

    def run(st: State) -> None:
        forms, buffers = form(st), buffer(st)

        def one(n: int) -> None:
            text = formatted(st, _text(st, int(forms[n])), int(buffers[n]))
            sys.stdout.write(text)

        _each(st, one)
        sys.stdout.flush()
        put(st, np.full(len(forms), 1, np.uint32))

    return run


def assertfail(site: Site) -> Op:
    """assert: the kernel ends with the message of the first thread."""
    message, file, line, function, _ = _arguments(site)

    def run(st: State) -> None:
        what = [int(v(st)[0]) for v in (message, file, line, function)]
        watch, mask, st.shadow, st.m = st.shadow, st.m, None, st.lanes()[:1]
        texts = [_text(st, v) for v in (what[0], what[1], what[3])]
        st.shadow, st.m = watch, mask
        fault = KernelFault(0x9, f"{texts[1]}:{what[2]}: {texts[2]}: Assertion `{texts[0]}' failed")
        fault.kind = "assert"
        raise fault

    return run


def malloc(site: Site) -> Op:
    """malloc: thread after thread, from the launch's heap; 0 where that has no room."""
    _, size = _arguments(site)
    arg = site.i.args[0]
    assert isinstance(arg, Sym)
    put = site.write(site.kernel.slots[arg.name, 0], TYPES["u64"])
    line = _line(site)

    def run(st: State) -> None:
        heap = _heap(site, st)
        put(st, np.array([heap.malloc(int(n), line) for n in size(st)], np.uint64))

    return run


def free(site: Site) -> Op:
    """free: thread after thread; a finding where malloc has not given the address."""
    (address,) = _arguments(site)
    name, line = site.kernel.name, _line(site)
    place = f"PTX line {site.i.line}{line and ', ' + line}"

    def run(st: State) -> None:
        heap = _heap(site, st)
        for n, at in enumerate(address(st).tolist()):
            if at and (what := heap.free(at, line)):
                text = f"{name}: bounds: free ({place}) by {st.who(n)}: {what}"
                st.launch.findings.setdefault(f"free {site.i.line}", text)
        if st.shadow is not None:
            st.shadow.freed()

    return run


def _heap(site: Site, st: State) -> Heap:
    if st.launch.heap is None:
        raise site.error("this GPU has no heap for kernels")
    return st.launch.heap


def _line(site: Site) -> str:
    return f"{site.i.source[0]}:{site.i.source[1]}" if site.i.source else ""


def recursion(site: Site) -> Op:
    """A function that calls itself, behind a call by address: a gap once a thread is there."""

    def run(st: State) -> None:
        raise site.error("a function that calls itself is not supported")

    return run


DRIVER_CALLS: dict[str, Callable[[Site], Op]] = {
    "vprintf": vprintf, "__assertfail": assertfail, "__recursion": recursion,
    "malloc": malloc, "free": free,
}  # fmt: skip
