# ruff: noqa: E501 - PTX stays one instruction a line
"""A kernel of a few lines, run on the simulator: for tests of its rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.simulator.ptx.flat import FlatMemory

from nvgpusim.ptx import KernelCode, KernelFault, Launch, parse, translate_kernel

HEAD = """.version 8.0
.target sm_87, debug
.address_size 64
.file 1 "source.cu"
"""


def kernel(body: str, extra: str = "", regs: str = "") -> str:
    """A module with one kernel: %o is the output, %i the thread's own slot in it."""
    return f"""{HEAD}{extra}
.visible .entry k(.param .u64 out, .param .u64 .ptr .global .align 4 in, .param .align 8 .b8 pod[8])
.maxntid 256, 1, 1
.minnctapersm 1
{{
.reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<32>; .reg .f32 %f<8>; .reg .b64 %rd<16>, %o, %i, %in; {regs}
ld.param.u64 %o, [out]; ld.param.u64 %in, [in];
mov.u32 %r30, %tid.x; mov.u32 %r31, %ctaid.x; mov.u32 %r29, %ntid.x;
mad.lo.u32 %r28, %r31, %r29, %r30; mul.wide.u32 %i, %r28, 4; add.u64 %i, %o, %i;
{body}
ret;
}}
"""


def code_of(text: str) -> KernelCode:
    """Kernel k of a module."""
    module = parse(text)
    return translate_kernel(module, module.kernels["k"])


def run(text: str, threads: int = 32, blocks: int = 1, data: Any = None, **options: Any) -> Any:
    """Run kernel k; returns the output, one u32 a thread."""
    code, memory = code_of(text), FlatMemory()
    out = memory.add(np.zeros(4 * threads * blocks, np.uint8))
    given = np.zeros(16, np.uint32) if data is None else np.asarray(data, np.uint32)
    into = memory.add(given.view(np.uint8))
    bank = bytes(0x160) + out.to_bytes(8, "little") + into.to_bytes(8, "little") + bytes(range(8))
    launch = Launch(code, memory, (blocks, 1, 1), (threads, 1, 1), {0: bank}, **options)
    launch.run_all_blocks()
    run.launch = launch  # type: ignore[attr-defined]
    return memory.read(out, 4 * threads * blocks).view(np.uint32)


def fails(text: str, threads: int = 32, **options: Any) -> KernelFault:
    """Run kernel k, which traps."""
    with pytest.raises(KernelFault) as caught:
        run(text, threads, **options)
    return caught.value


STORE = "st.global.u32 [%i], %r1;"
