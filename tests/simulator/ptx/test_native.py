# ruff: noqa: E501 - PTX stays one instruction a line
"""Compiled kernels: random programs, faults, order, memory."""

from __future__ import annotations

import itertools
import sys
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as some
from tests.simulator.ptx.evaluator import Thread
from tests.simulator.ptx.flat import FlatMemory
from tests.simulator.ptx.machine import STORE, code_of, kernel

from nvgpusim import l2
from nvgpusim.compilers import NoCompilerError
from nvgpusim.l2 import CACHEABLE
from nvgpusim.memory import DmaBuf, Mapping, MmuFault
from nvgpusim.ptx import KernelCode, KernelFault, Launch, parse, translate_kernel
from nvgpusim.ptx.native import build

THREADS, BLOCKS = 64, 3
SEEDS = np.random.default_rng(0).integers(0, 1 << 32, 4096, np.uint32)


def outcome(code: KernelCode, data: Any = SEEDS, **options: Any) -> Any:
    """All memory after the run, or the fault's words; how much ran."""
    memory = FlatMemory()
    size = 4 * THREADS * BLOCKS
    out, given = memory.add(np.zeros(4 * size, np.uint8)), memory.add(data.view(np.uint8))
    bank = bytes(0x160) + out.to_bytes(8, "little") + given.to_bytes(8, "little") + bytes(range(8))
    launch = Launch(code, memory, (BLOCKS, 1, 1), (THREADS, 1, 1), {0: bank}, **options)
    try:
        launch.run_all_blocks()
    except (KernelFault, MmuFault) as e:
        return str(e), e.where
    images = [memory.read(at, n).tobytes() for at, n in ((out, 4 * size), (given, data.nbytes))]
    return *images, launch.thread_instrs


def run(text: str, **options: Any) -> Any:
    """The outcome of kernel k."""
    return outcome(code_of(text), **options)


def digest(text: str, **options: Any) -> int:
    """CRC of the output of kernel k.

    Those that tests expect are of the version that ran PTX on numpy and as C, both alike.
    """
    return zlib.crc32(outcome(code_of(text), **options)[0])


# random blocks

OPS: tuple[str, ...] = (
    "add.u32 {r}, {r}, {r};", "mul.lo.u32 {r}, {r}, {r};", "mad.lo.s32 {r}, {r}, {r}, {r};", "sub.s32 {r}, {r}, 77;",
    "shl.b32 {r}, {r}, {r};", "shr.s32 {r}, {r}, 3;", "xor.b32 {r}, {r}, {r};", "mul.wide.s32 %rd1, {r}, {r};",
    "cvt.u32.u64 {r}, %rd1;", "add.f32 {f}, {f}, {f};", "fma.rn.f32 {f}, {f}, {f}, {f};", "mul.ftz.f32 {f}, {f}, {f};",
    "max.f32 {f}, {f}, {f};", "mov.b32 {r}, {f};", "mov.b32 {f}, {r};", "setp.lt.s32 {p}, {r}, {r};", "setp.gtu.f32 {p}|{p}, {f}, {f};",
    "selp.b32 {r}, {r}, {r}, {p};", "@{p} add.u32 {r}, {r}, 1;", "@!{p} mov.f32 {f}, 0f3FC00000;", "cvt.rn.f32.s32 {f}, {r};",
    "cvt.rzi.s32.f32 {r}, {f};", "and.pred {p}, {p}, {p};", "ex2.approx.f32 {f}, {f};", "fns.b32 {r}, {r}, 0, 1;",
    "shfl.sync.bfly.b32 {r}, {r}, 1, 31, -1;", "bar.sync 0;", "mov.u32 {r}, %laneid;", "prmt.b32 {r}, {r}, {r}, {r};",
    "and.b32 %r20, {r}, 0x3ffc; cvt.u64.u32 %rd2, %r20; add.u64 %rd2, %rd2, %in; ld.global.b32 {r}, [%rd2];",
    "st.global.b32 [%i], {r};", "st.local.b32 [d+4], {r};", "ld.local.b32 {r}, [d+4];",
)  # fmt: skip
ALONE = tuple(
    op for op in OPS if not any(word in op for word in ("ex2", "shfl", "bar.", "%laneid"))
)
"""Opcodes that the evaluator knows, and a thread does on its own."""
OPS += (
    "shr.u32 %r20, {r}, 24; shl.b32 %r20, %r20, 2; add.u32 %r20, %r20, %r21; ld.shared.b32 {r}, [%r20];",
    "shr.u32 %r20, {r}, 24; shl.b32 %r20, %r20, 2; add.u32 %r20, %r20, %r21; st.shared.b32 [%r20], {r};",
    "and.b32 %r20, {r}, 0x3ff0; cvt.u64.u32 %rd2, %r20; add.u64 %rd2, %rd2, %in; @{p} st.global.v2.b32 [%rd2], {{{r}, {r}}};",
    "selp.b32 %r20, 0x7FF80000, {r}, {p}; mov.b64 %rd1, {{{r}, %r20}}; add.f64 %rd1, %rd1, %rd1; cvt.u32.u64 {r}, %rd1;",
)  # fmt: skip
"""Some reach for the memory of other lanes."""


