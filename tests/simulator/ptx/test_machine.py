# ruff: noqa: E501 - PTX stays one instruction a line
"""Rules for a thread: control flow, barriers, spaces, warps, messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nvgpusim.memory import MmuFault
from nvgpusim.ptx import KernelFault, Launch, PtxError, compile_kernel, parse

from .flat import FlatMemory

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


def run(text: str, threads: int = 32, blocks: int = 1, data: Any = None, **options: Any) -> Any:
    """Run kernel k; returns the output, one u32 a thread."""
    module = parse(text)
    code = compile_kernel(module, module.kernels["k"])
    memory = FlatMemory()
    out = memory.add(np.zeros(4 * threads * blocks, np.uint8))
    given = np.zeros(16, np.uint32) if data is None else np.asarray(data, np.uint32)
    into = memory.add(given.view(np.uint8))
    bank = bytes(0x160) + out.to_bytes(8, "little") + into.to_bytes(8, "little") + bytes(range(8))
    launch = Launch(code, memory, (blocks, 1, 1), (threads, 1, 1), {0: bank}, **options)
    launch.run()
    run.launch = launch  # type: ignore[attr-defined]
    return memory.read(out, 4 * threads * blocks).view(np.uint32)


def fails(text: str, threads: int = 32, **options: Any) -> KernelFault:
    """Run kernel k, which traps."""
    with pytest.raises(KernelFault) as caught:
        run(text, threads, **options)
    return caught.value


STORE = "st.global.u32 [%i], %r1;"


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


def test_calls_are_inlined() -> None:
    extra = """
.func (.param .b32 r) twice(.param .b32 x, .param .b64 unused);
.func (.param .b32 r) twice(.param .b32 x, .param .b64 unused) .noinline
{ .reg .b32 %a; .reg .pred %q; ld.param.b32 %a, [x]; setp.lt.u32 %q, %a, 5; @%q bra SMALL;
add.u32 %a, %a, %a; SMALL: st.param.b32 [r+0], %a; ret; }
"""
    one = """{ .param .b32 p0; .param .b64 p1; .param .b32 back; st.param.b32 [p0+0], %r1; st.param.b64 [p1], %rd1;
call.uni (back), twice, (p0, p1); ld.param.b32 %r1, [back+0]; }"""
    odd = one.replace("call.uni", "@%p1 call").replace(
        "st.param.b32 [p0+0], %r1;", "st.param.b32 [p0+0], %r1; st.param.b32 [back], %r1;"
    )
    body = f"mov.u32 %r1, %r30; mov.u64 %rd1, 0; and.b32 %r2, %r30, 1; setp.eq.u32 %p1, %r2, 1; {one} {odd} {STORE}"
    want = [n if n < 5 else 2 * n * (2 if n & 1 else 1) for n in range(32)]
    assert run(kernel(body, extra)).tolist() == want


def test_recursion_and_unknown_functions_are_refused() -> None:
    extra = ".func f() { call f, (); ret; }\n"
    for text, what in (
        (kernel("call f, ();", extra), "too deep"), (kernel("call g, ();"), "has no body"),
    ):  # fmt: skip
        module = parse(text)
        with pytest.raises(PtxError, match=what):
            compile_kernel(module, module.kernels["k"])


def test_spinning_threads_let_others_run() -> None:
    """Threads of one warp hand a token on: independent thread scheduling is needed."""
    shared = ".shared .align 4 .b8 turn[4];"
    body = f"""
mov.u32 %r2, turn; setp.eq.u32 %p0, %r30, 0; @%p0 st.shared.u32 [%r2], 0; bar.sync 0;
SPIN: ld.shared.u32 %r1, [%r2]; setp.ne.u32 %p1, %r1, %r30; @%p1 bra SPIN;
add.u32 %r3, %r1, 1; st.shared.u32 [%r2], %r3; {STORE}"""
    assert run(kernel(body, shared), threads=4).tolist() == [0, 1, 2, 3]


def test_endless_kernel_is_stopped() -> None:
    assert "did not end" in fails(kernel("L: bra L;"), max_steps=5000).what
    assert fails(kernel("L: bra L;"), stopped=lambda: True).what == "stopped"


def test_trap_names_the_place() -> None:
    fault = fails(kernel(".loc 1 42 3\nsetp.eq.u32 %p0, %r30, 7; @%p0 trap;"))
    assert fault.esr == 9
    assert "block (0, 0, 0), thread (7, 0, 0)" in fault.where
    assert "(source.cu:42)" in fault.where


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


# memory


def test_param_struct_special_registers_and_constants() -> None:
    extra = (
        '.const .align 4 .u32 c[2] = {7, 0x10};\n.section .debug_x { .b8 1 }\n.pragma "nounroll";\n'
    )
    body = f"""
