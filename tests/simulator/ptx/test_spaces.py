# ruff: noqa: E501 - PTX stays one instruction a line
"""Rules for memory: parameters, constants, spaces, atomics, asynchronous copies."""

from __future__ import annotations

import numpy as np
import pytest
from tests.simulator.ptx.flat import FlatMemory
from tests.simulator.ptx.machine import HEAD, STORE, fails, kernel, run

from nvgpusim.memory import MmuFault
from nvgpusim.ptx import Launch, parse, translate_kernel


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
    code = translate_kernel(module, module.kernels["k"])
    memory = FlatMemory()
    out = memory.add(np.zeros(4096, np.uint8))
    bank = bytes(0x160) + out.to_bytes(8, "little") + bytes(8) + bytes(range(8))
    const = module.variables["c"].data
    Launch(
        code, memory, (2, 1, 1), (64, 1, 1), {0: bank, 3: const}, symbols={"c": 0}
    ).run_all_blocks()
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
        (".local .align 4 .b8 d[8]; mov.u64 %rd1, d; ld.local.u32 %r1, [%rd1+16];", 0xE),
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


def test_atomics_across_mappings() -> None:
    """Odd lanes count in one buffer, even ones each in a word of another."""
    body = f"and.b32 %r2, %r30, 1; setp.eq.u32 %p0, %r2, 1; selp.b64 %rd1, %in, %i, %p0; atom.global.add.u32 %r1, [%rd1], 1; @%p0 {STORE}"
    got = run(kernel(body), data=[70] + [0] * 15)
    assert got.tolist() == [70 + n // 2 if n & 1 else 1 for n in range(32)]


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


def test_asynchronous_copies_land_when_waited_for() -> None:
    body = f"""
.shared .align 16 .b8 s[64]; mov.u32 %r2, s; setp.gt.u32 %p0, %r30, 0; @%p0 exit;
st.shared.v4.u32 [%r2], {{0, 0, 0, 0}}; st.shared.v4.u32 [%r2+16], {{9, 9, 9, 9}};
cp.async.cg.shared.global [%r2], [%in], 16; cp.async.commit_group; cp.async.ca.shared.global [%r2+16], [%in], 8, 3; cp.async.commit_group;
ld.shared.u32 %r3, [%r2]; cp.async.wait_group 1; ld.shared.u32 %r4, [%r2+4]; ld.shared.u32 %r5, [%r2+16]; cp.async.wait_all;
ld.shared.u32 %r6, [%r2+16]; ld.shared.u32 %r7, [%r2+20];
mad.lo.u32 %r1, %r3, 10, %r4; mad.lo.u32 %r1, %r1, 10, %r5; mad.lo.u32 %r1, %r1, 1000, %r6; add.u32 %r1, %r1, %r7; {STORE}"""
    assert run(kernel(body), data=[0x04000001, 2, 3, 4] + [0] * 12)[0] == 29 * 1000 + 1


def test_initialisers() -> None:
    text = (
        HEAD
        + ".extern .shared .align 16 .b8 dyn[];\n.visible .global .align 8 .u64 p[3] = {generic(x), x, 5};\n.global .s16 x[2] = {-1, 2};\n.global .f32 f = 0f3F800000;\n"
    )
    module = parse(text)
    assert module.variables["p"].references == [(0, "x", 0), (8, "x", 0)]
    assert module.variables["p"].data == bytes(16) + (5).to_bytes(8, "little")
    assert module.variables["x"].data == b"\xff\xff\x02\x00"
    assert module.variables["f"].data == np.float32(1).tobytes()
    assert module.variables["dyn"].size == 0


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
