# ruff: noqa: E501 - PTX stays one instruction a line
"""Rules for a thread: control flow, barriers, warps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.simulator.ptx.flat import FlatMemory
from tests.simulator.ptx.machine import STORE, code_of, fails, kernel, run

from nvgpusim.ptx import Launch, parse, translate_kernel
from nvgpusim.ptx.native.c_file import c_source

# control flow


def test_nested_divergence_and_early_exit() -> None:
    body = f"""
setp.gt.u32 %p0, %r30, 20; @%p0 exit;
mov.u32 %r1, 0; and.b32 %r2, %r30, 3;
OUTER: setp.eq.u32 %p1, %r2, 0; @%p1 bra DONE; mov.u32 %r3, %r30;
INNER: setp.eq.u32 %p2, %r3, 0; @%p2 bra NEXT; add.u32 %r1, %r1, %r2; sub.u32 %r3, %r3, 1; bra.uni INNER;
NEXT: sub.u32 %r2, %r2, 1; bra OUTER;
DONE: add.u32 %r1, %r1, 1000; {STORE}"""
    want = [1000 + n * sum(range(1, (n & 3) + 1)) if n <= 20 else 0 for n in range(32)]
    assert run(kernel(body)).tolist() == want


def test_branch_table() -> None:
    body = f"""
and.b32 %r2, %r30, 3; T: .branchtargets A, B, C;
setp.eq.u32 %p0, %r30, 31; @!%p0 brx.idx %r2, T;
mov.u32 %r1, 9; bra E; A: mov.u32 %r1, 1; bra E; B: mov.u32 %r1, 2; bra E; C: mov.u32 %r1, 3; E: {STORE}"""
    assert run(kernel(body)).tolist() == [*([1, 2, 3, 0] * 8)[:31], 9]


def test_spinning_threads_let_others_run() -> None:
    """Threads of one warp hand a token on: independent thread scheduling is needed."""
    shared = ".shared .align 4 .b8 turn[4];"
    body = f"""
mov.u32 %r2, turn; setp.eq.u32 %p0, %r30, 0; @%p0 st.shared.u32 [%r2], 0; bar.sync 0;
SPIN: ld.shared.u32 %r1, [%r2]; setp.ne.u32 %p1, %r1, %r30; @%p1 bra SPIN;
add.u32 %r3, %r1, 1; st.shared.u32 [%r2], %r3; {STORE}"""
    assert run(kernel(body, shared), threads=4).tolist() == [0, 1, 2, 3]


def test_endless_kernel_is_stopped() -> None:
    assert "did not end" in fails(kernel("L: add.u32 %r1, %r1, 1; bra L;"), max_steps=500).what
    assert fails(kernel("L: bra L;"), is_stopped=lambda: True).what == "stopped"


# barriers


def test_divergent_barrier() -> None:
    fault = fails(kernel("setp.lt.u32 %p0, %r30, 16; @%p0 bra L; bar.sync 0; L: bar.sync 0;"))
    assert "divergent barrier" in fault.what
    assert "bar.sync" in fault.where


def test_barrier_that_never_completes() -> None:
    body = "setp.lt.u32 %p0, %r30, 32; @%p0 bra L; bar.sync 1; bra E; L: bar.sync 2; E:"
    assert "never completes" in fails(kernel(body), threads=64).what


def test_barrier_after_a_warp_has_left() -> None:
    body = f"setp.ge.u32 %p0, %r30, 32; @%p0 exit; bar.sync 0; mov.u32 %r1, 5; {STORE}"
    assert run(kernel(body), threads=64, blocks=3).tolist() == ([5] * 32 + [0] * 32) * 3


def test_producer_and_consumer_warps() -> None:
    shared = ".shared .align 4 .b8 s[128];"
    body = f"""
and.b32 %r4, %r30, 31; shl.b32 %r4, %r4, 2; mov.u32 %r5, s; add.u32 %r4, %r4, %r5;
setp.lt.u32 %p0, %r30, 32; @%p0 bra CONSUMER; add.u32 %r2, %r30, 7; st.shared.u32 [%r4], %r2; barrier.arrive 3, 64; exit;
CONSUMER: barrier.sync 3, 64; ld.shared.u32 %r1, [%r4]; {STORE}"""
    got = run(kernel(body, shared), threads=64)
    assert got[:32].tolist() == [39 + n for n in range(32)]


@pytest.mark.parametrize(("how", "want"), [("popc.u32", 20), ("and.pred", 0), ("or.pred", 1)])
def test_barrier_reductions_of_part_of_a_block(how: str, want: int) -> None:
    dst = "%r1" if how == "popc.u32" else "%p1"
    body = f"""