ld.param.u8 %h0, [pod+3]; cvt.u32.u16 %r1, %h0; ld.const.u32 %r2, [c+4]; add.u32 %r1, %r1, %r2;
mov.u32 %r3, %nctaid.x; add.u32 %r1, %r1, %r3; mov.u32 %r3, %laneid; add.u32 %r1, %r1, %r3; mov.u32 %r3, %warpid; add.u32 %r1, %r1, %r3;
mov.u64 %rd1, %globaltimer; mov.u64 %rd2, %clock64; mov.u32 %r3, %lanemask_lt; popc.b32 %r3, %r3; add.u32 %r1, %r1, %r3;
mov.u32 %r3, %lanemask_ge; mov.u32 %r4, %lanemask_gt; xor.b32 %r3, %r3, %r4; mov.u32 %r4, %lanemask_eq; sub.u32 %r3, %r3, %r4;
add.u32 %r1, %r1, %r3; mov.u32 %r3, %lanemask_le; mov.u32 %r4, %clock; membar.gl; fence.acq_rel.gpu; nanosleep.u32 100; prefetch.global.L2 [%in]; {STORE}"""
    text = kernel(body, extra)
    module = parse(text)
    code = compile_kernel(module, module.kernels["k"])
    memory = FlatMemory()
    out = memory.add(np.zeros(4096, np.uint8))
    bank = bytes(0x160) + out.to_bytes(8, "little") + bytes(8) + bytes(range(8))
    const = module.variables["c"].data
    Launch(code, memory, (2, 1, 1), (64, 1, 1), {0: bank, 3: const}, symbols={"c": 0}).run()
    lane = np.arange(128) % 32
    assert (
        memory.read(out, 512).view(np.uint32).tolist()
        == (3 + 16 + 2 + 2 * lane + np.arange(128) % 64 // 32).tolist()
    )


def test_missing_bank_and_variable() -> None:
    body = f"ld.const.u32 %r1, [c]; {STORE}"
    text = kernel(body, ".const .u32 c = 3;\n")
    assert fails(text, symbols={"c": 0}).esr == 0x12
    assert "no relocation placed it" in fails(text).what


def test_bank_too_short() -> None:
    text = kernel("ld.param.u64 %rd1, [pod+8];")
    assert fails(text).esr == 0x12


@pytest.mark.parametrize("width", ["u16", "u32", "u64", "v2.u32", "v4.u32", "v2.u64"])
def test_alignment(width: str) -> None:
    size = {"u16": 2, "u32": 4, "u64": 8, "v2.u32": 8, "v4.u32": 16, "v2.u64": 16}[width]
    reg = {
        "u16": "%h0",
        "u32": "%r1",
        "u64": "%rd1",
        "v2.u32": "{%r1, %r2}",
        "v4.u32": "{%r1, %r2, %r3, _}",
        "v2.u64": "{%rd1, %rd2}",
    }[width]
    run(
        kernel(
            f"ld.global.{width} {reg}, [%in+{size}]; st.global.{width} [%in+{size}], {reg.replace('_', '%r4')};"
        )
    )
    for op in (
        f"ld.global.{width} {reg}, [%in+{size // 2}];",
        f"st.global.{width} [%in+{size // 2}], {reg.replace('_', '%r4')};",
    ):
        fault = fails(kernel(op))
        assert fault.esr == 0xF
        assert fault.address is not None and fault.address % size == size // 2


def test_generic_access_by_lane() -> None:
    """One instruction: some lanes reach shared memory, some local, some global."""
    body = f"""
