# ruff: noqa: E501 - PTX lines and case tables stay on one line
"""The kernels of the oracle: one instruction (or a small pattern) each, with seeded inputs.

`record_oracle.py` runs them on a GPU, `test_oracle.py` on the simulator.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tests.simulator.ptx.recorded.oracle_inputs import LANES, inputs, random_bits, width

BLOCK = 256
_REG = {"u8": "b16", "s8": "b16", "pred": "pred"}


@dataclass(frozen=True)
class Case:
    """One kernel: PTX text, input arrays (raw bits), elements and bits of the output, tolerance.

    `tol`: "exact" (bits), "nan" (bits, any NaN for a NaN), or "ulp:N" / "abs:X" for `kind`.
    """

    name: str
    ptx: str
    inputs: tuple[NDArray[np.generic], ...]
    out_bits: int
    out_count: int
    kind: str = "u32"
    tol: str = "exact"
    grid: int = LANES // BLOCK
    block: int = BLOCK
    initial: NDArray[np.generic] | None = field(default=None)
    entry: str = "k"


def _module(body: str, shared: str = "") -> str:
    return f""".version 7.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 a, .param .u64 b, .param .u64 c)
{{
.reg .b64 %ro, %ra, %rb, %rc, %off;
.reg .b32 %thr, %cta, %i, %lane;
.reg .b16 %h<32>;
.reg .b32 %r<64>;
.reg .f32 %f<64>;
.reg .b64 %rd<32>;
.reg .pred %p<8>;
{shared}
ld.param.u64 %ro, [out];
ld.param.u64 %ra, [a];
ld.param.u64 %rb, [b];
ld.param.u64 %rc, [c];
mov.u32 %thr, %tid.x;
mov.u32 %cta, %ctaid.x;
mad.lo.u32 %i, %cta, {BLOCK}, %thr;
and.b32 %lane, %thr, 31;
{body}
ret;
}}
"""


def _at(reg: str, size: int) -> str:
    return f"mul.wide.u32 %off, %i, {size}; add.u64 {reg}, {reg}, %off;"


def op(
    text: str, out: str, *kinds: str, tol: str = "exact", limit: str = "", pre: str = ""
) -> Case:
    """`text` with {d}, {a}, {b}, {c}: one value per thread of type `out` from inputs of `kinds`."""
    name = text.split(" ")[0] + "/" + "/".join(kinds) + ("/" + pre.split(" ")[0] if pre else "")
    name += "/" + hashlib.sha1((text + pre + limit).encode()).hexdigest()[:4]
    regs, loads = [], []
    for n, kind in enumerate(kinds):
        reg = _REG.get(kind, f"b{width(kind)}")
        regs.append(f".reg .{reg} %x{n};")
        base = ("%ra", "%rb", "%rc")[n]
        plain = kind if kind in ("u8", "s8") else f"b{width(kind)}"
        loads.append(f"{_at(base, width(kind) // 8)} ld.global.{plain} %x{n}, [{base}];")
    regs.append(f".reg .{_REG.get(out, f'b{width(out)}')} %d;")
    names = {"d": "%d", **{"abc"[n]: f"%x{n}" for n in range(len(kinds))}}
    store = f"{_at('%ro', width(out) // 8)} st.global.{out if out in ('u8', 's8') else f'b{width(out)}'} [%ro], %d;"
    body = "\n".join([*regs, *loads, pre.format(**names), text.format(**names) + ";", store])
    return Case(name, _module(body), inputs(name, list(kinds), limit), width(out), LANES, out, tol)


def _integer() -> list[Case]:
    out = []
    for t in ("s32", "u32", "s64", "u64", "s16", "u16"):
        n = int(t[1:])
        for name in ("add", "sub", "mul.lo", "mul.hi", "min", "max", "div", "rem"):
            out.append(op(f"{name}.{t} {{d}}, {{a}}, {{b}}", t, t, t))
        if n < 64:
            wide = f"{t[0]}{2 * n}"
            out.append(op(f"mul.wide.{t} {{d}}, {{a}}, {{b}}", wide, t, t))
            out.append(op(f"mad.wide.{t} {{d}}, {{a}}, {{b}}, {{c}}", wide, t, t, wide))
        out.append(op(f"mad.lo.{t} {{d}}, {{a}}, {{b}}, {{c}}", t, t, t, t))
        out.append(op(f"shr.{t} {{d}}, {{a}}, {{b}}", t, t, "u32", limit="small"))
        out.append(op(f"shr.{t} {{d}}, {{a}}, {{b}}", t, t, "u32"))
        out.append(op(f"sad.{t} {{d}}, {{a}}, {{b}}, {{c}}", t, t, t, t))
        for cmp in ("eq", "ne", "lt", "le", "gt", "ge"):
            out.append(_setp(cmp, t))
        if t[0] == "s":
            out += [op(f"{name}.{t} {{d}}, {{a}}", t, t) for name in ("abs", "neg")]
    for b in ("b16", "b32", "b64"):
        out += [op(f"{n}.{b} {{d}}, {{a}}, {{b}}", b, b, b) for n in ("and", "or", "xor")]
        out += [op(f"{n}.{b} {{d}}, {{a}}", b, b) for n in ("not", "cnot")]
        out.append(op(f"shl.{b} {{d}}, {{a}}, {{b}}", b, b, "u32", limit="small"))
    for b in ("32", "64"):
        out += [op(f"{n}.b{b} {{d}}, {{a}}", "u32", f"b{b}") for n in ("popc", "clz")]
        out.append(op(f"brev.b{b} {{d}}, {{a}}", f"b{b}", f"b{b}"))
        out.append(op(f"bfi.b{b} {{d}}, {{a}}, {{b}}, {{c}}, 9", *[f"b{b}"] * 3, "u32"))
        out.append(op(f"bfi.b{b} {{d}}, {{a}}, {{b}}, 5, {{c}}", *[f"b{b}"] * 3, "u32"))
        for s in "su":
            t = s + b
            out.append(op(f"bfe.{t} {{d}}, {{a}}, {{b}}, {{c}}", t, t, "u32", "u32", limit=""))
            out.append(op(f"bfe.{t} {{d}}, {{a}}, {{b}}, {{c}}", t, t, "u32", "u32", limit="small"))
            out += [op(f"bfind{m}.{t} {{d}}, {{a}}", "u32", t) for m in ("", ".shiftamt")]
    for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"):
        out.append(op(f"prmt.b32{mode} {{d}}, {{a}}, {{b}}, {{c}}", "b32", "b32", "b32", "b32"))
    for way in ("l", "r"):
        for m in ("wrap", "clamp"):
            out.append(
                op(f"shf.{way}.{m}.b32 {{d}}, {{a}}, {{b}}, {{c}}", "b32", "b32", "b32", "u32")
            )
    out.append(op("lop3.b32 {d}, {a}, {b}, {c}, 0x96", "b32", "b32", "b32", "b32"))
    out.append(op("lop3.b32 {d}, {a}, {b}, {c}, 0xCA", "b32", "b32", "b32", "b32"))
    for a in ("s32", "u32"):
        for b in ("s32", "u32"):
            out.append(op(f"dp4a.{a}.{b} {{d}}, {{a}}, {{b}}, {{c}}", "u32", "u32", "u32", "u32"))
            for half in ("lo", "hi"):
                text = f"dp2a.{half}.{a}.{b} {{d}}, {{a}}, {{b}}, {{c}}"
                out.append(op(text, "u32", "u32", "u32", "u32"))
        for m in ("lo", "hi"):
            out.append(op(f"mul24.{m}.{a} {{d}}, {{a}}, {{b}}", a, a, a))
    out.append(op("add.sat.s32 {d}, {a}, {b}", "s32", "s32", "s32"))
    out.append(op("sub.sat.s32 {d}, {a}, {b}", "s32", "s32", "s32"))
    out.append(
        op("addc.u32 {d}, {a}, {c}", "u32", "u32", "u32", "u32", pre="add.cc.u32 %r0, {a}, {b};")
    )
    out.append(
        op("subc.u32 {d}, {a}, {c}", "u32", "u32", "u32", "u32", pre="sub.cc.u32 %r0, {a}, {b};")
    )
    pre = "mad.lo.cc.u32 %r0, {a}, {b}, {c};"
    out.append(op("madc.hi.u32 {d}, {a}, {b}, {c}", "u32", "u32", "u32", "u32", pre=pre))
    out.append(op("slct.s32.s32 {d}, {a}, {b}, {c}", "s32", "s32", "s32", "s32"))
    out.append(op("slct.u32.f32 {d}, {a}, {b}, {c}", "u32", "u32", "u32", "f32"))
    return out


def _setp(cmp: str, t: str, extra: str = "") -> Case:
    text = "selp.b32 {d}, 1, 0, %p0"
    return op(text, "u32", t, t, pre=f"setp.{cmp}{extra}.{t} %p0, {{a}}, {{b}};")


def _float() -> list[Case]:
    out = []
    for n in ("add", "sub", "mul"):
        for r in ("rn", "rz", "rm", "rp"):
            out.append(op(f"{n}.{r}.f32 {{d}}, {{a}}, {{b}}", "f32", "f32", "f32"))
            out.append(op(f"{n}.{r}.f64 {{d}}, {{a}}, {{b}}", "f64", "f64", "f64", tol="nan"))
        out.append(op(f"{n}.ftz.f32 {{d}}, {{a}}, {{b}}", "f32", "f32", "f32"))
        out.append(op(f"{n}.sat.f32 {{d}}, {{a}}, {{b}}", "f32", "f32", "f32"))
        out.append(op(f"{n}.f16 {{d}}, {{a}}, {{b}}", "f16", "f16", "f16"))
        out.append(op(f"{n}.f16x2 {{d}}, {{a}}, {{b}}", "f16x2", "f16x2", "f16x2"))
    for r in ("rn", "rz", "rm", "rp"):
        out.append(op(f"fma.{r}.f32 {{d}}, {{a}}, {{b}}, {{c}}", "f32", "f32", "f32", "f32"))
        out.append(op(f"div.{r}.f32 {{d}}, {{a}}, {{b}}", "f32", "f32", "f32"))
        out.append(op(f"rcp.{r}.f32 {{d}}, {{a}}", "f32", "f32"))
        out.append(op(f"sqrt.{r}.f32 {{d}}, {{a}}", "f32", "f32"))
    for m in (".ftz", ".sat", ".ftz.sat"):
        out.append(op(f"fma.rn{m}.f32 {{d}}, {{a}}, {{b}}, {{c}}", "f32", "f32", "f32", "f32"))
    out.append(op("fma.rn.f64 {d}, {a}, {b}, {c}", "f64", "f64", "f64", "f64", tol="nan"))
    for t in ("f16", "f16x2", "bf16", "bf16x2"):
        out.append(op(f"fma.rn.{t} {{d}}, {{a}}, {{b}}, {{c}}", t, t, t, t))
        out += [op(f"{n}.{t} {{d}}, {{a}}, {{b}}", t, t, t) for n in ("min", "max", "min.NaN")]
    out.append(op("fma.rn.relu.f16 {d}, {a}, {b}, {c}", "f16", "f16", "f16", "f16"))
    for t in ("f32", "f64"):
        out += [op(f"{n}.{t} {{d}}, {{a}}, {{b}}", t, t, t, tol="nan") for n in ("min", "max")]
        out += [op(f"{n}.{t} {{d}}, {{a}}", t, t, tol="nan") for n in ("neg", "abs")]
        out.append(op(f"copysign.{t} {{d}}, {{a}}, {{b}}", t, t, t))
        for cmp in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu",
                    "num", "nan"):  # fmt: skip
            out.append(_setp(cmp, t))
        for kind in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
            pre = f"testp.{kind}.{t} %p0, {{a}};"
            out.append(op("selp.b32 {d}, 1, 0, %p0", "u32", t, pre=pre))
    out += [op(f"{n}.NaN.f32 {{d}}, {{a}}, {{b}}", "f32", "f32", "f32") for n in ("min", "max")]
    out += [op(f"{n}.ftz.f32 {{d}}, {{a}}", "f32", "f32") for n in ("neg", "abs")]
    out += [op(f"{n}.{t} {{d}}, {{a}}", t, t) for n in ("neg", "abs") for t in ("f16", "f16x2")]
    out.append(_setp("lt", "f16"))
    out.append(_setp("lt", "f32", ".ftz"))
    out.append(op("div.rn.f64 {d}, {a}, {b}", "f64", "f64", "f64", tol="nan"))
    out.append(op("rcp.rn.f64 {d}, {a}", "f64", "f64", tol="nan"))
    out.append(op("sqrt.rn.f64 {d}, {a}", "f64", "f64", tol="nan"))
    out.append(op("rsqrt.approx.f64 {d}, {a}", "f64", "f64", tol="ulp:8589934592"))
    out.append(op("div.full.f32 {d}, {a}, {b}", "f32", "f32", "f32", tol="full"))
    for name, tol in (("rcp", "ulp:1"), ("sqrt", "ulp:2"), ("rsqrt", "ulp:2"), ("ex2", "ulp:2")):
        out.append(op(f"{name}.approx.f32 {{d}}, {{a}}", "f32", "f32", tol=tol))
        out.append(op(f"{name}.approx.ftz.f32 {{d}}, {{a}}", "f32", "f32", tol=tol))
    out.append(op("lg2.approx.f32 {d}, {a}", "f32", "f32", tol="lg2"))
    for name in ("sin", "cos"):
        out.append(
            op(f"{name}.approx.f32 {{d}}, {{a}}", "f32", "f32", tol="abs:6.8e-7", limit="angle")
        )
    out.append(op("tanh.approx.f32 {d}, {a}", "f32", "f32", tol="rel:5e-4"))
    out.append(op("ex2.approx.f16 {d}, {a}", "f16", "f16", tol="ulp:1"))
    for t in ("f32", "f64"):
        for cmp in ("lt", "geu"):
            out.append(op(f"set.{cmp}.u32.{t} {{d}}, {{a}}, {{b}}", "u32", t, t))
            out.append(op(f"set.{cmp}.f32.{t} {{d}}, {{a}}, {{b}}", "f32", t, t))
    return out


def _convert() -> list[Case]:
    out = []
    ints = [f"{s}{n}" for s in "su" for n in (8, 16, 32, 64)]
    for f in ("f16", "f32", "f64"):
        for i in ints:
            for r in ("rzi", "rni", "rmi", "rpi"):
                out.append(op(f"cvt.{r}.{i}.{f} {{d}}, {{a}}", i, f))
            for r in ("rn", "rz", "rm", "rp"):
                out.append(op(f"cvt.{r}.{f}.{i} {{d}}, {{a}}", f, i))
        for r in ("rni", "rzi", "rmi", "rpi"):
            out.append(op(f"cvt.{r}.{f}.{f} {{d}}, {{a}}", f, f, tol="nan"))
        out.append(op(f"cvt.sat.{f}.{f} {{d}}, {{a}}", f, f))
    for a in ints:
        for b in ints:
            wider = int(a[1:]) > int(b[1:]) and (a[0] == "s" or b[0] == "u")
            if a != b and not wider:  # .sat is illegal where nothing can be cut off
                out.append(op(f"cvt.sat.{a}.{b} {{d}}, {{a}}", a, b))
            if a != b and int(a[1:]) != int(b[1:]):
                out.append(op(f"cvt.{a}.{b} {{d}}, {{a}}", a, b))
    for r in ("rn", "rz", "rm", "rp"):
        out.append(op(f"cvt.{r}.f32.f64 {{d}}, {{a}}", "f32", "f64"))
        out.append(op(f"cvt.{r}.f16.f32 {{d}}, {{a}}", "f16", "f32"))
        out.append(op(f"cvt.{r}.f16.f64 {{d}}, {{a}}", "f16", "f64"))
    for r in ("rn", "rz"):
        out.append(op(f"cvt.{r}.bf16.f32 {{d}}, {{a}}", "bf16", "f32"))
        out.append(op(f"cvt.{r}.f16x2.f32 {{d}}, {{a}}, {{b}}", "f16x2", "f32", "f32"))
        out.append(op(f"cvt.{r}.bf16x2.f32 {{d}}, {{a}}, {{b}}", "bf16x2", "f32", "f32"))
        out.append(op(f"cvt.{r}.relu.f16.f32 {{d}}, {{a}}", "f16", "f32"))
    out.append(op("cvt.f32.f16 {d}, {a}", "f32", "f16"))
    out.append(op("cvt.f64.f16 {d}, {a}", "f64", "f16", tol="nan"))
    out.append(op("cvt.f64.f32 {d}, {a}", "f64", "f32", tol="nan"))
    out.append(op("cvt.ftz.f64.f32 {d}, {a}", "f64", "f32", tol="nan"))
    out.append(op("cvt.rn.ftz.f32.f64 {d}, {a}", "f32", "f64"))
    out.append(op("cvt.rna.tf32.f32 {d}, {a}", "b32", "f32"))
    out.append(op("cvt.rn.sat.f16.f32 {d}, {a}", "f16", "f32"))
    out.append(op("cvt.rzi.ftz.s32.f32 {d}, {a}", "s32", "f32"))
    return out


def _warp() -> list[Case]:
    load = f"{_at('%ra', 4)} ld.global.b32 %r0, [%ra]; {_at('%rb', 4)} ld.global.b32 %r1, [%rb];"
    store = f"{_at('%ro', 8)} st.global.v2.b32 [%ro], {{%r2, %r3}};"
    out = []

    def two(name: str, body: str, shared: str = "", tol: str = "exact", kind: str = "u32") -> Case:
        data = (random_bits(name + "/a", 32, LANES), random_bits(name + "/b", 32, LANES))
        raw = tuple(x.astype("<u4") for x in data)
        return Case(name, _module(load + body + store, shared), raw, 32, 2 * LANES, kind, tol)

    for mode, c in (("up", "0"), ("up", "0x1000"), ("down", "31"), ("down", "0x180f"),
                    ("bfly", "31"), ("bfly", "0x1807"), ("idx", "31"), ("idx", "0x1807")):  # fmt: skip
        body = f"and.b32 %r1, %r1, 31; shfl.sync.{mode}.b32 %r2|%p0, %r0, %r1, {c}, -1; selp.b32 %r3, 1, 0, %p0;"
        if mode != "idx":  # a lane-dependent distance would read lanes past the warp
            body = body.replace("and.b32 %r1, %r1, 31;", "mov.b32 %r1, 5;")
        out.append(two(f"shfl.{mode}.{c}", body))
    out.append(two("vote", "setp.lt.s32 %p0, %r0, %r1; vote.sync.ballot.b32 %r2, %p0, -1;"
                   "vote.sync.any.pred %p1, %p0, -1; vote.sync.all.pred %p2, %p0, -1;"
                   "vote.sync.uni.pred %p3, %p0, -1; selp.b32 %r3, 1, 0, %p1;"
                   "selp.b32 %r4, 2, 0, %p2; or.b32 %r3, %r3, %r4; selp.b32 %r4, 4, 0, %p3;"
                   "or.b32 %r3, %r3, %r4;"))  # fmt: skip
    out.append(two("match", "and.b32 %r0, %r0, 3; match.any.sync.b32 %r2, %r0, -1;"
                   "match.all.sync.b32 %r3|%p0, %r1, -1;"))  # fmt: skip
    for n in ("add", "min", "max"):
        body = f"redux.sync.{n}.s32 %r2, %r0, -1; redux.sync.{n}.u32 %r3, %r1, -1;"
        out.append(two(f"redux.{n}", body))
    for n in ("and", "or", "xor"):
        body = f"redux.sync.{n}.b32 %r2, %r0, -1; redux.sync.{n}.b32 %r3, %r1, -1;"
        out.append(two(f"redux.{n}", body))
    out.append(two("divergent", "mov.b32 %r3, 0; and.b32 %r4, %r0, 7; LOOP: setp.eq.u32 %p0, %r4, 0;"
                   "@%p0 bra DONE; sub.u32 %r4, %r4, 1; mad.lo.u32 %r3, %r3, 3, %r1; bra LOOP;"
                   "DONE: vote.sync.ballot.b32 %r2, %p0, -1;"))  # fmt: skip
    shared = ".shared .align 16 .b8 sm[1024];"
    body = """shl.b32 %r5, %thr, 2; mov.u32 %r6, sm; add.u32 %r6, %r6, %r5; st.shared.b32 [%r6], %r0;