setp.ge.u32 %p0, %r30, 32; @%p0 exit; setp.lt.u32 %p0, %r30, 20; mov.u32 %r1, 0;
bar.red.{how} {dst}, 0, %p0; {"" if how == "popc.u32" else "selp.u32 %r1, 1, 0, %p1;"} {STORE}"""
    assert run(kernel(body), threads=64)[:32].tolist() == [want] * 32


# warps


def test_shuffle_from_an_absent_lane_is_noted() -> None:
    body = f"setp.ge.u32 %p0, %r30, 16; @%p0 exit; shfl.sync.idx.b32 %r1, %r30, 20, 31, 0xffff; {STORE}"
    assert set(run(kernel(body))[:16].tolist()) == {0xDBDBDBDB}
    assert any("shfl" in f for f in run.launch.findings.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("shfl.sync.idx.b32 %r1, %r30, 0, 31, 1;", "misses the executing lane"),
        ("setp.lt.u32 %p0, %r30, 8; @%p0 bra A; vote.sync.any.pred %p1, %p0, -1; A: bar.sync 0;", "do not execute"),
        ("setp.lt.u32 %p0, %r30, 8; @%p0 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2];", "all 32 threads"),
    ],
)  # fmt: skip
def test_warp_wide_misuse(body: str, text: str) -> None:
    assert text in fails(kernel(body)).what


def test_warp_operations_of_part_of_a_warp() -> None:
    body = f"""
setp.lt.u32 %p0, %r30, 10; @!%p0 bra E; activemask.b32 %r2; vote.sync.ballot.b32 %r3, %p0, %r2;
redux.sync.add.u32 %r4, %r30, %r2; bar.warp.sync %r2; match.any.sync.b32 %r5, %r3, %r2; vote.all.pred %p1, %p0;
add.u32 %r1, %r2, %r4; @%p1 add.u32 %r1, %r1, %r5; {STORE} E:"""
    assert run(kernel(body)).tolist() == [2 * 0x3FF + 45] * 10 + [0] * 22


def test_lanes_that_name_each_other_with_other_masks_are_noted() -> None:
    """Lane 0 names all, the others the upper lanes: PTX leaves it undefined."""
    body = f"""
mov.u32 %r2, 0xffff; setp.ge.u32 %p0, %r30, 16; @%p0 mov.u32 %r2, MASK; redux.sync.add.u32 %r1, %r30, %r2; {STORE}"""
    right = kernel(body.replace("MASK", "0xffff0000"))
    assert run(right).tolist() == [120] * 16 + [376] * 16
    assert not run.launch.findings  # type: ignore[attr-defined]
    run(kernel(body.replace("MASK", "0xffff0001")))
    (text,) = run.launch.findings.values()  # type: ignore[attr-defined]
    assert "sync: membermask 0xffff0001 names lanes 0x1 that give another membermask" in text


def test_block_of_odd_size() -> None:
    body = f"shfl.sync.down.b32 %r1, %r30, 1, 31, -1; {STORE}"
    got = run(kernel(body.replace("-1;", "0x7ff;")), threads=11, blocks=3)
    assert got.reshape(3, 11)[:, :10].tolist() == [list(range(1, 11))] * 3


# arithmetic


def test_half_accumulation_of_mma() -> None:
    """fp16 accumulators round once per instruction: 2048 + 1 needs the float32 one."""
    one, big = 0x3C003C00, 0x68006800  # 1.0, 2048.0 twice
    zero = ", ".join(["%r9"] * 4)
    body = f"""