LABELS = itertools.count()


@some.composite
def body(draw: Any, depth: int = 0, ops: tuple[str, ...] = OPS) -> str:
    """Instructions, forward branches and short loops."""
    lines = []
    register = {"r": "%r{}", "f": "%f{}", "p": "%p{}"}
    for _ in range(draw(some.integers(2, 14))):
        op = draw(some.sampled_from(ops))
        if depth and ("bar." in op or "shfl" in op):
            continue
        for kind, name in register.items():
            while f"{{{kind}}}" in op:
                op = op.replace(f"{{{kind}}}", name.format(draw(some.integers(1, 5))), 1)
        lines.append(op.replace("{{", "{").replace("}}", "}"))
    if depth < 2:
        label = f"L{next(LABELS)}"
        inner = draw(body(depth + 1, ops))
        if draw(some.booleans()):
            lines.append(f"@%p{draw(some.integers(1, 5))} bra {label}; {inner} {label}:")
        else:  # a loop of up to eight turns, different ones in each lane
            count = f"%r{24 + depth}"
            lines.append(
                f"and.b32 {count}, %r{draw(some.integers(1, 5))}, 7; {label}: {inner} sub.s32 {count}, {count}, 1; setp.gt.s32 %p7, {count}, 0; @%p7 bra {label};"
            )
    return "\n".join(lines)


