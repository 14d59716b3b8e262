# ruff: noqa: E501 - PTX lines and case tables stay on one line
"""The kernels of the oracle: one instruction (or a small pattern) each, with seeded inputs.

`record_oracle.py` runs them on a GPU, `test_oracle.py` on the interpreter. Inputs come from SHAKE
(the same bytes for ever), corner values first: every pair of them, then random bit patterns.
Long because it is a table.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

LANES, BLOCK = 1024, 256
_REG = {"u8": "b16", "s8": "b16", "pred": "pred"}

F32 = [
    0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345,
    0x7F812345, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x7F7FFFFF, 0xFF7FFFFF,
    0x3F000000, 0x3FC00000, 0x40200000, 0xC0200000, 0x4B000001, 0x4F000000, 0xCF000000, 0x4F800000,
    0x34000000, 0x33800000, 0x3F800001, 0x42FE0000, 0xC3160000, 0x5F000000,
]  # fmt: skip
F64 = [
    0, 1 << 63, 0x3FF0000000000000, 0xBFF0000000000000, 0x7FF0000000000000, 0xFFF0000000000000,
    0x7FF8000000000000, 0xFFF8000000012345, 1, 0x800FFFFFFFFFFFFF, 0x0010000000000000,
    0x7FEFFFFFFFFFFFFF, 0x3FE0000000000000, 0x4004000000000000, 0xC004000000000000,
    0x41DFFFFFFFC00000, 0x43E0000000000000, 0xC3E0000000000000, 0x3CA0000000000000,
    0x3FF0000000000001, 0x47EFFFFFF0000000, 0x380FFFFFFFFFFFFF,
]  # fmt: skip
F16 = [
    0x0000, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 0xFE12, 0x0001, 0x83FF, 0x0400, 0x7BFF,
    0xFBFF, 0x3800, 0x3E00, 0x4100, 0xC100, 0x1400, 0x1000, 0x3C01, 0x5BFF, 0x6400,
]  # fmt: skip
BF16 = [
    0x0000, 0x8000, 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x0001, 0x807F, 0x0080, 0x7F7F,
    0xFF7F, 0x3F00, 0x3FC0, 0x4020, 0xC020, 0x3400, 0x3B80, 0x3F81, 0x4F00, 0x5F00,
]  # fmt: skip


def _ints(bits: int) -> list[int]:
    m = (1 << bits) - 1
    top = 1 << bits - 1
    small = [0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255]
    return [v & m for v in [*small, m, m - 1, top, top - 1, top + 1, 0x5555555555555555]]


def _corners(kind: str) -> list[int]:
    table = {"f32": F32, "f64": F64, "f16": F16, "bf16": BF16}
    if kind in table:
        return table[kind]
    if kind in ("f16x2", "bf16x2"):
        half = table[kind[:-2]]
        return [a | b << 16 for a, b in zip(half, half[3:] + half[:3], strict=True)]
    return _ints(width(kind))


def width(kind: str) -> int:
    """Bits of a memory type."""
    return 32 if kind.endswith("x2") else int(kind.lstrip("abfsu"))


def random_bits(name: str, bits: int, count: int) -> NDArray[np.uint64]:
    """`count` values of `bits` random bits that depend on `name` alone."""
    data = hashlib.shake_128(name.encode()).digest(count * bits // 8)
    return np.frombuffer(data, f"<u{bits // 8}").astype(np.uint64)


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


def inputs(name: str, kinds: list[str], limit: str = "") -> tuple[NDArray[np.generic], ...]:
    """Corner pairs (or triples, drawn) first, then random bits; one array per input."""
    pools = [_corners(k) for k in kinds]
    out = []
    pairs = min(len(pools[0]) * (len(pools[1]) if len(pools) > 1 else 1), LANES // 2)
    step = 1 if len(pools) < 2 else max(1, len(pools[0]) * len(pools[1]) // pairs)
    for n, (kind, pool) in enumerate(zip(kinds, pools, strict=True)):
        bits = width(kind)
        values = random_bits(f"{name}/{n}", bits, LANES)
        index = np.arange(pairs) * step
        if n == 1:
            index = index // len(pools[0])
        elif n > 1:
            index = index * 7 + n
        values[:pairs] = np.array(pool, np.uint64)[index % len(pool)]
        if kind == "f32" and n < 3:  # magnitudes that meet: half of the random part near 1
            near = values[-LANES // 4 :]
            near[:] = (near & np.uint64(0x807FFFFF)) | np.uint64(0x3E800000) + (
                (near >> np.uint64(29) & np.uint64(3)) << np.uint64(23)
            )
        raw = values.astype(f"<u{bits // 8}")
        if limit:
            raw = _limited(raw, kind, limit)
        out.append(raw)
    return tuple(out)


def _limited(raw: NDArray[np.generic], kind: str, limit: str) -> NDArray[np.generic]:
    """Inputs whose results PTX defines: shift amounts, arguments of sin, finite numbers."""
    if limit == "angle":
        single = raw.view("<f4")
        x = np.where(np.isfinite(single), single, np.float32(1)).astype(np.float64)
        return np.remainder(x, 6.28).astype("<f4").view("<u4")
    if limit == "small" and width(kind) >= 32:
        return (raw.view(f"<u{width(kind) // 8}") % np.array(80, raw.dtype)).astype(raw.dtype)
    return raw


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