bar.sync 0; xor.b32 %r5, %r5, 0x3fc; mov.u32 %r7, sm; add.u32 %r7, %r7, %r5; ld.shared.b32 %r2, [%r7];
bar.sync 0; st.shared.b32 [%r6], %r1; setp.lt.s32 %p0, %r0, 0; bar.red.popc.u32 %r3, 0, %p0;
cvta.shared.u64 %rd1, sm; add.u64 %rd1, %rd1, 4; ld.b32 %r8, [%rd1]; add.u32 %r3, %r3, %r8;"""
    out.append(two("shared", body, shared))
    body = """mov.u32 %r6, sm; and.b32 %r5, %lane, 15; shl.b32 %r5, %r5, 2; add.u32 %r6, %r6, %r5;
setp.lt.u32 %p0, %thr, 16; @%p0 st.shared.b32 [%r6], 0; bar.sync 0;
and.b32 %r0, %r0, 0xffff; red.shared.add.u32 [%r6], %r0; bar.sync 0; ld.shared.b32 %r2, [%r6];
bar.sync 0; atom.shared.max.s32 %r4, [%r6], %r1; bar.sync 0; ld.shared.b32 %r3, [%r6];"""
    out.append(two("atomics", body, shared))
    body = """and.b32 %r0, %r0, 0xff; atom.global.add.u32 %r4, [%rc], %r0; atom.global.min.s32 %r5, [%rc+4], %r1;