.local .align 4 .b8 d[8]; .shared .align 4 .b8 s[8];
mov.u64 %rd1, d; cvta.local.u64 %rd1, %rd1; mov.u64 %rd2, s; cvta.shared.u64 %rd2, %rd2; cvta.global.u64 %rd3, %in;
st.local.u32 [d], 100; mov.u32 %r2, s; st.shared.u32 [%r2], 200; bar.sync 0;
rem.u32 %r3, %r30, 3; setp.eq.u32 %p0, %r3, 0; setp.eq.u32 %p1, %r3, 1;
selp.b64 %rd4, %rd1, %rd3, %p0; selp.b64 %rd4, %rd2, %rd4, %p1;
ld.u32 %r1, [%rd4]; isspacep.shared %p2, %rd4; selp.u32 %r4, 1000, 0, %p2; add.u32 %r1, %r1, %r4;
add.u32 %r5, %r1, %r30; bar.sync 0; st.u32 [%rd4], %r5; ld.local.u32 %r6, [d]; setp.eq.u32 %p3, %r3, 0; @%p3 mov.u32 %r1, %r6;
setp.eq.u32 %p4, %r3, 2; @%p4 atom.add.u32 %r7, [%rd4], 1; cvta.to.local.u64 %rd5, %rd1; cvta.to.shared.u64 %rd6, %rd2; {STORE}"""
    got = run(kernel(body), data=[300] + [0] * 15)
    assert got.tolist() == [(100 + n, 1200, 300)[n % 3] for n in range(32)]


@pytest.mark.parametrize(
    ("body", "esr"),
    [
        (".shared .b8 s[8]; mov.u32 %r2, s; ld.shared.u32 %r1, [%r2+65536];", 0xE),
        (".local .align 4 .b8 d[8]; mov.u64 %rd1, d; ld.local.u32 %r1, [%rd1+0x400000];", 0xE),
        ("mov.u64 %rd1, 0xFE00000000; ld.global.u32 %r1, [%rd1];", 0x10),
        ("mov.u64 %rd1, 0xFD00001000; st.global.u32 [%rd1], %r1;", 0x10),
        ("mov.u64 %rd1, 0xFD00001000; red.global.add.u32 [%rd1], %r1;", 0x10),
        ("mov.u64 %rd1, 0xFE00000000; st.u32 [%rd1], %r1;", 0xE),
    ],
)  # fmt: skip
def test_spaces_are_guarded(body: str, esr: int) -> None:
    assert fails(kernel(body)).esr == esr


def test_stores_to_constants_are_refused() -> None:
    assert fails(kernel("st.param.u32 [pod], %r1;")).esr == 0x10


@pytest.mark.parametrize(
    "op",
    [
        "ld.global.u32 %r1, [%rd1];",
        "st.global.u32 [%rd1], %r1;",
        "atom.global.add.u32 %r1, [%rd1], 1;",
    ],
)
def test_unmapped_lane_is_named(op: str) -> None:
    body = f"setp.eq.u32 %p0, %r30, 9; mov.u64 %rd1, %i; @%p0 mov.u64 %rd1, 64; {op}"
    with pytest.raises(MmuFault) as caught:
        run(kernel(body))
    assert caught.value.va == 64
    assert "thread (9, 0, 0)" in caught.value.where


def test_scattered_over_mappings() -> None:
    """Odd lanes read one buffer, even ones another."""
    body = f"and.b32 %r2, %r30, 1; setp.eq.u32 %p0, %r2, 1; selp.b64 %rd1, %in, %i, %p0; st.global.u32 [%i], %r30; ld.global.u32 %r1, [%rd1]; st.global.u32 [%rd1], %r1; {STORE}"
    got = run(kernel(body), data=[77] + [0] * 15)
    assert got.tolist() == [77 if n & 1 else n for n in range(32)]


def test_atomics_across_two_mappings_stop() -> None:
    body = "and.b32 %r2, %r30, 1; setp.eq.u32 %p0, %r2, 1; selp.b64 %rd1, %in, %i, %p0; atom.global.add.u32 %r1, [%rd1], 1;"
    assert "two mappings" in fails(kernel(body)).what


@pytest.mark.parametrize(
    ("op", "start", "want"),
    [
        ("add.u32", 5, 5 + 32), ("inc.u32", 5, 5 + 32), ("dec.u32", 100, 0), ("max.u32", 5, 5), ("min.u32", 5, 1),
        ("or.b32", 4, 5), ("and.b32", 7, 1), ("xor.b32", 6, 6), ("exch.b32", 9, 1), ("add.f16x2", 0x3C00_3C00, 0x3C00_3C00),
    ],
)  # fmt: skip
def test_atomics(op: str, start: int, want: int) -> None:
    operand = {"inc.u32": "1000", "add.f16x2": "0"}.get(op, "1")
    body = f"atom.global.{op} %r1, [%in], {operand}; membar.gl; bar.sync 0; ld.global.u32 %r1, [%in]; {STORE}"
    assert run(kernel(body), data=[start] + [0] * 15)[0] == want


def test_compare_and_swap_is_a_lock() -> None:
    body = f"""
