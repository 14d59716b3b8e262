"""Services of the host for kernels: printf (vprintf), assert (__assertfail), malloc, free, trap."""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable

import numpy as np

from ..memory import MmuFault
from .fault_causes import instruction_in_kernel
from .operands import InstructionInKernel, Value
from .parser.syntax import Instr, SymbolAddress
from .spaces import read_bytes
from .state import ChunkState, KernelFault, KernelHeap

_SPEC = re.compile(r"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d+))?(hh|h|ll|l|z|j|t)?([diouxXcsaAeEfFgGp%])")
NOBODY = np.zeros(0, np.uint64)
"""A parameter that is not read."""
_MOST = 1 << 16
"""Bytes of a string that are looked at."""


def _c_string(st: ChunkState, address: int) -> str:
    """The C string at a generic address."""
    out = bytearray()
    while len(out) < _MOST and (byte := read_bytes(st, address + len(out), 1)) != b"\0":
        out += byte
    return out.decode(errors="replace")


def printf_text(st: ChunkState, form: str, buffer: int) -> str:
    """printf's text; its arguments lie in `buffer`, each aligned to its size."""
    place = buffer

    def take(size: int, kind: str) -> float | int:
        nonlocal place
        place = -(-place // size) * size
        (value,) = struct.unpack(f"<{kind}", read_bytes(st, place, size))
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
            return (spec + "s") % _c_string(st, int(take(8, "Q")))
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


def _argument_values(site: InstructionInKernel, st: ChunkState) -> list[Value]:
    """The call's parameters in the active lanes."""
    regs = [site.kernel.slots[arg.name, 0] for arg in site.i.args if isinstance(arg, SymbolAddress)]
    return [
        st.active_operand_values(reg, reg.bits) if reg.index in st.R else NOBODY for reg in regs
    ]


def _write_result(site: InstructionInKernel, st: ChunkState, value: Value) -> None:
    """Give the call's result."""
    arg = site.i.args[0]
    assert isinstance(arg, SymbolAddress)
    st.write_register(site.kernel.slots[arg.name, 0], value)


def vprintf(site: InstructionInKernel, st: ChunkState) -> None:
    """printf: thread after thread, to the program's output."""
    _, forms, buffers = _argument_values(site, st)
    lanes = st.active_lanes()
    for lane, form, buffer in zip(lanes, forms.tolist(), buffers.tolist(), strict=True):
        st.m = np.array([lane])
        sys.stdout.write(printf_text(st, _c_string(st, form), buffer))
    st.m = lanes
    sys.stdout.flush()
    _write_result(site, st, np.full(len(lanes), 1, np.uint32))


def assertfail(site: InstructionInKernel, st: ChunkState) -> None:
    """assert: the kernel ends with the message of the first thread."""
    message, file, line, function = (int(v[0]) for v in _argument_values(site, st)[:4])
    st.m = st.active_lanes()[:1]
    what, where, name = (_c_string(st, v) for v in (message, file, function))
    fault = KernelFault(0x9, f"{where}:{line}: {name}: Assertion `{what}' failed")
    fault.kind = "assert"
    raise fault


def malloc(site: InstructionInKernel, st: ChunkState) -> None:
    """malloc: thread after thread, from the launch's heap; 0 where that has no room."""
    _, sizes = _argument_values(site, st)
    heap, line = _require_heap(site, st), _source_line_text(site)
    _write_result(site, st, np.array([heap.malloc(n, line) for n in sizes.tolist()], np.uint64))


def free(site: InstructionInKernel, st: ChunkState) -> None:
    """free: thread after thread; a finding where malloc has not given the address."""
    (addresses,) = _argument_values(site, st)
    heap, line = _require_heap(site, st), _source_line_text(site)
    place = f"PTX line {site.i.line}{line and ', ' + line}"
    for n, at in enumerate(addresses.tolist()):
        if at and (what := heap.free_or_explain(at, line)):
            text = f"{site.kernel.name}: bounds: free ({place}) by {st.thread_text(n)}: {what}"
            st.launch.findings.setdefault(f"free {site.i.line}", text)
    if st.shadow is not None:
        st.shadow.on_heap_free()


def _require_heap(site: InstructionInKernel, st: ChunkState) -> KernelHeap:
    if st.launch.heap is None:
        raise site.make_error("this GPU has no heap for kernels")
    return st.launch.heap


def _source_line_text(site: InstructionInKernel) -> str:
    return f"{site.i.source[0]}:{site.i.source[1]}" if site.i.source else ""


def refuse_recursion(site: InstructionInKernel, st: ChunkState) -> None:
    """A function that calls itself, behind a call by address: a gap once a thread is there."""
    raise site.make_error("a function that calls itself is not supported")


def trap(site: InstructionInKernel, st: ChunkState) -> None:
    """trap: the kernel ends."""
    raise KernelFault(0x9, "trap")


_CALLS: dict[str, Callable[[InstructionInKernel, ChunkState], None]] = {
    "vprintf": vprintf, "__assertfail": assertfail, "__recursion": refuse_recursion,
    "malloc": malloc, "free": free, "trap": trap,
}  # fmt: skip


def serve_host_call(st: ChunkState, instr: Instr) -> None:
    """Do what the active lanes ask the host for. Raises KernelFault and MmuFault."""
    kept, st.m = st.m, st.lanes_passing_guard(instr)
    try:
        if st.m is None or len(st.m):
            st.at = instr
            _CALLS[instr.op](instruction_in_kernel(st, instr), st)
    except (KernelFault, MmuFault) as e:
        st.add_fault_place(e, instr)
        raise
    finally:
        st.m = kept