atom.global.xor.b32 %r4, [%rc+8], %r1; atom.global.inc.u32 %r4, [%rc+12], 700; mov.b32 %r2, 0; mov.b32 %r3, 0;"""
    body += "membar.gl; bar.sync 0;"
    out.append(
        Case(
            "atom.global",
            _module(load + body, ""),
            (
                random_bits("ag/a", 32, LANES).astype("<u4"),
                random_bits("ag/b", 32, LANES).astype("<u4"),
            ),
            32,
            4,
            "u32",
            "exact",
            initial=np.array([1, 5, 9, 3], "<u4"),
        )
    )
    body = """and.b32 %r5, %thr, 31; shl.b32 %r5, %r5, 4; mov.u32 %r6, sm; shr.u32 %r7, %thr, 5; and.b32 %r7, %r7, 1;
shl.b32 %r7, %r7, 9; add.u32 %r6, %r6, %r7; add.u32 %r7, %r6, %r5; setp.lt.u32 %p0, %thr, 64;
@%p0 st.shared.v4.b32 [%r7], {%r0, %r1, %i, %r0}; bar.sync 0;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r7];
ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r14, %r15}, [%r7];
xor.b32 %r2, %r10, %r11; add.u32 %r3, %r12, %r13; mad.lo.u32 %r3, %r14, 3, %r3; sub.u32 %r2, %r2, %r15;"""
    out.append(two("ldmatrix", body, shared))
    body = f"""{_at("%rc", 0)} shl.b32 %r5, %thr, 2; mov.u32 %r6, sm; add.u32 %r6, %r6, %r5;