SOME_PROGRAMS = settings(
    max_examples=12,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
# Registers that a body reads, drawn from memory and the lane's number.
DRAWN = "mov.u32 %r21, s; " + " ".join(
    f"ld.global.b32 %r{n}, [%in+{4 * n}]; xor.b32 %r{n}, %r{n}, %r28; mul.lo.u32 %r{n}, %r{n}, {2654435761 * n % (1 << 32) | 1}; mov.b32 %f{n}, %r{n};"
    for n in range(1, 6)
)


@SOME_PROGRAMS
@given(body(0, ALONE), body(0, ALONE))
def test_random_programs(first: str, second: str) -> None:
    """Against a plain evaluator: arithmetic, branches, loops, loads, local memory."""
    text = kernel(
        f".local .align 4 .b8 d[8]; st.local.b32 [d+4], 7; setp.gt.s32 %p1, %r28, 9;\n{DRAWN}\n{first}\n{second}\nmov.b32 %r6, %f1; add.u32 %r1, %r1, %r6; {STORE}"
    ).replace("mov.u32 %r21, s;", "")
    got = np.frombuffer(outcome(code_of(text))[0], np.uint32)
    entry, given = parse(text).kernels["k"], 1 << 32
    memory = {given + 4 * n: int(word) for n, word in enumerate(SEEDS)}
    with np.errstate(all="ignore"):
        for lane in range(0, THREADS * BLOCKS, 13):
            special = {
                "out": 0, "in": given, "%tid.x": lane % THREADS, "%ctaid.x": lane // THREADS,
                "%ntid.x": THREADS,
            }  # fmt: skip
            thread = Thread(entry, special, memory)
            thread.run()
            assert thread.stored == {4 * lane: int(got[lane])}


def test_literals_that_are_no_bits_of_integers() -> None:
    """A decimal float under abs and neg, and a signaling NaN of 64 bits."""
    assert (
        digest(
            kernel(
                f"abs.ftz.f32 %f1, 1.5; neg.ftz.f32 %f2, 1.5; add.f32 %f1, %f1, %f2; min.f64 %rd1, 0d7FF0000000000001, 0d47EFFFFFEFFFFFFF; cvt.u32.u64 %r2, %rd1; mov.b32 %r1, %f1; add.u32 %r1, %r1, %r2; {STORE}"
            )
        )
        == 4059650689
    )


@pytest.mark.parametrize(("bits", "top"), [(64, 52), (32, 23), (16, 10), (-16, 7)])
def test_min_and_max_of_nans(bits: int, top: int) -> None:
    """A NaN of any kind loses to a number; two are the canonical one, in 64 bits the second made
    quiet [H200, 2026-11-22]."""
    t, bits = f"{'b' * (bits < 0)}f{abs(bits)}", abs(bits)
    inf = (1 << bits - 1) - (1 << top)
    quiet, one = 1 << top - 1, (1 << bits - 2) - (1 << top)
    nans = [inf + 1, inf + quiet + 3, (1 << bits - 1) + inf + quiet // 2 + 5]
    order = [(1 << bits - 1) + inf, 1 << bits - 1, 0, one, inf]
    every = [(a, b) for a in nans + order for b in nans + order]
    pairs = [every[n % len(every)] for n in range(THREADS * BLOCKS)]

    def want(a: int, b: int, best: Any, nan: bool) -> int:
        if (nan and {a, b} & {*nans}) or {a, b} <= {*nans}:
            return b | quiet if bits == 64 else (1 << bits - 1) - 1
        return int(a if b in nans else b if a in nans else best(a, b, key=order.index))

    ops = ["min", "max"] + ["min.NaN", "max.NaN"] * (bits < 64)
    size, d = bits // 8, {64: "%rd", 32: "%r", 16: "%h"}[bits]
    lines = [
        f"{op}.{t} {d}3, {d}1, {d}2; st.global.b{bits} [%rd5+{n * size * len(pairs)}], {d}3;"
        for n, op in enumerate(ops)
    ]
    got = run(
        kernel(
            f"mul.wide.u32 %rd5, %r28, {size}; add.u64 %rd4, %in, %rd5; add.u64 %rd4, %rd4, %rd5; add.u64 %rd5, %o, %rd5; ld.global.v2.b{bits} {{{d}1, {d}2}}, [%rd4]; {' '.join(lines)}"
        ),
        data=np.array(pairs, f"u{size}").reshape(-1),
    )
    words = np.frombuffer(got[0], f"u{size}")[: len(ops) * len(pairs)].tolist()
    best = {"min": min, "max": max}
    assert words == [want(a, b, best[op[:3]], "NaN" in op) for op in ops for a, b in pairs]


@pytest.mark.parametrize("n", [-2, 0, 2])
def test_no_bit_is_found_from_a_base_beyond_all(n: int) -> None:
    """Undefined; the loop of the PTX ISA ends at once."""
    got = run(kernel(f"fns.b32 %r1, 0xff00ff00, %r30, {n}; {STORE}"))
    assert set(np.frombuffer(got[0], np.uint32)[32:THREADS]) == {0xFFFFFFFF}


@pytest.mark.parametrize(("name", "value"), [("or", "_|%p1"), ("and", "%r1|%p1")])
def test_lop3_with_a_predicate(name: str, value: str) -> None:
    """PTX ISA 8.2: p = (d != 0) BoolOp q, where q may be negated or p itself and d the sink."""
    got = run(
        kernel(
            f"mov.u32 %r1, 64; and.b32 %r2, %r28, 4; setp.gt.u32 %p1, %r28, 9; st.global.u32 [%i], %r1; lop3.{name}.b32 {value}, %r28, 5, %r2, 0x80, !%p1; selp.u32 %r3, 1, 0, %p1; add.u32 %r1, %r1, %r3; {STORE}"
        )
    )
    lane = np.arange(THREADS * BLOCKS)
    test = (lane & 4 != 0) | (lane <= 9) if name == "or" else (lane & 4 != 0) & (lane <= 9)
    want = (64 if name == "or" else lane & 4) + test
    assert np.frombuffer(got[0], np.uint32)[: len(lane)].tolist() == want.tolist()


def test_a_signed_word_in_a_register_of_float64() -> None:
    text = kernel(
        f"ld.global.s32 %rd1, [%in+8]; st.global.u32 [%i], %r28; mov.b64 {{%r2, %r1}}, %rd1; @%p0 add.f64 %rd1, %rd1, %rd1; {STORE}"
    )
    assert digest(text, data=np.array([5, 0, 0x80000001, 0], np.uint32)) == 2343917793


# faults, order, memory


@pytest.mark.parametrize(
    ("line", "what", "who"),
    [
        ("@%p1 mov.u64 %rd1, 64; ld.global.u32 %r1, [%rd1];", "MMU fault: read of 0x40: unmapped", 73),
        ("@%p1 add.u64 %rd1, %rd1, 2; ld.global.u32 %r1, [%rd1];", "misaligned address 0x10011002: an access of 4 bytes", 73),
        ("@%p1 mov.u64 %rd1, 0xFE00000000; st.global.u32 [%rd1], %r1;", "invalid address space: global access to 0xfe00000000", 73),
        ("@%p1 mov.u64 %rd1, 0xFE00100000; ld.u32 %r1, [%rd1];", "shared address 0x100000 + 4 is beyond the block's 0xc000 bytes", 73),
        ("selp.u32 %r4, 0x10000, 0, %p1; add.u32 %r3, %r3, %r4; st.shared.u32 [%r3], %r1;", "shared address 0x10400 + 4 is beyond", 73),
        ("@%p1 bra NEXT; mov.u64 %rd1, 128; NEXT: ld.global.u32 %r1, [%rd1]; ld.global.u32 %r1, [%rd1+0x4000000];", "MMU fault: read of 0x80: unmapped", 0),
    ],
)  # fmt: skip
def test_a_fault_names_thread_and_line(line: str, what: str, who: int) -> None:
    """Lane 9 of the second block, in the fifth turn of a loop, or all others before it."""
    text = f""".shared .align 4 .b8 s[64]; mov.u32 %r2, 0; mov.u32 %r3, s; mov.u64 %rd1, %in;
LOOP: add.u32 %r2, %r2, 1; setp.eq.u32 %p1, %r28, 73; setp.eq.and.u32 %p1, %r2, 5, %p1; {line}
setp.lt.u32 %p2, %r2, 8; @%p2 bra LOOP; {STORE}"""
    got = run(kernel(text))
    assert len(got) == 2 and what in got[0]
    place = f"block ({who // THREADS}, 0, 0), thread ({who % THREADS}, 0, 0), PTX line 15: LOOP"
    assert place in got[1]


def test_what_only_the_sanitizer_looks_at() -> None:
    """Volatile, acquiring and releasing accesses, fences, hints, addresses that are literals."""
    text = kernel(
        """
.shared .align 16 .b8 s[1024]; mov.u32 %r3, s; shl.b32 %r2, %r30, 2; add.u32 %r2, %r2, %r3;
setp.lt.u32 %p1, %r30, 40; st.volatile.shared.u32 [%r2], %r28; membar.cta; bar.warp.sync -1; @%p1 nanosleep.u32 20;
bar.sync 0; xor.b32 %r4, %r2, 36; ld.relaxed.cta.shared.u32 %r1, [%r4]; fence.acq_rel.gpu;
@%p1 st.shared.v2.u32 [s+512], {3, 9}; ld.acquire.gpu.global.u32 %r5, [%in]; bar.sync 0;
ld.shared.u32 %r6, [s+516]; mad.lo.u32 %r1, %r1, %r5, %r6; prefetch.global.L2 [%in];
cvt.u64.u32 %rd1, %r2; cvta.shared.u64 %rd2, %rd1; isspacep.shared %p2, %rd2; isspacep.global %p3, %in;
isspacep.local %p4, %rd2; @%p2 add.u32 %r1, %r1, 1; @%p3 add.u32 %r1, %r1, 2; @%p4 add.u32 %r1, %r1, 4;
atom.shared.add.u32 %r7, [s+768], 5; bar.sync 0; ld.shared.u32 %r7, [s+768]; add.u32 %r1, %r1, %r7;
st.release.gpu.global.u32 [%i], %r1;"""
    )
    assert digest(text) == 1102903408


COPYING = """
.shared .align 16 .b8 s[4096]; mov.u32 %r2, s; shl.b32 %r3, %r30, 4; add.u32 %r2, %r2, %r3;
shl.b32 %r4, %r28, 4; and.b32 %r4, %r4, 0x1ff0; cvt.u64.u32 %rd1, %r4; add.u64 %rd1, %in, %rd1;
mov.u32 %r5, 0; mov.u32 %r1, 0; and.b32 %r6, %r30, 12; cp.async.ca.shared.global [%r2], [%rd1], 16;
cp.async.commit_group;
L: add.u64 %rd1, %rd1, 16; cp.async.ca.shared.global [%r2+2048], [%rd1], 4, %r6;
cp.async.cg.shared.global [%r2+1024], [%rd1+16], 16; cp.async.commit_group; {middle}
cp.async.wait_group 1; ld.shared.u32 %r7, [%r2]; mad.lo.u32 %r1, %r1, 31, %r7;
ld.shared.u32 %r8, [%r2+1024]; mad.lo.u32 %r1, %r1, 31, %r8; setp.lt.u32 %p1, %r30, 40;
@%p1 cp.async.ca.shared.global [%r2], [%rd1+8], 8; add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, {turns};
@%p2 bra L; cp.async.wait_all; ld.shared.v4.u32 {{%r7, %r8, %r9, %r10}}, [%r2];
mad.lo.u32 %r1, %r1, %r7, %r8; ld.shared.u32 %r7, [%r2+2048]; mad.lo.u32 %r1, %r1, %r7, %r9;
st.global.u32 [%i], %r1;"""


SOME_WAIT = """setp.lt.u32 %p3, %r30, 20; @%p3 bra W; cp.async.wait_all; W:
ld.shared.u32 %r9, [%r2+1024]; mad.lo.u32 %r1, %r1, 31, %r9;"""


CLOCK = "{ .reg .b64 %q; mov.u64 %q, %clock64; }"


@pytest.mark.parametrize(
    ("turns", "middle", "want"),
    [
        (3, "", 2235983463), (3, CLOCK, 2235983463), (3, SOME_WAIT, 3505680095),
        (400, "", 691168120), (400, CLOCK, 691168120), (400, SOME_WAIT, 803082876),
    ],
)  # fmt: skip
def test_asynchronous_copies(turns: int, middle: str, want: int) -> None:
    """Some lanes' under a guard, and a loop that C leaves in the middle."""
    text = COPYING.format(middle=middle, turns=turns)
    if turns == 3:
        text = text.replace("@%p1 cp", "cp").replace("add.u64 %rd1, %rd1, 16;", "")
    assert digest(kernel(text)) == want


def test_a_hot_kernel_is_compiled_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long loop with lanes in many places: no turn is lost, none done twice."""
    text = kernel(f"""mov.u32 %r1, 0; mov.u32 %r2, 0; and.b32 %r5, %r28, 31; add.u32 %r5, %r5, 6000;
LOOP: add.u32 %r2, %r2, 1; and.b32 %r3, %r2, %r28; setp.eq.u32 %p1, %r3, 0; @%p1 bra NEXT;
mad.lo.u32 %r1, %r1, 5, %r2; st.global.u32 [%i], %r1; NEXT: setp.lt.u32 %p2, %r2, %r5; @%p2 bra LOOP; {STORE}""")
    monkeypatch.setattr(build, "HOT", 1 << 60)
    cold = code_of(text)
    want = outcome(cold)
    monkeypatch.setattr(build, "HOT", 5)
    hot = code_of(text)
    assert outcome(hot)[:2] == want[:2]
    assert hot.native.library.well and not cold.native.library.well  # type: ignore[attr-defined]


def test_a_register_that_nobody_wrote_is_zero_at_every_launch() -> None:
    """The memory of a chunk is kept for the next launch, with what the last one left in it."""
    text = kernel(
        f"ld.global.u32 %r2, [%in]; setp.lt.u32 %p1, %r30, %r2; @%p1 mov.u32 %r1, 9; bar.sync 0; {STORE}"
    )
    code = code_of(text)
    many, few = (np.full(16, n, np.uint32) for n in (60, 7))
    assert outcome(code, many) == outcome(code, many)
    assert outcome(code, few) == outcome(code_of(text), few)


@pytest.mark.parametrize(
    ("types", "n", "want"),
    [("f32.f16.f16.f32", 4, 2673858147), ("f16.f16.f16.f16", 2, 3756656981)],
)
def test_parts_of_a_product_that_nobody_reads(types: str, n: int, want: int) -> None:
    """Such registers have no memory in C."""
    c, d = (", ".join(f"{x}{k}" for k in range(n)) for x in "cd")
    body = f"""mov.u32 a, %r28; mov.u32 b, 0x3C003C00; mov.u32 c0, 0; mov.u32 c1, b; mov.u32 c2, 0; mov.u32 c3, 0;
mma.sync.aligned.m16n8k16.row.col.{types} {{{d}}}, {{a, b, a, b}}, {{b, b}}, {{{c}}}; mov.b32 %r1, d1; {STORE}"""
    assert digest(kernel(body, regs=".reg .b32 a, b, c<4>, d<4>;")) == want


@pytest.mark.parametrize(
    ("arm", "want"),
    [("fns.b32 %r1, %r1, 0, 1;", 2893333183), ("st.global.u32 [%i+4], %r1;", 1970955516)],
)
def test_lanes_meet_where_others_wait(arm: str, want: int) -> None:
    """Whoever comes through a branch, or a loop, stops at the join."""
    text = f"""and.b32 %r5, %r28, 3; mov.u32 %r1, %r28; shr.u32 %r6, %r28, 3; mul.wide.u32 %rd1, %r6, 32; add.u64 %rd1, %o, %rd1;
LOOP: setp.eq.u32 %p1, %r5, 1; @%p1 bra ELSE; {arm} bra JOIN; ELSE: add.u32 %r1, %r1, 7; JOIN: add.u32 %r1, %r1, %r5;
st.global.u32 [%rd1], %r1; ld.global.u32 %r2, [%rd1]; mad.lo.u32 %r1, %r1, 3, %r2; setp.gt.u32 %p2, %r5, 2; @%p2 bra OUT;
{arm} OUT: sub.u32 %r5, %r5, 1; setp.lt.s32 %p3, %r5, -3; @!%p3 bra LOOP; {STORE}"""
    assert digest(kernel(text)) == want


def test_spinning_threads_let_others_run() -> None:
    text = f""".shared .align 4 .b8 turn[4]; mov.u32 %r2, turn; setp.eq.u32 %p0, %r30, 0; @%p0 st.shared.u32 [%r2], 0; bar.sync 0;
SPIN: ld.shared.u32 %r1, [%r2]; setp.ne.u32 %p1, %r1, %r30; @%p1 bra SPIN;
add.u32 %r3, %r1, 1; st.shared.u32 [%r2], %r3; {STORE}"""
    code = code_of(kernel(text))
    words = np.frombuffer(outcome(code)[0], np.uint32)[: THREADS * BLOCKS]
    assert words.tolist() == list(range(THREADS)) * BLOCKS
    assert (
        "did not end" in outcome(code_of(kernel("L: add.u32 %r1, %r1, 1; bra L;")), max_steps=10)[0]
    )


def test_a_long_loop_is_no_endless_one() -> None:
    """The limit is for time: a kernel that waited a second in C was ended, and a driver blamed."""
    long = "mov.u32 %r1, 0; L: add.u32 %r1, %r1, 1; setp.lt.u32 %p0, %r1, 100000; @%p0 bra L;"
    words = np.frombuffer(outcome(code_of(kernel(long + STORE)), max_steps=5000)[0], np.uint32)
    assert set(words[: THREADS * BLOCKS].tolist()) == {100_000}


def test_lines_of_the_l2() -> None:
    """A line that the GPU has read or written stays, with its stores, until a flush."""
    code = code_of(
        kernel(
            "ld.global.u32 %r1, [%in]; st.global.u32 [%i], %r1; @%p0 st.global.u32 [%in], %r1; ld.global.u32 %r2, [%in+4]; setp.ne.u32 %p1, %r2, 0; @%p1 st.global.u32 [%in+8], %r2; st.global.u32 [%in+512], %r1; ld.global.u32 %r2, [%in+512]; st.global.u32 [%i+4], %r2;"
        )
    )
    memory, buf = FlatMemory(), DmaBuf(4096, "kept")
    buf.array = np.zeros(4096, np.uint8)
    memory.add_mapping(Mapping(1 << 30, 4096, buf, flags=CACHEABLE))
    out, words = memory.add(np.zeros(4096, np.uint8)), buf.array.view(np.uint32)
    bank = bytes(0x160) + out.to_bytes(8, "little") + (1 << 30).to_bytes(8, "little") + bytes(8)
    seen = []
    for value in (5, 6):
        words[:2], words[128] = (value, value - 5), 1
        Launch(code, memory, (1, 1, 1), (32, 1, 1), {0: bank}).run_all_blocks()
        seen.append((*memory.read(out, 8).view(np.uint32).tolist(), int(words[2]), int(words[128])))
    assert seen == [(5, 5, 0, 1), (5, 5, 0, 1)]
    l2.board_l2().flush(invalidate=False)
    assert words[[0, 1, 128]].tolist() == [6, 1, 5]  # a clean line is not written back


def test_without_a_compiler_one_line_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NoCompilerError, match=r"gcc or clang.*pip install ziglang"):
        build.compiler_command.__wrapped__()
    monkeypatch.setattr(build, "compiler_command", lambda: (sys.executable,))
    with pytest.raises(NoCompilerError, match="cannot compile a kernel"):
        outcome(code_of(kernel(f"mov.u32 %r1, 3; {STORE}")))


def test_atomics() -> None:
    """Integers, sums of floats and swaps of each width; the last lane's is the last."""
    ops = [
        "add.u32", "min.s32", "max.s32", "min.u32", "max.u32", "and.b32", "or.b32", "xor.b32", "exch.b32",
        "inc.u32", "dec.u32", "add.f32",
    ]  # fmt: skip
    lines = [
        f"atom.global.{op} {'%f1' if 'f' in op[-3:] else '%r5'}, [%in+{4 * n}], {'%f2' if 'f' in op[-3:] else '%r4'};"
        for n, op in enumerate(ops)
    ]
    body = f"""mov.u32 %r1, 0; mad.lo.u32 %r4, %r28, 2654435761, 12345; cvt.rn.f32.u32 %f2, %r28; {" ".join(lines)}
xor.b32 %r1, %r5, %r4; red.global.add.u64 [%in+56], %i; atom.global.cas.b32 %r6, [%in+52], %r28, %r4; add.u32 %r1, %r1, %r6; {STORE}"""
    text = kernel(body)
    module = parse(text)
    code, memory = translate_kernel(module, module.kernels["k"]), FlatMemory()
    out = memory.add(np.zeros(4 * 128, np.uint8))
    into = memory.add(np.arange(16, dtype=np.uint32).view(np.uint8))
    bank = bytes(0x160) + out.to_bytes(8, "little") + into.to_bytes(8, "little") + bytes(8)
    Launch(code, memory, (2, 1, 1), (64, 1, 1), {0: bank}).run_all_blocks()
    images = memory.read(out, 512).tobytes() + memory.read(into, 64).tobytes()
    assert zlib.crc32(images) == 294328251


PARTS = [
    ("0xffff", "setp.lt.u32 p, l, 16;", 2675790739),
    ("0xffffff00", "setp.ge.u32 p, l, 8;", 2231139946),
    ("m", "setp.ne.u32 p, l, 40;", 54371546),  # tiles of four lanes, each with a mask of its own
    ("m", "setp.lt.u32 p, l, 12;", 503558350),
]
TOGETHER = [
    "shfl.sync.up.b32 x|z, v, 1, 0x1c00, {mask};", "shfl.sync.bfly.b32 x|z, v, 1, 31, {mask};",
    "shfl.sync.down.b32 x|z, v, 2, 0x1c1f, {mask};", "shfl.sync.idx.b32 x|z, v, l, 0x1c1f, {mask};",
    "redux.sync.add.s32 x, v, {mask};", "redux.sync.min.s32 x, v, {mask};",
    "redux.sync.max.u32 x, v, {mask};", "redux.sync.xor.b32 x, v, {mask};",
    "match.any.sync.b32 x, v, {mask};", "match.any.sync.b64 x, w, {mask};",
    "match.all.sync.b32 x|z, v, {mask};", "vote.sync.ballot.b32 x, q, {mask};",
    "vote.sync.any.pred z, q, {mask};", "vote.sync.all.pred z, !q, {mask};",
    "vote.sync.uni.pred z, q, {mask};", "activemask.b32 x;",
]  # fmt: skip


@pytest.mark.parametrize(("mask", "test", "want"), PARTS)
def test_parts_of_warps_combine(mask: str, test: str, want: int) -> None:
    """Lanes of a part of a warp, and tiles that name a mask each."""
    every = " ".join(
        f"{op.format(mask=mask)} mad.lo.u32 %r1, %r1, 31, x; @z add.u32 %r1, %r1, 7;"
        for op in TOGETHER
    )
    body = f"""mov.u32 l, %laneid; and.b32 m, l, 28; shl.b32 m, 15, m;
sub.u64 w, %i, %o; add.u64 w, w, %in; ld.global.u32 v, [w]; and.b32 v, v, 0x80000003;
cvt.u64.u32 w, v; setp.gt.s32 q, v, 0; mov.u32 %r1, 0; mov.u32 x, 0; setp.eq.u32 z, l, 99;
{test} @!p bra E; {every} E: {STORE}"""
    regs = ".reg .pred p, q, z; .reg .b32 l, m, v, x; .reg .b64 w;"
    assert digest(kernel(body, regs=regs)) == want