mov.b32 %r9, {one}; mov.b32 %r10, {big};
mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {{%r11, %r12}}, {{{zero}}}, {{%r9, %r9}}, {{%r10, %r10}};
mov.u32 %r1, %r11; {STORE}"""
    half = int(np.array([2048 + 16], np.float16).view(np.uint16)[0])
    assert set(run(kernel(body)).tolist()) == {half | half << 16}


@pytest.mark.parametrize(
    ("mode", "position", "length", "want"),
    [
        ("clamp", 4, 3, 0x70), ("clamp", 30, 4, 0xC0000000), ("clamp", 40, 3, 0), ("clamp", 4, 0, 0),
        ("clamp", 0, 99, 0xFFFFFFFF), ("wrap", 36, 3, 0x70), ("wrap", 0, 32, 0),
    ],
)  # fmt: skip
def test_bit_masks(mode: str, position: int, length: int, want: int) -> None:
    body = f"mov.u32 %r2, {position}; bmsk.{mode}.b32 %r1, %r2, {length}; {STORE}"
    assert run(kernel(body))[0] == want


def test_carry_belongs_to_the_thread() -> None:
    """A carry set by some lanes leaves the others' alone."""
    body = f"""
mov.u32 %r2, 0xFFFFFFFF; and.b32 %r3, %r30, 1; setp.eq.u32 %p0, %r3, 1; add.cc.u32 %r4, %r30, 0;
@%p0 add.cc.u32 %r4, %r2, 1; @%p0 bra ODD; addc.u32 %r1, 0, 10; bra E; ODD: addc.cc.u32 %r1, %r2, 0; addc.u32 %r1, %r1, 20; E: {STORE}"""
    assert run(kernel(body)).tolist() == [21 if n & 1 else 10 for n in range(32)]


# the order of warps


def orders(body: str, shared: str, threads: int = 128) -> set[tuple[int, ...]]:
    """Results of a kernel under eight drawn orders of its warps."""
    module = parse(kernel(body, shared))
    fine = translate_kernel(module, module.kernels["k"], True)
    out = set()
    for seed in range(8):
        memory = FlatMemory()
        at = memory.add(np.zeros(4 * threads, np.uint8))
        bank = bytes(0x160) + at.to_bytes(8, "little") * 2 + bytes(8)
        Launch(fine, memory, (1, 1, 1), (threads, 1, 1), {0: bank}, warps=seed).run_all_blocks()
        out.add(tuple(memory.read(at, 4 * threads).view(np.uint32).tolist()))
    return out


EXCHANGE = f"""
mov.u32 %r2, s; shl.b32 %r3, %r30, 2; add.u32 %r3, %r2, %r3; st.shared.u32 [%r3], %r30; BARRIER
xor.b32 %r4, %r30, 96; shl.b32 %r4, %r4, 2; add.u32 %r4, %r2, %r4; ld.shared.u32 %r1, [%r4]; {STORE}"""


def test_drawn_orders_show_a_missing_barrier_and_no_other() -> None:
    shared = ".shared .align 4 .b8 s[512];"
    want = tuple(n ^ 96 for n in range(128))
    assert orders(EXCHANGE.replace("BARRIER", "bar.sync 0;"), shared) == {want}
    assert len(orders(EXCHANGE.replace("BARRIER", ""), shared)) > 1


def test_a_predicated_barrier() -> None:
    body = f"setp.lt.u32 %p0, %r30, 64; @%p0 bar.sync 1, 64; mov.u32 %r1, 3; {STORE}"
    assert run(kernel(body), threads=128).tolist() == [3] * 128


def test_a_barrier_is_complete_while_others_spin() -> None:
    """Warps 0 and 1 meet and then raise the flag that warp 2 polls."""
    body = f"""
mov.u32 %r2, s; setp.eq.u32 %p0, %r30, 0; @%p0 st.shared.u32 [%r2], 0; bar.sync 0;
setp.ge.u32 %p1, %r30, 64; @%p1 bra POLL; bar.sync 1, 64; st.shared.u32 [%r2], 7; bra E;
POLL: ld.volatile.shared.u32 %r3, [%r2]; setp.eq.u32 %p2, %r3, 0; @%p2 bra POLL; E: ld.shared.u32 %r1, [%r2]; {STORE}"""
    assert run(kernel(body, ".shared .align 4 .b8 s[4];"), threads=96).tolist() == [7] * 96


