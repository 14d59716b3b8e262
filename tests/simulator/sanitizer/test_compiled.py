"""C itself records what the checks record when it tells of every access."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from tests.simulator.ptx.flat import FlatMemory
from tests.simulator.ptx.machine import STORE, kernel
from tests.simulator.ptx.test_native import BLOCKS, DRAWN, SEEDS, SOME_PROGRAMS, THREADS, body
from tests.simulator.sanitizer import launching
from tests.simulator.sanitizer.cases import CASES, Case
from tests.simulator.sanitizer.launching import Outcome
from tests.simulator.sanitizer.test_attacks import ATTACKS, MODULE

from nvgpusim.allocated_pieces import AllocatedPieces
from nvgpusim.l2 import CACHEABLE
from nvgpusim.memory import MmuFault
from nvgpusim.options import CHECKS
from nvgpusim.ptx import KernelCode, KernelFault, Launch, endless_waits, parse, translate_kernel
from nvgpusim.ptx.native import build
from nvgpusim.ptx.native.shadow import NativeShadow
from nvgpusim.ptx.sanitizer.sanitize import Sanitizer

SOME = [(), ("race",), ("init", "bounds")]
"""Checks that are left out of the runs of each case."""


FLAGS = {True: build.FLAGS, False: (*build.FLAGS, "-DSURE=0")}
"""By whether C keeps records of what is surely right."""


def told(found: Outcome) -> Any:
    """An outcome but for the order of its findings."""
    return sorted(found.texts), found.fault, found.memory


@pytest.mark.parametrize("case", [*CASES, *ATTACKS], ids=lambda case: case.kernel)
def test_all_kernels_are_judged_alike(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    module = MODULE if case.kernel in MODULE.kernels else launching.module()
    found: dict[bool, list[Any]] = {True: [], False: []}
    for sure, flags in FLAGS.items():
        code = translate_kernel(module, module.kernels[case.kernel], True, False)
        monkeypatch.setattr(launching, "code", lambda *_, code=code: code)
        monkeypatch.setattr(build, "FLAGS", flags)
        for off in SOME if case.fault else SOME[:1]:
            checks, memory = tuple(c for c in CHECKS if c not in off), 0 if off else CACHEABLE
            found[sure].append(told(launching.run(case, None, checks, memory)))
    assert found[True] == found[False]


@pytest.mark.parametrize("kernel", ["clean_blocks_flag", "c_release", "w_scope_release"])
def test_a_look_for_endless_waits_changes_nothing(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in [*CASES, *ATTACKS] if case.kernel == kernel)
    module = MODULE if kernel in MODULE.kernels else launching.module()
    code = translate_kernel(module, module.kernels[kernel], True, False)
    monkeypatch.setattr(launching, "code", lambda *_: code)
    found = told(launching.run(case))
    monkeypatch.setattr(endless_waits, "FIRST", 0)
    monkeypatch.setattr(endless_waits, "AGAIN_S", 0)
    assert told(launching.run(case)) == found


ALONE = [f"clean_{name}" for name in ("saxpy", "reduce", "tile", "transpose", "shuffle")]


@pytest.mark.parametrize("kernel", ALONE)
def test_clean_kernels_are_not_told_of(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Barriers, shared memory and buffers: C alone records and judges them."""
    told: list[int] = []
    monkeypatch.setattr(
        NativeShadow,
        "check_accesses_told_by_c",
        lambda watcher: told.append(watcher.struct.told_count),
    )
    case = next(c for c in CASES if c.kernel == kernel)
    watch, (vm, buf) = Sanitizer(frozenset(CHECKS)), launching.memory()
    for _ in range(2):
        launch = launching.prepare(launching.code(kernel), case, vm, buf, watch)
        launch.run_all_blocks()
    assert launch.thread_instrs > 0
    assert not told and not launch.findings


def watched(code: KernelCode) -> Any:
    """Findings, fault and memory of a kernel that gets a fresh buffer and one written in part."""
    memory, allocated, size = FlatMemory(), AllocatedPieces(), 4 * THREADS * BLOCKS
    out, data = memory.add(np.zeros(4 * size, np.uint8)), memory.add(SEEDS.view(np.uint8))
    allocated.add_piece(out, size, "out", "test.py:1")
    allocated.add_piece(data, SEEDS.nbytes - 128, "given", "test.py:2")
    allocated.note_non_kernel_write(data, SEEDS.nbytes - 600)
    bank = bytes(0x160) + out.to_bytes(8, "little") + data.to_bytes(8, "little") + bytes(8)
    launch = Launch(
        code, memory, (BLOCKS, 1, 1), (THREADS, 1, 1), {0: bank},
        shared_bytes=code.shared_bytes, watch=Sanitizer(frozenset(CHECKS), allocated),
    )  # fmt: skip
    fault = ""
    try:
        launch.run_all_blocks()
    except (KernelFault, MmuFault) as e:
        fault = f"{e} {e.where}"
    return launch.findings, fault, memory.read(out, size).tobytes(), memory.read(data, SEEDS.nbytes)


FOUND: set[str] = set()


@SOME_PROGRAMS
@given(body(), body())
def random_programs(first: str, second: str) -> None:
    """Most of them race, read what nobody wrote and reach beyond the ends."""
    memory = ".local .align 4 .b8 d[8]; .shared .align 4 .b8 s[1024]; setp.gt.s32 %p1, %r28, 9;"
    text = f"{memory}\n{DRAWN}\n{first}\n{second}\nmov.b32 %r6, %f1; add.u32 %r1, %r1, %r6; {STORE}"
    want, got = both(text)
    assert got[:3] == want[:3]
    assert (got[3] == want[3]).all()
    FOUND.update(key.split()[0] for key in want[0])


def both(text: str) -> list[Any]:
    """The findings where C tells of every access, and where it does not."""
    found = []
    for sure in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "FLAGS", FLAGS[sure])
            module = parse(kernel(text))
            found.append(watched(translate_kernel(module, module.kernels["k"], True, False)))
    return found


WRITES = {
    "st.shared.u32 [%r6], %r1;": 1, "st.volatile.shared.u32 [%r6], %r1;": 1,
    "atom.shared.add.u32 %r2, [%r6], 1;": 1, "st.u32 [%rd1], %r1;": 1,
    "bar.sync 0; st.shared.u32 [%r6], %r1;": 0, "st.global.u32 [%i], %r1;": 0,
    "shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;": 0,
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
def test_a_read_behind_a_barrier_and_a_write_before_the_next(write: str) -> None:
    """Only what may be written before the next barrier has to remember its readers."""
    text = f"""
.shared .align 4 .b8 s[512]; mov.u32 %r5, s; shl.b32 %r6, %r30, 2; add.u32 %r6, %r6, %r5;
cvt.u64.u32 %rd2, %r6; cvta.shared.u64 %rd1, %rd2; st.shared.u32 [%r6], %r30;
st.shared.u32 [%r6+256], %r30; bar.sync 0; xor.b32 %r7, %r30, 33; shl.b32 %r7, %r7, 2;
add.u32 %r7, %r7, %r5; ld.shared.u32 %r1, [%r7]; {write} ld.shared.u32 %r3, [%r7+256];
add.u32 %r1, %r1, %r3; {STORE}"""
    want, got = both(text)
    assert got[1:3] == want[1:3] and sorted(got[0].values()) == sorted(want[0].values())
    assert len(want[0]) == WRITES[write]


def test_random_programs_are_judged_alike() -> None:
    random_programs()
    assert {"race", "init", "bounds"} <= FOUND
