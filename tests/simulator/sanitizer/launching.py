"""Runs the kernels of planted.ptx under the sanitizer."""

from __future__ import annotations

import struct
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tests.simulator.sanitizer.cases import Case

from nvgpusim import l2
from nvgpusim.allocated_pieces import AllocatedPieces
from nvgpusim.memory import DmaBuf, GpuAddressSpace, Mapping, MmuFault
from nvgpusim.options import CHECKS
from nvgpusim.ptx import Kernel, KernelCode, KernelFault, Launch, PtxModule, parse, translate_kernel
from nvgpusim.ptx.sanitizer.sanitize import Sanitizer

HERE = Path(__file__).resolve().parent
BASE, SIZE = 0x10000000, 1 << 20
STEP = 1024


class Outcome(NamedTuple):
    """Kinds of what was found, the texts, the fault that ended it ("" for none), the memory."""

    kinds: set[str]
    texts: list[str]
    fault: str
    memory: bytes


@lru_cache
def module() -> PtxModule:
    """planted.ptx."""
    return parse((HERE / "planted.ptx").read_text())


@lru_cache
def code(kernel: str, fine: bool = True, turns: bool = False) -> KernelCode:
    """A kernel, compiled."""
    return translate_kernel(module(), module().kernels[kernel], fine, turns)


def memory(flags: int = 0) -> tuple[GpuAddressSpace, DmaBuf]:
    """One mapping, as a client's pool is one; `flags` are those of MAP_BUFFER_EX."""
    vm, buf = GpuAddressSpace("test"), DmaBuf(SIZE, "pool")
    buf.array = np.zeros(buf.size, np.uint8)
    vm.add_mapping(Mapping(BASE, buf.size, buf, flags=flags))
    return vm, buf


def arguments(kernel: Kernel, case: Case, allocated: AllocatedPieces, buf: DmaBuf) -> bytes:
    """Kernel parameters, and what the host does before the launch."""
    at, out = BASE, bytearray()
    for variable, text in zip(kernel.params.values(), case.args.split(), strict=True):
        out += bytes(variable.offset - len(out))
        kind = text[0]
        if kind == "s":
            out += struct.pack("<i", int(text[2:]))
        elif kind == "d":
            out += struct.pack("<f", float(text[2:]))
        elif kind == "n":
            out += bytes(8)
        else:
            wrote, _, whole = (text[2:] or "8").partition("/")
            size = int(whole or wrote)
            allocated.add_piece(at, size, f"buffer {variable.name[-1]}", "test.py:1")
            if kind in "ipz":
                allocated.note_non_kernel_write(at, int(wrote))
            data = buf.array[at - BASE : at - BASE + int(wrote)]
            if kind in "ip":
                data[:] = np.arange(-(-int(wrote) // 4), dtype="<i4").view(np.uint8)[: int(wrote)]
            if kind == "w":
                allocated.note_non_kernel_write(at, 8)
                data[:8] = np.frombuffer(struct.pack("<Q", 0x123456789000), np.uint8)
            if kind == "f":
                allocated.end_piece(at, "test.py:2")
            out += struct.pack("<Q", at)
            at += -(-size // STEP) * STEP + STEP
    return bytes(out)


def prepare(
    kernel: KernelCode, case: Case, vm: GpuAddressSpace, buf: DmaBuf, watch: Sanitizer | None
) -> Launch:
    """A launch that is ready to run; `watch` knows its buffers."""
    allocated = watch.allocated if watch is not None else AllocatedPieces()
    bank = bytes(0x160) + arguments(kernel.kernel, case, allocated, buf)
    bx, _, by = case.block.partition(",")
    return Launch(
        kernel, vm, (case.grid, 1, 1), (int(bx), int(by or 1), 1), {0: bank},
        shared_bytes=kernel.shared_bytes + case.shared, watch=watch, max_steps=200_000,
    )  # fmt: skip


def run(
    case: Case,
    seed: int | None = None,
    checks: tuple[str, ...] = CHECKS,
    flags: int = 0,
) -> Outcome:
    """One launch; `seed` draws the order of warps; without `checks` nothing is watched."""
    vm, buf = memory(flags)
    watch = Sanitizer(frozenset(checks), AllocatedPieces()) if checks else None
    launch = prepare(
        code(case.kernel, watch is not None or seed is not None, seed is not None),
        case,
        vm,
        buf,
        watch,
    )
    launch.warps = seed
    fault, kinds = "", set()
    try:
        launch.run_all_blocks()
    except MmuFault as e:
        fault, kinds = f"{e} {e.where}", {"bounds"}
    except KernelFault as e:
        fault, kinds = f"{e} {e.where}", {e.kind or "bounds"}
    kinds |= {text.split(": ")[1] for text in launch.findings.values()}
    l2.board_l2().flush(invalidate=False)
    return Outcome(kinds, list(launch.findings.values()), fault, buf.array.tobytes())