.shared .align 4 .b8 s[8]; mov.u32 %r2, s; st.shared.u64 [%r2], 0; bar.sync 0;
TRY: atom.shared.cas.b32 %r3, [%r2], 0, 1; setp.ne.u32 %p0, %r3, 0; @%p0 bra TRY;
ld.shared.u32 %r1, [%r2+4]; add.u32 %r4, %r1, 1; st.shared.u32 [%r2+4], %r4; atom.shared.exch.b32 %r3, [%r2], 0; {STORE}"""
    assert sorted(run(kernel(body)).tolist()) == list(range(32))


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


def test_block_of_odd_size() -> None:
    body = f"shfl.sync.down.b32 %r1, %r30, 1, 31, -1; {STORE}"
    got = run(kernel(body.replace("-1;", "0x7ff;")), threads=11, blocks=3)
    assert got.reshape(3, 11)[:, :10].tolist() == [list(range(1, 11))] * 3


def test_asynchronous_copies_land_when_waited_for() -> None:
    body = f"""
.shared .align 16 .b8 s[64]; mov.u32 %r2, s; setp.gt.u32 %p0, %r30, 0; @%p0 exit;
st.shared.v4.u32 [%r2], {{0, 0, 0, 0}}; st.shared.v4.u32 [%r2+16], {{9, 9, 9, 9}};
cp.async.cg.shared.global [%r2], [%in], 16; cp.async.commit_group; cp.async.ca.shared.global [%r2+16], [%in], 8, 3; cp.async.commit_group;
ld.shared.u32 %r3, [%r2]; cp.async.wait_group 1; ld.shared.u32 %r4, [%r2+4]; ld.shared.u32 %r5, [%r2+16]; cp.async.wait_all;
ld.shared.u32 %r6, [%r2+16]; ld.shared.u32 %r7, [%r2+20];
mad.lo.u32 %r1, %r3, 10, %r4; mad.lo.u32 %r1, %r1, 10, %r5; mad.lo.u32 %r1, %r1, 1000, %r6; add.u32 %r1, %r1, %r7; {STORE}"""
    assert run(kernel(body), data=[0x04000001, 2, 3, 4] + [0] * 12)[0] == 29 * 1000 + 1


# messages


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("frobnicate.u32 %r1, %r2;", "unknown instruction 'frobnicate'"),
        ("add.u32 %r1, %r2, %missing;", "unknown special register %missing"),
        ("add.u32.weird %r1, %r2, 1;", "unknown modifier .weird"), ("mul.u32 %r1, %r2, 1;", ".lo, .hi or .wide"),
        ("add.u64 %rd1, %r2, 1;", "has 32 bits"),
        ("bra NOWHERE;", "unknown label NOWHERE"), ("mov.u32 %r1, nothing;", "unknown name nothing"),
        ("add.u32 %r1, %r2;", "operand 3 is missing"), ("ld.global.v2.u32 %r1, [%in];", "2 destinations"),
        ("wmma.load.a.sync.aligned %r1;", "shape of wmma"), ("cvt.u32 %r1, %r2;", "two types"),
        ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%r1}, {%r2}, {%r3}, {%r4};", "first tensor cores"),
        ("ld.global.u32 %r1, %in;", "must be an address"), ("cvta.u64 %rd1, %rd2;", "no state space"),
        ("min.b32 %r1, %r2, %r3;", "signed or unsigned"), ("lop3.b32 %r1, %r2, %r3, %r4, %r5;", "must be a literal"),
        ("lop3.b32 %r1|%p1, %r2, %r3, %r4, 1;", "needs .and or .or"), ("lop3.or.b32 %r1, %r2, %r3, %r4, 1, %p1;", "two destinations"),
        ("mov.u32 5, %r1;", "cannot be written"),
        ("add.s32 %r1, %r2, 1.5;", "no .s32"), ("vadd.u32.u32.u32.sat %r1, %r2, %r3;", "unknown modifier .sat"),
        ("cp.async.cg.shared.global [%r1], [%in], 4;", "cp-size"), ("brx.idx %r1, NOTABLE;", "unknown branch table"),
        ("mov.u16 %h1, pod;", "32 or 64 bits"),
    ],
)  # fmt: skip
def test_unknown_forms_say_line_and_text(body: str, text: str) -> None:
    with pytest.raises(PtxError) as caught:
        module = parse(kernel(body))
        compile_kernel(module, module.kernels["k"])
    assert text in str(caught.value)
    assert "PTX line" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("`", "cannot read"), (".bogus", "unknown directive"), (".address_size 32", "64-bit"),
        (".visible .entry k() .strange {}", "performance directive"), (".visible .entry k() { ret;", "without end"),
        (".visible .entry k(.reg .b32 x) {}", "expected '.param'"), (".global .weird x;", "unknown type"),
        (".global .align 4 .u8 x[2] = {1, 2, 3};", "longer than"), (".func f() {", "without end"),
        (".visible .entry k() { .reg .v4 .b32 %v; }", "vector registers"), (".func f", "function without body"),
        (".visible .entry k() { { ret; }", "without end"), (".section .x {", "block without end"),
        (".visible .entry k() { @q ret; }", "undeclared register"), (".visible .entry k() { 5; }", "expected an instruction"),
    ],
)  # fmt: skip
def test_bad_modules(text: str, what: str) -> None:
    with pytest.raises(PtxError, match=what):
        module = parse(HEAD + text)
        for entry in module.kernels.values():
            compile_kernel(module, entry)


def test_initialisers() -> None:
    text = (
        HEAD
        + ".extern .shared .align 16 .b8 dyn[];\n.visible .global .align 8 .u64 p[3] = {generic(x), x, 5};\n.global .s16 x[2] = {-1, 2};\n.global .f32 f = 0f3F800000;\n"
    )
    module = parse(text)
    assert module.variables["p"].references == [(0, "x"), (8, "x")]
    assert module.variables["p"].data == bytes(16) + (5).to_bytes(8, "little")
    assert module.variables["x"].data == b"\xff\xff\x02\x00"
    assert module.variables["f"].data == np.float32(1).tobytes()
    assert module.variables["dyn"].size == 0


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
    fine = compile_kernel(module, module.kernels["k"], True)
    out = set()
    for seed in range(8):
        memory = FlatMemory()
        at = memory.add(np.zeros(4 * threads, np.uint8))
        bank = bytes(0x160) + at.to_bytes(8, "little") * 2 + bytes(8)
        Launch(fine, memory, (1, 1, 1), (threads, 1, 1), {0: bank}, warps=seed).run()
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


def test_copies_are_grouped_by_thread() -> None:
    """Odd threads commit once more, so wait_group 1 leaves only their second copy behind."""
    body = f"""
