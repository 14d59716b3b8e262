# ruff: noqa: E501 - PTX stays one instruction a line
"""Modules: what is read and refused, calls, system functions."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from tests.simulator.ptx.flat import FlatMemory
from tests.simulator.ptx.machine import HEAD, STORE, fails, kernel, run

from nvgpusim.ptx import KernelFault, Launch, PtxError, parse, translate_kernel


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
            translate_kernel(module, module.kernels["k"])


def test_trap_names_the_place() -> None:
    fault = fails(kernel(".loc 1 42 3\nsetp.eq.u32 %p0, %r30, 7; @%p0 trap;"))
    assert fault.esr == 9
    assert "block (0, 0, 0), thread (7, 0, 0)" in fault.where
    assert "(source.cu:42)" in fault.where


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
        translate_kernel(module, module.kernels["k"])
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
            translate_kernel(module, entry)


# the language around


def test_a_kernel_that_cannot_be_read_refuses_itself() -> None:
    bad = ".visible .entry bad(.param .u64 x) { .reg .v4 .b32 %v; { ret; } }\n.visible .entry worse() { mov.u32 `; }\n"
    module = parse(kernel(f"mov.u32 %r1, 4; {STORE}", bad))
    assert set(module.kernels) == {"bad", "worse", "k"}
    translate_kernel(module, module.kernels["k"])
    for name, what in (("bad", "vector registers"), ("worse", "cannot read")):
        with pytest.raises(PtxError, match=rf"PTX line \d: {what}.*kernel {name}"):
            translate_kernel(module, module.kernels[name])


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
    code = translate_kernel(module, module.kernels["k"])
    Launch(
        code, memory, (1, 1, 1), (32, 1, 1), {0: bytes(0x180)}, symbols={"form": at}
    ).run_all_blocks()
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
    code = translate_kernel(module, module.kernels["k"])
    with pytest.raises(KernelFault, match="x > 0:12: x > 0: Assertion `x > 0' failed") as caught:
        Launch(
            code, memory, (1, 1, 1), (32, 1, 1), {0: bytes(0x180)}, symbols={"form": at}
        ).run_all_blocks()
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


def test_a_call_by_address_takes_what_fits_its_prototype() -> None:
    """Others may have as many parameters: of other sizes, or no address that anybody takes."""
    extra = """
.func (.param .b32 r) twice(.param .b32 x) { .reg .b32 %a; ld.param.b32 %a, [x]; add.u32 %a, %a, %a; st.param.b32 [r], %a; ret; }
.func (.param .b64 r) wide(.param .b64 x) { .reg .b64 %a; ld.param.b64 %a, [x]; st.param.b64 [r], %a; ret; }
.func (.param .b32 r) direct(.param .b32 x) { .reg .b32 %a; no.such.thing %a; ret; }
.global .align 8 .u64 t[2] = {twice, wide};
"""
    call = """{ .param .b32 p0; .param .b32 back; st.param.b32 [p0], %r30; prototype_0 : .callprototype (.param .b32 _) _ (.param .b32 _);
call (back), %rd1, (p0), prototype_0; ld.param.b32 %r1, [back]; }"""
    body = f"mov.u64 %rd1, twice; {call} {STORE}"
    assert run(kernel(body, extra)).tolist() == list(range(0, 64, 2))
    assert parse(kernel(body, extra)).variables["t"].references == [(0, "twice", 0), (8, "wide", 0)]


def test_an_initialiser_may_point_into_a_variable() -> None:
    extra = ".global .align 4 .b8 a[16]; .global .align 8 .u64 p[2] = {generic(a)+8, a-4};"
    assert parse(kernel("", extra)).variables["p"].references == [(0, "a", 8), (8, "a", -4)]


DAMAGE = ("{", "}", "(", ";", "[", "<", "99999999999999", ".reg .b32 ", "%r<99999999999>", "0f", "@", "= {", ".align 0", "call ", ".func ", ".loc 9", "|")  # fmt: skip


def test_damaged_text_is_refused_in_one_line() -> None:
    """300 mutants of compiled C: each is read, or PtxError names a line of it."""
    draw = random.Random(7)
    whole = (Path(__file__).resolve().parent / "recorded/kernels/tensor.ptx").read_text()
    refused = 0
    for _ in range(300):
        text = whole
        for _ in range(draw.randint(1, 5)):
            at, how = draw.randrange(len(text)), draw.randrange(4)
            middle = (draw.choice(DAMAGE), "", chr(draw.randrange(1, 250)), text[at : at + 40] * 2)[
                how
            ]
            text = text[:at] + middle + text[at + (draw.randint(1, 60) if how == 1 else 1) :]
            text = text[: draw.randrange(len(text))] if draw.random() < 0.1 else text
            text = text if len(text) > 10 else whole
        try:
            module = parse(text)
            for entry in module.kernels.values():
                translate_kernel(module, entry)
        except PtxError as error:
            refused += 1
            assert "\n" not in str(error)
    assert 100 < refused < 300


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
