# ruff: noqa: E501 - PTX stays one instruction a line
"""Kernels that wait for ever end in seconds, and say who waits for what."""

from __future__ import annotations

import re
import time

import pytest
from tests.simulator.ptx.machine import STORE, fails, kernel, run

from nvgpusim.ptx import endless_waits

SHARED = ".shared .align 4 .b8 l[8];"
CLEAR = "mov.u32 %r2, l; setp.eq.u32 %p0, %r30, 0; @%p0 st.shared.u32 [%r2], 0; @%p0 st.shared.u32 [%r2+4], 0; bar.sync 0;"
ABBA = f"""{CLEAR}
shr.u32 %r3, %r30, 5; setp.eq.u32 %p1, %r3, 0; and.b32 %r9, %r30, 31; setp.ne.u32 %p2, %r9, 0; @%p2 bra E;
selp.u32 %r4, 0, 4, %p1; add.u32 %r5, %r2, %r4; sub.u32 %r4, 4, %r4; add.u32 %r6, %r2, %r4;
A: atom.shared.cas.b32 %r7, [%r5], 0, 1; setp.ne.u32 %p3, %r7, 0; @%p3 bra A;
mov.u32 %r10, 0; W: add.u32 %r10, %r10, 1; setp.lt.u32 %p4, %r10, 200; @%p4 bra W;
B: atom.shared.cas.b32 %r7, [%r6], 0, 1; setp.ne.u32 %p3, %r7, 0;
@%p3 bra B; E: bar.sync 0;"""
FLAG = f"{CLEAR} setp.ge.u32 %p1, %r30, 32; @%p1 bra M;\nL: ld.volatile.shared.u32 %r1, [%r2+4];\nsetp.eq.u32 %p1, %r1, 0; @%p1 bra L; M: bar.sync 0;"


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_two_locks_in_two_orders(seed: int | None) -> None:
    began = time.process_time()
    fault = fails(kernel(ABBA, SHARED), 64, warps=seed)
    assert time.process_time() - began < 20
    assert fault.kind == "sync"
    assert "deadlock" in fault.what
    waits = re.findall(
        r"thread \((\d+), 0, 0\): waiting at PTX line \d+: B: .*? for shared l\+(\d)", fault.what
    )
    assert sorted(waits) == [("0", "4"), ("32", "0")]


@pytest.mark.parametrize("seed", [None, 1])
def test_a_flag_that_nobody_sets(seed: int | None) -> None:
    """The other warp waits at a barrier for the one that waits for the flag."""
    what = fails(kernel(FLAG, SHARED), 64, warps=seed).what
    assert "thread (0, 0, 0) and 31 more: waiting at PTX line 15: L: ld.volatile.shared.u32" in what
    assert "for shared l+4" in what


def test_a_loop_that_looks_at_nothing() -> None:
    assert fails(kernel("L: bra L;")).what == "sync: an endless loop of 32 threads"


def test_an_mbarrier_for_too_many() -> None:
    body = """.shared .align 8 .b8 b[8]; mov.u32 %r2, b; setp.eq.u32 %p0, %r30, 0;
@%p0 mbarrier.init.shared.b64 [%r2], 33; bar.sync 0; mbarrier.arrive.shared.b64 %rd1, [%r2];
L: mbarrier.test_wait.shared.b64 %p1, [%r2], %rd1; @!%p1 bra L;"""
    what = fails(kernel(body)).what
    assert "thread (0, 0, 0) and 31 more: waiting at PTX line 16: L: mbarrier.test_wait" in what


def test_a_wait_that_looks_at_the_clock() -> None:
    """As cuda::barrier waits: the pause grows with the time; one with a time limit ends."""
    body = """.shared .align 8 .b8 b[8]; mov.u32 %r2, b; setp.eq.u32 %p0, %r30, 0; mov.u64 %rd2, %globaltimer;
@%p0 mbarrier.init.shared.b64 [%r2], 33; bar.sync 0; mbarrier.arrive.shared.b64 %rd1, [%r2];
L: mov.u64 %rd3, %globaltimer; sub.u64 %rd3, %rd3, %rd2; setp.gt.u64 %p2, %rd3, 40000; LIMIT
@%p2 nanosleep.u32 40; mbarrier.test_wait.shared.b64 %p1, [%r2], %rd1; @!%p1 bra L; END:"""
    assert ": L: " not in (what := fails(kernel(body.replace("LIMIT", ""))).what)
    assert "thread (0, 0, 0) and 31 more: waiting at PTX line 17: @%p2 nanosleep" in what
    limit = "setp.gt.u64 %p3, %rd3, 600000000000; @%p3 bra END;"
    assert set(run(kernel(body.replace("LIMIT", limit) + STORE)).tolist()) == {0}


@pytest.mark.parametrize("seed", [None, 1])
def test_who_will_be_served_is_not_accused(seed: int | None) -> None:
    """One warp counts 5,000 turns, 12,000 pieces of code, before it sets the flag."""
    body = f"""{CLEAR} setp.ge.u32 %p1, %r30, 32; @%p1 bra M; L: ld.volatile.shared.u32 %r1, [%r2]; setp.eq.u32 %p1, %r1, 0; @%p1 bra L; bra E;
M: mov.u32 %r3, 0; H: add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 5000; @%p2 bra H; st.volatile.shared.u32 [%r2], 5; ld.shared.u32 %r1, [%r2]; E: {STORE}"""
    assert set(run(kernel(body, SHARED), 64, warps=seed).tolist()) == {5}


def test_threads_that_meet_others_while_they_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a warp comes where half of another waits already for the rest of its mask."""

    def due(waits: endless_waits.EndlessWaits) -> bool:
        waits.ripe = not waits.judging and bool(waits.run.meeting)
        return waits.ripe

    monkeypatch.setattr(endless_waits.EndlessWaits, "is_wait_check_due", due)
    body = f"""and.b32 %r2, %r30, 16; shr.u32 %r3, %r30, 5; shr.u32 %r2, %r2, 3; add.u32 %r2, %r2, %r3; mul.lo.u32 %r2, %r2, 5000;
mov.u32 %r1, 0; setp.eq.u32 %p2, %r2, 0; @%p2 bra E; L: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, %r2; @%p1 bra L;
E: shfl.sync.bfly.b32 %r1, %r1, 16, 31, -1; {STORE}"""
    want = [5000 * (2 * (n % 32 < 16) + n // 32) for n in range(64)]
    assert run(kernel(body), 64).tolist() == want


def test_a_wait_behind_one_that_its_time_limit_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait has its three seconds: somebody else may still write the word."""
    monkeypatch.setattr(endless_waits, "OTHERS_S", 0.5)
    monkeypatch.setattr(endless_waits, "AGAIN_S", 0.1)
    looks = []
    old = endless_waits.EndlessWaits.raise_if_endless

    def judge(waits: endless_waits.EndlessWaits) -> None:
        looks.append(waits.stuck_at)
        old(waits)
        looks.append(waits.stuck_at)

    monkeypatch.setattr(endless_waits.EndlessWaits, "raise_if_endless", judge)
    body = f"""mov.u64 %rd2, %globaltimer; L: ld.volatile.global.u32 %r1, [%in]; mov.u64 %rd3, %globaltimer;
sub.u64 %rd3, %rd3, %rd2; setp.gt.u64 %p1, %rd3, 600000000000; @!%p1 bra L; {STORE}"""
    assert set(run(kernel(body)).tolist()) == {0}
    assert looks[0] is None and looks[1] is not None and looks[-1] is None