mov.u32 %r2, s; shl.b32 %r3, %r30, 3; add.u32 %r2, %r2, %r3; st.shared.u64 [%r2], 0;
and.b32 %r4, %r30, 1; setp.eq.u32 %p0, %r4, 1;
cp.async.ca.shared.global [%r2], [%in], 4; @%p0 cp.async.commit_group;
cp.async.ca.shared.global [%r2+4], [%in+4], 4; cp.async.commit_group; cp.async.wait_group 1;
ld.shared.u32 %r5, [%r2]; ld.shared.u32 %r6, [%r2+4]; mad.lo.u32 %r1, %r5, 10, %r6; {STORE}"""
    got = run(kernel(body, ".shared .align 8 .b8 s[256];"), data=[1, 2] + [0] * 14)
    assert got.tolist() == [10 if n & 1 else 0 for n in range(32)]


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


# the language around


def test_a_kernel_that_cannot_be_read_refuses_itself() -> None:
    bad = ".visible .entry bad(.param .u64 x) { .reg .v4 .b32 %v; { ret; } }\n.visible .entry worse() { mov.u32 `; }\n"
    module = parse(kernel(f"mov.u32 %r1, 4; {STORE}", bad))
    assert set(module.kernels) == {"bad", "worse", "k"}
    compile_kernel(module, module.kernels["k"])
    for name, what in (("bad", "vector registers"), ("worse", "cannot read")):
        with pytest.raises(PtxError, match=rf"PTX line \d: {what}.*kernel {name}"):
            compile_kernel(module, module.kernels[name])


def test_special_registers_of_the_environment() -> None:
    body = f"mov.b32 %r1, %envreg3; mov.u32 %r2, %reserved_smem_offset_end; mov.u32 %r3, %reserved_smem_offset_begin; mov.u32 %r4, %pm1; add.u32 %r1, %r1, %r2; {STORE}"
    assert set(run(kernel(body)).tolist()) == {0x400}


def test_scopes_in_bodies_hide_registers() -> None:
    body = f"mov.u32 %r2, 0x00070005; {{.reg .b16 hl, hu;\nmov.b32 {{hl,hu}}, %r2; {{ .reg .b16 hl; mov.u16 hl, 9; }} mov.b32 %r1, {{hu,hl}};}} {STORE}"
    assert set(run(kernel(body)).tolist()) == {0x00050007}


SYSTEM = """
.extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 v);
.extern .func __assertfail(.param .b64 m, .param .b64 f, .param .b32 l, .param .b64 n, .param .b64 c);
.global .align 1 .b8 form[32] = {105, 61, 37, 48, 51, 100, 32, 120, 61, 37, 46, 49, 102, 32, 37, 115, 37, 37, 10};
"""


def test_printf(capsys: pytest.CaptureFixture[str]) -> None:
    """i=%03d x=%.1f %s%%: the thread, a double, the format itself."""
    body = """