cp.async.ca.shared.global [%r6], [%ra], 4; cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;
mov.u32 %r7, sm; xor.b32 %r5, %r5, 4; add.u32 %r7, %r7, %r5; ld.shared.b32 %r2, [%r7]; mov.b32 %r3, %r1;"""
    out.append(two("cp.async", body, shared))
    return out


def _parts(name: str, parts: int) -> NDArray[np.uint32]:
    """A membermask for each lane: every warp is dealt into up to `parts` parts."""
    place = (random_bits(name, 32, LANES) % np.uint64(parts)).reshape(-1, 32)
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    out = np.zeros((LANES // 32, 32), np.uint32)
    for part in range(parts):
        here = place == part
        mask = np.where(here, bits, np.uint32(0)).sum(axis=1, dtype=np.uint32)
        out[here] = np.broadcast_to(mask[:, None], here.shape)[here]
    return out.reshape(-1)


def _masks() -> list[Case]:
    """Warp-wide instructions of converged lanes that name different membermasks."""
    head = f"{_at('%ra', 4)} ld.global.b32 %r0, [%ra]; {_at('%rb', 4)} ld.global.b32 %r1, [%rb];"
    head += "setp.lt.s32 %p0, %r0, 0; and.b32 %r8, %r0, 3; mov.b32 %r3, 0;"
    store = f"{_at('%ro', 8)} st.global.v2.b32 [%ro], {{%r2, %r3}};"
    bodies = {
        "ballot": "vote.sync.ballot.b32 %r2, %p0, %r1;",
        "any": "vote.sync.any.pred %p1, %p0, %r1; selp.b32 %r2, 1, 0, %p1;",
        "all": "vote.sync.all.pred %p1, %p0, %r1; selp.b32 %r2, 1, 0, %p1;",
        "uni": "vote.sync.uni.pred %p1, %p0, %r1; selp.b32 %r2, 1, 0, %p1;",
        "match.any": "match.any.sync.b32 %r2, %r8, %r1;",
        "match.all": "match.all.sync.b32 %r2|%p1, %r8, %r1; selp.b32 %r3, 1, 0, %p1;",
        "shfl": "brev.b32 %r9, %r1; clz.b32 %r9, %r9; shfl.sync.idx.b32 %r2, %r0, %r9, 31, %r1;",
    }
    for name in ("add", "min", "max"):
        bodies[f"redux.{name}"] = (
            f"redux.sync.{name}.s32 %r2, %r0, %r1; redux.sync.{name}.u32 %r3, %r0, %r1;"
        )
    for name in ("and", "or", "xor"):
        bodies[f"redux.{name}"] = f"redux.sync.{name}.b32 %r2, %r0, %r1;"
    out = []
    for parts in (2, 5, 32):
        for kind, body in bodies.items():
            name = f"masks{parts}.{kind}"
            values = random_bits(f"{name}/a", 32, LANES).astype("<u4")
            if "all" in name:  # or no part would agree
                values[: LANES // 2] |= np.uint32(0x80000003)
            data = values, _parts(f"{name}/b", parts)
            out.append(Case(name, _module(head + body + store), data, 32, 2 * LANES))
    return out


def _mma() -> list[Case]:
    out = []
    shapes = [
        ("m16n8k16", "f32", "f16", "f16", "f32", 4, 2, 4), ("m16n8k16", "f16", "f16", "f16", "f16", 4, 2, 2),
        ("m16n8k16", "f32", "bf16", "bf16", "f32", 4, 2, 4), ("m16n8k8", "f32", "f16", "f16", "f32", 2, 1, 4),
        ("m16n8k8", "f32", "tf32", "tf32", "f32", 4, 2, 4), ("m16n8k4", "f32", "tf32", "tf32", "f32", 2, 1, 4),
        ("m16n8k32", "s32", "s8", "s8", "s32", 4, 2, 4), ("m16n8k16", "s32", "u8", "s8", "s32", 2, 1, 4),
    ]  # fmt: skip
    for shape, d, a, b, c, na, nb, nc in shapes:
        name = f"mma.{shape}.{d}.{a}.{b}"
        loads = []
        for base, first, count in (("%ra", 0, na), ("%rb", 8, nb), ("%rc", 16, nc)):
            loads.append(_at(base, 4 * count))
            loads += [f"ld.global.b32 %r{first + n}, [{base}+{4 * n}];" for n in range(count)]
        lists = [
            ", ".join(f"%r{first + n}" for n in range(count))
            for first, count in ((24, nc), (0, na), (8, nb), (16, nc))
        ]
        braces = ", ".join("{" + x + "}" for x in lists)
        # registers of the accumulator are .f32 for f32
        pre = post = ""
        if d == "f32":
            lists[0] = ", ".join(f"%f{24 + n}" for n in range(nc))
            lists[3] = ", ".join(f"%f{16 + n}" for n in range(nc))
            braces = ", ".join("{" + x + "}" for x in lists)
            pre = "".join(f"mov.b32 %f{16 + n}, %r{16 + n};" for n in range(nc))
            post = "".join(f"mov.b32 %r{24 + n}, %f{24 + n};" for n in range(nc))
        body = (
            "\n".join(loads)
            + pre
            + f"mma.sync.aligned.{shape}.row.col.{d}.{a}.{b}.{c} {braces};"
            + post
        )
        body += _at("%ro", 4 * nc) + "".join(
            f"st.global.b32 [%ro+{4 * n}], %r{24 + n};" for n in range(nc)
        )
        data = []
        for part, kind, count in (("a", a, na), ("b", b, nb), ("c", c, nc)):
            per = {"f16": 2, "bf16": 2, "s8": 4, "u8": 4}.get(kind, 1)
            raw = random_bits(f"{name}/{part}", 32 // per, LANES * count * per)
            if kind in ("f16", "bf16", "f32", "tf32"):
                x = (raw.astype(np.float64) / 2 ** (32 // per) * 4 - 2).astype(np.float32)
                if kind == "f16":
                    raw16 = x.astype(np.float16).view("<u2")
                elif kind == "bf16":
                    raw16 = (x.view("<u4") >> np.uint32(16)).astype("<u2")
                else:
                    raw16 = x
                data.append(np.ascontiguousarray(raw16).view("<u4"))
            else:
                data.append(np.ascontiguousarray(raw.astype(f"<u{4 // per}")).view("<u4"))
        tol = {"f32": "abs:2e-5", "f16": "abs:0.04", "s32": "exact"}[d]
        out.append(
            Case(
                name, _module(body), tuple(data), 32, LANES * nc, "f16x2" if d == "f16" else d, tol
            )
        )
    return out


_KERNELS = {
    "k_math": ("f32", "abs:3e-3"), "k_double": ("f32", "rel:1e-6"), "k_reduce": ("f32", "rel:1e-5"),
    "k_local": ("u32", "exact"), "k_dp4a": ("u32", "exact"), "k_switch": ("u32", "exact"),
    "k_long": ("u32", "exact"),
}  # fmt: skip


def _kernels() -> list[Case]:
    """Cases of kernels.cu, compiled by NVRTC."""
    text = (Path(__file__).resolve().parent / "kernels/kernels.ptx").read_text()
    out = []
    for name, (kind, tol) in _KERNELS.items():
        raw = [random_bits(f"{name}/{part}", 32, LANES).astype("<u4") for part in "ab"]
        if kind == "f32":
            raw = [(r.astype(np.float64) / 2**32 * 4 - 2).astype("<f4").view("<u4") for r in raw]
        out.append(Case(name, text, tuple(raw), 32, LANES, kind, tol, entry=name))
    return out


_TENSOR = {
    "k_wmma": ("f32", "f16", "abs:2e-5"), "k_wmma_half": ("f16x2", "f16", "abs:0.04"),
    "k_wmma_int": ("u32", "u32", "exact"), "k_mbarrier": ("u32", "u32", "exact"),
}  # fmt: skip


def _tensor() -> list[Case]:
    """Cases of tensor.cu, compiled by nvcc: wmma, and mbarrier as sm_80 has it."""
    text = (Path(__file__).resolve().parent / "kernels/tensor.ptx").read_text()
    out = []
    for name, (kind, given, tol) in _TENSOR.items():
        raw = [random_bits(f"{name}/{part}", 32, LANES).astype("<u4") for part in "ab"]
        if given == "f16":
            half = [(r.view("<u2").astype(np.float64) / 2**16 * 4 - 2) for r in raw]
            raw = [h.astype("<f2").view("<u4") for h in half]
        out.append(Case(name, text, tuple(raw), 32, LANES, kind, tol, entry=name))
    return out


def cases() -> list[Case]:
    """Every case, in a fixed order."""
    return [
        *_integer(),
        *_float(),
        *_convert(),
        *_warp(),
        *_masks(),
        *_mma(),
        *_kernels(),
        *_tensor(),
    ]