def test_lanes_of_a_warp_meet_at_different_barriers() -> None:
    """bar.warp.sync orders both sides of a branch, whichever runs first."""
    body = f"""
mov.u32 %r2, s; shl.b32 %r3, %r30, 2; add.u32 %r3, %r2, %r3; xor.b32 %r4, %r30, 16; shl.b32 %r4, %r4, 2; add.u32 %r4, %r2, %r4;
setp.lt.u32 %p0, %r30, 16; @%p0 bra LOW; st.shared.u32 [%r3], %r30; bar.warp.sync -1; ld.shared.u32 %r1, [%r4]; bra E;
LOW: add.u32 %r5, %r30, 100; st.shared.u32 [%r3], %r5; bar.warp.sync -1; ld.shared.u32 %r1, [%r4]; E: {STORE}"""
    shared = ".shared .align 4 .b8 s[128];"
    want = [n + 16 for n in range(16)] + [100 + n for n in range(16)]
    assert run(kernel(body, shared)).tolist() == want
    assert orders(body, shared, 32) == {tuple(want)}


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("setp.lt.u32 %p0, %r30, 8; @!%p0 bra L; bar.warp.sync 0xffff; L: bar.sync 0;", "divergent barrier: lanes 0xff"),
        ("bar.warp.sync 1;", "misses the executing lane"),
        ("mov.u32 %r2, 48; bar.sync 1, %r2;", "no multiple of 32"),
    ],
)  # fmt: skip
def test_broken_barriers(body: str, what: str) -> None:
    fault = fails(kernel(body))
    assert what in fault.what
    assert fault.kind == "sync"


def test_an_mbarrier_counts() -> None:
    body = ".shared .align 8 .b8 b[8]; mov.u32 %r2, b; mbarrier.init.shared.b64 [%r2], 5; bar.sync 0; mbarrier.arrive.shared.b64 %rd1, [%r2];"
    assert "more arrivals" not in fails(kernel(body + " trap;"), threads=4).what
    body = ".shared .align 8 .b8 b[8]; mov.u32 %r2, b; mbarrier.init.shared.b64 [%r2], 64; bar.sync 0; mbarrier.arrive.noComplete.shared.b64 %rd1, [%r2], 3;"
    assert "more arrivals" in fails(kernel(body)).what


# Each block but the first waits until the one before it has stored; %r1 is a block's number.
CHAIN = """{number}
mul.wide.u32 %rd1, %r1, 4; add.u64 %rd1, %in, %rd1;
setp.eq.u32 %p1, %r1, 0; @%p1 bra GO;
WAIT: ld.acquire.gpu.global.u32 %r3, [%rd1]; setp.eq.u32 %p2, %r3, 0; @%p2 bra WAIT;
GO: st.release.gpu.global.u32 [%rd1+4], 1; st.global.u32 [%i], %r1;"""
TICKET = "atom.global.add.u32 %r1, [%in], 1;"


def test_blocks_that_wait_need_tickets() -> None:
    """No order of starting is promised: numbers by an atomic counter work, %ctaid does not."""
    options: dict[str, Any] = {"threads": 1, "blocks": 6, "chunk_lanes": 2, "max_steps": 20_000}
    for seed in range(8):
        found = run(kernel(CHAIN.format(number=TICKET)), shuffle=seed, **options)
        assert sorted(found) == list(range(6))
    by_block = kernel(CHAIN.format(number="mov.u32 %r1, %ctaid.x;"))
    assert run(by_block, **options).tolist() == list(range(6))
    what = fails(by_block, shuffle=1, **(options | {"threads": 1})).what
    assert "did not end" in what or "deadlock" in what  # which is first is a matter of time


LANES = f"mov.u32 %r1, %r30; mov.u32 %r2, 16; mov.u32 %r3, 31; mov.u32 %r4, -1; X shfl.sync.down.b32 %r5, %r1, %r2, %r3, %r4; add.u32 %r1, %r1, %r5; Y {STORE}"


def test_literals_that_name_lanes_stand_in_the_c() -> None:
    text = c_source(code_of(kernel(LANES.replace("X", "").replace("Y", ""))))
    assert "(Source){0, 0x10ull}, (Source){0, 0x1full}, (Source){0, 0xffffffffull})" in text


@pytest.mark.parametrize(
    ("before", "after", "want"),
    [
        ("L:", "shr.u32 %r2, %r2, 1; setp.ne.u32 %p1, %r2, 0; @%p1 bra L;", 496),
        ("shr.u32 %r2, %r2, 2;", "", 4),
        ("setp.eq.u32 %p1, %r30, 0; @%p1 mov.u32 %r2, 3;", "", 3),
        ("setp.eq.u32 %p1, %r30, 0; @!%p1 bra L; mov.u32 %r2, 5; L:", "", 5),
        ("mov.u32 %r2, %r3;", "", 31),
    ],
)
def test_register_that_names_lanes_may_change(before: str, after: str, want: int) -> None:
    text = kernel(LANES.replace("X", before).replace("Y", after))
    assert run(text)[0] == want