.local .align 8 .b8 args[24]; .reg .b32 %n; .reg .b64 %buf, %f; .reg .f64 %d; mov.u64 %buf, args; cvta.local.u64 %buf, %buf;
setp.gt.u32 %p0, %r30, 1; @%p0 exit; st.u32 [%buf], %r30; cvt.rn.f64.u32 %d, %r30; add.f64 %d, %d, 0d3FE0000000000000;
st.f64 [%buf+8], %d; mov.u64 %f, form; cvta.global.u64 %f, %f; add.u64 %in, %f, 3; st.u64 [%buf+16], %in;
{ .param .b64 p0; .param .b64 p1; .param .b32 back; st.param.b64 [p0+0], %f; st.param.b64 [p1+0], %buf;
call.uni (back), vprintf, (p0, p1); ld.param.b32 %n, [back+0]; }"""
    text = kernel(body, SYSTEM)
    module = parse(text)
    memory = FlatMemory()
    at = memory.add(np.frombuffer(module.variables["form"].data, np.uint8))
    code = compile_kernel(module, module.kernels["k"])
    Launch(code, memory, (1, 1, 1), (32, 1, 1), {0: bytes(0x180)}, symbols={"form": at}).run()
    rest = "03d x=%.1f %s%%\n"
    assert capsys.readouterr().out == f"i=000 x=0.5 {rest}%\ni=001 x=1.5 {rest}%\n"


def test_assert() -> None:
    body = """
.reg .b64 %f; mov.u64 %f, form; cvta.global.u64 %f, %f; setp.ne.u32 %p0, %r30, 5; @%p0 exit;
{ .param .b64 p0; .param .b64 p1; .param .b32 p2; .param .b64 p3; .param .b64 p4; st.param.b64 [p0], %f; st.param.b64 [p1], %f;
st.param.b32 [p2], 12; st.param.b64 [p3], %f; st.param.b64 [p4], 1; call.uni __assertfail, (p0, p1, p2, p3, p4); }"""
    text = kernel(body, SYSTEM)
    module = parse(text)
    memory = FlatMemory()
    at = memory.add(np.frombuffer(b"x > 0".ljust(32, b"\0"), np.uint8))
    code = compile_kernel(module, module.kernels["k"])
    with pytest.raises(KernelFault, match="x > 0:12: x > 0: Assertion `x > 0' failed") as caught:
        Launch(code, memory, (1, 1, 1), (32, 1, 1), {0: bytes(0x180)}, symbols={"form": at}).run()
    assert caught.value.kind == "assert"
    assert "thread (5, 0, 0)" in caught.value.where


def test_calls_by_address() -> None:
    extra = """
.func (.param .b32 r) twice(.param .b32 x) { .reg .b32 %a; ld.param.b32 %a, [x]; add.u32 %a, %a, %a; st.param.b32 [r], %a; ret; }
.func (.param .b32 r) plus(.param .b32 x) { .reg .b32 %a; ld.param.b32 %a, [x]; add.u32 %a, %a, 100; st.param.b32 [r], %a; ret; }
"""
    call = """{ .param .b32 p0; .param .b32 back; st.param.b32 [p0], %r30; prototype_0 : .callprototype (.param .b32 _) _ (.param .b32 _);
call (back), %rd1, (p0), prototype_0; ld.param.b32 %r1, [back]; }"""
    body = f"mov.u64 %rd2, twice; mov.u64 %rd3, plus; and.b32 %r2, %r30, 1; setp.eq.u32 %p0, %r2, 1; selp.b64 %rd1, %rd2, %rd3, %p0; {call} {STORE}"
    want = [2 * n if n & 1 else n + 100 for n in range(32)]
    assert run(kernel(body, extra)).tolist() == want
    assert fails(kernel(f"mov.u64 %rd1, 0; {call}", extra)).esr == 9


def test_recursion_refuses_only_a_launch_that_comes_to_it() -> None:
    extra = """
.func (.param .b32 r) twice(.param .b32 x) { .reg .b32 %a; ld.param.b32 %a, [x]; add.u32 %a, %a, %a; st.param.b32 [r], %a; ret; }
.func (.param .b32 r) down(.param .b32 x) { .reg .b32 %a; .reg .pred %p; ld.param.b32 %a, [x]; setp.lt.u32 %p, %a, 99; @%p bra D;
{ .param .b32 q; .param .b32 b; st.param.b32 [q], %a; call (b), down, (q); ld.param.b32 %a, [b]; }
D: st.param.b32 [r], %a; ret; }
"""
    call = """{ .param .b32 p0; .param .b32 back; st.param.b32 [p0], %r1; prototype_0 : .callprototype (.param .b32 _) _ (.param .b32 _);
call (back), %rd1, (p0), prototype_0; ld.param.b32 %r1, [back]; }"""
    body = f"mov.u32 %r1, %r30; mov.u64 %rd1, FN; {call} {STORE}"
    assert run(kernel(body.replace("FN", "twice"), extra)).tolist() == list(range(0, 64, 2))
    assert run(kernel(body.replace("FN", "down"), extra)).tolist() == list(range(32))
    with pytest.raises(PtxError, match="calls itself is not supported"):
        run(kernel(body.replace("FN", "down").replace("%r30;", "100;", 1), extra))


def test_an_mbarrier_counts() -> None:
    body = ".shared .align 8 .b8 b[8]; mov.u32 %r2, b; mbarrier.init.shared.b64 [%r2], 5; bar.sync 0; mbarrier.arrive.shared.b64 %rd1, [%r2];"
    assert "more arrivals" not in fails(kernel(body + " trap;"), threads=4).what
    body = ".shared .align 8 .b8 b[8]; mov.u32 %r2, b; mbarrier.init.shared.b64 [%r2], 64; bar.sync 0; mbarrier.arrive.noComplete.shared.b64 %rd1, [%r2], 3;"
    assert "more arrivals" in fails(kernel(body)).what
