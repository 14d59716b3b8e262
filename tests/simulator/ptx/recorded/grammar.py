# ruff: noqa: E501 - PTX lines and case tables stay on one line
"""Every form of PTX's arithmetic: instruction x type x modifier, as the ISA's grammar writes it.

A rule is a line of PTX ISA 8.5, chapter 9.7: `{.a|.b}` may be there, `(.a|.b)` must. Which of the
expansions exist on sm_87 is ptxas's word, kept in `refused.txt.gz` (`python
tests/simulator/ptx/recorded/grammar.py --check PTXAS` writes it). All others run on a GPU
(`record_oracle.py --grammar`) and on the simulator (`test_grammar.py`), so that no form is
without a case. Inputs: corner values by twos and threes, then random bits that depend on the types alone.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
REFUSED = HERE / "refused.txt.gz"
LANES = 256
PER_KERNEL = 48
"""Forms of one signature that share a kernel: loading a module costs more than running it."""

_R = "{.rn|.rz|.rm|.rp}"
_MUST = "(.rn|.rz|.rm|.rp)"
_INT = "(.u16|.u32|.u64|.s16|.s32|.s64)"
_CMP = "(.eq|.ne|.lt|.le|.gt|.ge|.equ|.neu|.ltu|.leu|.gtu|.geu|.num|.nan|.lo|.ls|.hi|.hs)"
_BOOL = "{.and|.or|.xor}"
_HALF = "(.f16|.f16x2)"
_BF = "(.bf16|.bf16x2)"
_ALL = "(.b16|.b32|.b64|.u16|.u32|.u64|.s16|.s32|.s64|.f32|.f64)"
_VALUES = "(.u8|.u16|.u32|.u64|.s8|.s16|.s32|.s64|.f16|.f32|.f64|.bf16)"

RULES: list[tuple[str, str, str]] = [
    # 9.7.1 integer arithmetic
    (f"(add|sub|div|rem|min|max){_INT}", "t=tt", "exact"),
    ("(add|sub).sat.s32", "t=tt", "exact"),
    (f"(mul|mad)(.lo|.hi){_INT}", "mul", "exact"),
    ("(mul|mad).wide(.u16|.u32|.s16|.s32)", "wide", "exact"),
    ("mad.hi.sat.s32", "t=ttt", "exact"),
    ("mul24(.lo|.hi)(.u32|.s32)", "t=tt", "exact"),
    ("mad24(.lo|.hi)(.u32|.s32)", "t=ttt", "exact"),
    ("mad24.hi.sat.s32", "t=ttt", "exact"),
    (f"sad{_INT}", "t=ttt", "exact"),
    ("(abs|neg)(.s16|.s32|.s64)", "t=t", "exact"),
    ("(popc|clz)(.b32|.b64)", "u32=t", "exact"),
    ("bfind{.shiftamt}(.u32|.u64|.s32|.s64)", "u32=t", "exact"),
    ("fns.b32", "fns", "exact"),
    ("brev(.b32|.b64)", "t=t", "exact"),
    ("bfe(.u32|.u64|.s32|.s64)", "bfe", "exact"),
    ("bfi(.b32|.b64)", "bfi", "exact"),
    ("szext(.clamp|.wrap)(.u32|.s32)", "szext", "exact"),
    ("bmsk(.clamp|.wrap).b32", "t=tt", "exact"),
    ("dp4a(.u32|.s32)(.u32|.s32)", "u32=ttt", "exact"),
    ("dp2a(.lo|.hi)(.u32|.s32)(.u32|.s32)", "u32=ttt", "exact"),
    ("(addc|subc){.cc}(.u32|.s32|.u64|.s64)", "carry", "exact"),
    ("madc(.lo|.hi){.cc}(.u32|.s32|.u64|.s64)", "madc", "exact"),
    # 9.7.3 floating point
    ("testp(.finite|.infinite|.number|.notanumber|.normal|.subnormal)(.f32|.f64)", "pred", "exact"),
    ("copysign(.f32|.f64)", "t=tt", "exact"),
    (f"(add|sub|mul){_R}{{.ftz}}{{.sat}}.f32", "t=tt", "exact"),
    (f"(add|sub|mul){_R}.f64", "t=tt", "exact"),
    (f"(fma|mad){_MUST}{{.ftz}}{{.sat}}.f32", "t=ttt", "exact"),
    (f"(fma|mad){_MUST}.f64", "t=ttt", "exact"),
    (f"div{_MUST}{{.ftz}}.f32", "t=tt", "exact"),
    (f"div{_MUST}.f64", "t=tt", "exact"),
    ("div(.approx|.full){.ftz}.f32", "t=tt", "full"),
    ("(abs|neg){.ftz}.f32", "t=t", "nan"),
    ("(abs|neg).f64", "t=t", "exact"),
    ("(min|max){.ftz}{.NaN}{.xorsign.abs}.f32", "t=tt", "exact"),
    ("(min|max).f64", "t=tt", "exact"),
    (f"(rcp|sqrt){_MUST}{{.ftz}}.f32", "t=t", "exact"),
    (f"(rcp|sqrt){_MUST}.f64", "t=t", "exact"),
    ("(rcp|sqrt|rsqrt|ex2).approx{.ftz}.f32", "t=t", "ulp:2"),
    ("(rcp|rsqrt).approx.ftz.f64", "t=t", "ulp:8589934592"),
    ("rsqrt.approx.f64", "t=t", "ulp:8589934592"),
    ("lg2.approx{.ftz}.f32", "t=t", "lg2"),
    ("(sin|cos).approx{.ftz}.f32", "angle", "abs:6.8e-7"),
    ("tanh.approx.f32", "t=t", "rel:5e-4"),
    # 9.7.4 half precision
    (f"(add|sub|mul){{.rn}}{{.ftz}}{{.sat}}{_HALF}", "t=tt", "exact"),
    (f"(add|sub|mul){{.rn}}{_BF}", "t=tt", "exact"),
    (f"fma.rn{{.ftz}}{{.sat|.relu}}{_HALF}", "t=ttt", "exact"),
    (f"fma.rn{{.relu}}{_BF}", "t=ttt", "exact"),
    (f"(abs|neg){{.ftz}}{_HALF}", "t=t", "exact"),
    (f"(abs|neg){_BF}", "t=t", "exact"),
    (f"(min|max){{.ftz}}{{.NaN}}{{.xorsign.abs}}{_HALF}", "t=tt", "exact"),
    (f"(min|max){{.NaN}}{{.xorsign.abs}}{_BF}", "t=tt", "exact"),
    (f"tanh.approx{_HALF}", "t=t", "rel:2e-3"),
    (f"ex2.approx{_HALF}", "t=t", "ulp:1"),
    # 9.7.5, 9.7.6 comparison and selection
    (f"set{_CMP}{_BOOL}{{.ftz}}(.u32|.s32|.f32){_ALL}", "set", "exact"),
    (f"setp{_CMP}{_BOOL}{{.ftz}}{_ALL}", "setp", "exact"),
    (f"set{_CMP}{_BOOL}{{.ftz}}(.f16|.bf16|.u16|.s16|.u32|.s32)(.f16|.bf16)", "set", "exact"),
    (f"set{_CMP}{_BOOL}{{.ftz}}(.f16|.bf16){_ALL}", "set", "exact"),
    (f"set{_CMP}{_BOOL}{{.ftz}}(.f16x2|.u32|.s32).f16x2", "set", "exact"),
    (f"set{_CMP}{_BOOL}(.bf16x2|.u32|.s32).bf16x2", "set", "exact"),
    (f"setp{_CMP}{_BOOL}{{.ftz}}(.f16|.f16x2|.bf16|.bf16x2)", "setp", "exact"),
    (f"selp{_ALL}", "selp", "exact"),
    (f"slct{{.ftz}}{_ALL}(.s32|.f32)", "slct", "exact"),
    # 9.7.7, 9.7.8 logic, shifts
    ("(and|or|xor)(.b16|.b32|.b64)", "t=tt", "exact"),
    ("(not|cnot)(.b16|.b32|.b64)", "t=t", "exact"),
    ("lop3.b32", "lop3", "exact"),
    ("shl(.b16|.b32|.b64)", "shift", "exact"),
    ("shr(.b16|.b32|.b64|.u16|.u32|.u64|.s16|.s32|.s64)", "shift", "exact"),
    ("shf(.l|.r)(.wrap|.clamp).b32", "t=ttt", "exact"),
    ("prmt.b32{.f4e|.b4e|.rc8|.ecl|.ecr|.rc16}", "prmt", "exact"),
    # 9.7.9.21 conversion
    (f"cvt{{.rni|.rzi|.rmi|.rpi|.rn|.rz|.rm|.rp}}{{.ftz}}{{.sat}}{_VALUES}{_VALUES}", "cvt", "exact"),
    ("cvt(.rn|.rz){.relu}(.f16|.bf16).f32", "cvt", "exact"),
    ("cvt(.rn|.rz){.relu}(.f16x2|.bf16x2).f32", "pack", "exact"),
    ("cvt.rna.tf32.f32", "cvt", "exact"),
    ("cvt.pack.sat(.u16|.s16).s32", "u32=tt", "exact"),
    ("cvt.pack.sat(.u8|.s8|.u4|.s4|.u2|.s2).s32.b32", "pack3", "exact"),
    # 9.7.17 video
    ("(vadd2|vsub2|vavrg2|vabsdiff2|vmin2|vmax2)(.u32|.s32)(.u32|.s32)(.u32|.s32){.sat|.add}",
     "video", "exact"),
    ("(vadd4|vsub4|vavrg4|vabsdiff4|vmin4|vmax4)(.u32|.s32)(.u32|.s32)(.u32|.s32){.sat|.add}",
     "video", "exact"),
    ("(vset2|vset4)(.u32|.s32)(.u32|.s32)(.eq|.ne|.lt|.le|.gt|.ge){.add}", "video", "exact"),
    # scalar .sat is left out: what the driver makes of it contradicts the ISA (vadd.u32.sat of
    # 0xffffffff and 1 gives 0), and the simulator refuses it
    ("(vadd|vsub|vabsdiff|vmin|vmax)(.u32|.s32)(.u32|.s32)(.u32|.s32)", "scalar", "exact"),
    ("(vshl|vshr)(.u32|.s32).u32.u32(.clamp|.wrap)", "scalar", "exact"),
]  # fmt: skip
"""(grammar, how operands follow from the types, tolerance)."""


@dataclass(frozen=True)
class Form:
    """An instruction with all its modifiers, output and input types, PTX text, tolerance."""

    name: str
    out: str
    ins: tuple[str, ...]
    text: str
    tol: str
    limit: str = ""

    @property
    def signature(self) -> tuple[str, tuple[str, ...], str]:
        """Properties that forms must share to lie in one kernel."""
        return self.out, self.ins, self.limit


def expand(rule: str) -> list[str]:
    """All strings of a rule."""
    parts: list[list[str]] = []
    for piece in re.findall(r"\{[^}]*\}|\([^)]*\)|[^{(]+", rule):
        if piece[0] == "{":
            parts.append(["", *piece[1:-1].split("|")])
        elif piece[0] == "(":
            parts.append(piece[1:-1].split("|"))
        else:
            parts.append([piece])
    return ["".join(p) for p in itertools.product(*parts)]


_TYPE = re.compile(r"(?:[usb](?:8|16|32|64)|b?f16(?:x2)?|f32|f64|tf32)")


def _form(name: str, how: str, tol: str) -> Form:
    """The form of an expansion."""
    op = name.split(".")[0]
    types = [m for m in name.split(".")[1:] if _TYPE.fullmatch(m)]
    t = types[-1] if types else "b32"
    abc = "{d}, {a}, {b}, {c}"

    def plain(out: str, *ins: str, extra: str = "", limit: str = "") -> Form:
        return Form(name, out, ins, f"{name} {abc[: 8 + 5 * (len(ins) - 1)]}{extra};", tol, limit)

    if how == "mul":
        return plain(t, *[t] * (3 if op == "mad" else 2))
    if how == "wide":
        wide = t[0] + str(2 * int(t[1:]))
        return plain(wide, t, t, *([wide] if op == "mad" else []))
    if how == "fns":
        return Form(name, "b32", ("b32", "b32", "s32"),
                    "and.b32 %q0, {b}, 31; rem.s32 %q1, {c}, 9; fns.b32 {d}, {a}, %q0, %q1;", tol)  # fmt: skip
    if how == "bfe":
        return plain(t, t, "u32", "u32")
    if how == "bfi":
        text = f"{name} {{d}}, {{a}}, {{b}}, {{c}}, 9;"
        return Form(name, t, (t, t, "u32"), text, tol)
    if how == "szext":
        return plain(t, t, "u32")
    if how in ("carry", "madc"):
        flag = (
            f"add.cc.{t} {{d}}, {{a}}, {{b}}; "
            if op != "subc"
            else f"sub.cc.{t} {{d}}, {{a}}, {{b}}; "
        )
        body = (
            f"{name} {{d}}, {{a}}, {{c}};"
            if how == "carry"
            else f"{name} {{d}}, {{a}}, {{b}}, {{c}};"
        )
        if name.split(".")[1:2] == ["cc"] or ".cc." in name:
            again = f"addc.{t} {{d}}, {{d}}, 0;" if op != "subc" else f"subc.{t} {{d}}, {{d}}, 0;"
            body += " " + again
        return Form(name, t, (t, t, t), flag + body, tol)
    if how == "pred":
        return Form(name, "u32", (t,), f"{name} %p0, {{a}}; selp.b32 {{d}}, 1, 0, %p0;", tol)
    if how == "angle":
        return plain(t, t, limit="angle")
    third = ", %pin" if any(f".{b}." in name for b in ("and", "or", "xor")) else ""
    if how == "set":
        return plain(types[0], t, t, extra=third)
    if how == "setp":
        both = f"{name} %p0|%p1, {{a}}, {{b}}{third};"
        return Form(name, "u32", (t, t), both + " selp.b32 {d}, 1, 0, %p0;"
                    " selp.b32 %q0, 2, 0, %p1; or.b32 {d}, {d}, %q0;", tol)  # fmt: skip
    if how == "selp":
        return plain(t, t, t, extra=", %pin")
    if how == "slct":
        return plain(types[0], types[0], types[0], types[1])
    if how == "lop3":
        return Form(name, "b32", ("b32",) * 3, f"{name} {abc}, 0x96;", tol)
    if how == "shift":
        return plain(t, t, "u32", limit="")
    if how == "prmt":
        return plain("b32", "b32", "b32", "b32")
    if how == "cvt":
        return Form(name, types[0], (types[1],), f"{name} {{d}}, {{a}};", tol)
    if how == "pack":
        return plain(types[0], "f32", "f32")
    if how == "pack3":
        return plain("b32", "s32", "s32", "b32")
    if how == "video":
        return plain("u32", "u32", "u32", "u32")
    if how == "scalar":
        return plain("u32", "u32", "u32")
    out, ins = how.split("=")
    return plain(t if out == "t" else out, *[t] * len(ins))


def candidates() -> list[Form]:
    """All expansions of all rules, each once."""
    out: dict[str, Form] = {}
    for rule, how, tol in RULES:
        for name in expand(rule):
            out.setdefault(name, _form(name, how, tol))
    return list(out.values())


def refused() -> list[str]:
    """Names of the candidates that ptxas does not take for sm_87."""
    return gzip.decompress(REFUSED.read_bytes()).decode().split()


def forms() -> list[Form]:
    """The forms that exist."""
    gone = set(refused())
    return [f for f in candidates() if f.name not in gone]


# Inputs

_CORNERS: dict[str, list[int]] = {
    "f32": [
        0, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345,
        1, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0x3F000000, 0xC0200000, 0x4F000000, 0x33800000,
    ],
    "f64": [
        0, 1 << 63, 0x3FF0000000000000, 0xBFF0000000000000, 0x7FF0000000000000,
        0xFFF0000000000000, 0x7FF8000000000000, 0xFFF8000000012345, 1, 0x800FFFFFFFFFFFFF,
        0x0010000000000000, 0x7FEFFFFFFFFFFFFF, 0x3FE0000000000000, 0xC004000000000000,
        0x41DFFFFFFFC00000, 0x3CA0000000000000,
    ],
    "f16": [
        0, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 0xFE12, 1, 0x83FF, 0x0400, 0x7BFF,
        0x3800, 0xC100, 0x3400, 0x1000,
    ],
    "bf16": [
        0, 0x8000, 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 1, 0x807F, 0x0080, 0x7F7F,
        0x3F00, 0xC020, 0x3E80, 0x3B80,
    ],
}  # fmt: skip


def width(kind: str) -> int:
    """Bits of a type."""
    return 32 if kind.endswith("x2") or kind == "tf32" else int(kind.lstrip("abfsu"))


def _corners(kind: str) -> list[int]:
    if kind in _CORNERS:
        return _CORNERS[kind]
    if kind.endswith("x2"):
        half = _CORNERS[kind[:-2]]
        return [a | b << 16 for a, b in zip(half, half[5:] + half[:5], strict=True)]
    bits = width(kind)
    m, top = (1 << bits) - 1, 1 << bits - 1
    small = [0, 1, 2, 7, 8, 15, 16, 31, 32, 33, 63, m, m - 1, top, top - 1, 0x5555555555555555 & m]
    return [v & m for v in small]


def random_bits(name: str, bits: int, count: int) -> NDArray[np.uint64]:
    """`count` values of `bits` random bits that depend on `name` alone."""
    data = hashlib.shake_128(name.encode()).digest(count * bits // 8)
    return np.frombuffer(data, f"<u{bits // 8}").astype(np.uint64)


def inputs(ins: tuple[str, ...], limit: str = "") -> list[NDArray[np.generic]]:
    """Arrays of LANES values: 16 x 11 pairs of corner values, then random ones."""
    out: list[NDArray[np.generic]] = []
    lane = np.arange(LANES)
    for n, kind in enumerate(ins):
        pool, bits = _corners(kind), width(kind)
        values = random_bits(f"{'/'.join(ins)}/{n}", bits, LANES)
        pairs = 176
        step = (lane % 16, lane // 16 * 3 + lane % 16 // 8, lane * 7 + lane // 16)[n]
        values[:pairs] = np.array(pool, np.uint64)[step[:pairs] % len(pool)]
        tail = values[-40:]
        if kind in ("f16", "f16x2"):  # numbers between 1/8 and 2 in both halves
            tail &= np.uint64(0x87FF87FF if bits == 32 else 0x87FF)
            tail |= np.uint64(0x30003000 if bits == 32 else 0x3000)
        elif kind in ("bf16", "bf16x2"):
            tail &= np.uint64(0x81FF81FF if bits == 32 else 0x81FF)
            tail |= np.uint64(0x3E003E00 if bits == 32 else 0x3E00)
        elif kind == "f32":
            tail &= np.uint64(0x81FFFFFF)
            tail |= np.uint64(0x3E000000)
        elif kind == "f64":
            tail &= np.uint64(0x801FFFFFFFFFFFFF)
            tail |= np.uint64(0x3FE0000000000000)
        elif kind == "u32" and n:  # amounts
            tail &= np.uint64(63)
        raw = values.astype(f"<u{bits // 8}")
        if limit == "angle":
            x = raw.view("<f4")
            x = np.where(np.isfinite(x), x, np.float32(1)).astype(np.float64)
            raw = np.remainder(x, 6.28).astype("<f4").view("<u4")
        out.append(raw)
    return out


# Kernels


def _reg(kind: str) -> str:
    return "b16" if kind in ("u8", "s8") else f"b{width(kind)}"


def kernel(name: str, group: list[Form]) -> str:
    """One entry that runs forms of one signature; form n's results begin at n * LANES."""
    out, ins, _ = group[0].signature
    size = width(out) // 8
    lines = [f".visible .entry {name}(.param .u64 po, .param .u64 pa, .param .u64 pb, .param .u64 pc)", "{",
             ".reg .b64 %ro, %rp, %off; .reg .b32 %i, %q0, %q1; .reg .pred %p0, %p1, %pin;",
             f".reg .{_reg(out)} %d;"]  # fmt: skip
    lines.append("mov.u32 %i, %tid.x; and.b32 %q0, %i, 4; setp.ne.u32 %pin, %q0, 0;")
    for n, kind in enumerate(ins):
        plain = kind if kind in ("u8", "s8") else f"b{width(kind)}"
        lines += [f".reg .{_reg(kind)} %x{n};", f"ld.param.u64 %rp, [p{'abc'[n]}];",
                  f"mul.wide.u32 %off, %i, {width(kind) // 8}; add.u64 %rp, %rp, %off;",
                  f"ld.global.{plain} %x{n}, [%rp];"]  # fmt: skip
    lines += [
        "ld.param.u64 %ro, [po];",
        f"mul.wide.u32 %off, %i, {size}; add.u64 %ro, %ro, %off;",
    ]
    names = {"d": "%d", **{"abc"[n]: f"%x{n}" for n in range(len(ins))}}
    store = out if out in ("u8", "s8") else f"b{width(out)}"
    for n, form in enumerate(group):
        lines.append(form.text.format(**names))
        lines.append(f"st.global.{store} [%ro+{n * LANES * size}], %d;")
    return "\n".join([*lines, "ret;", "}"])


HEAD = ".version 8.0\n.target sm_87\n.address_size 64\n"


def groups(all_forms: list[Form]) -> list[list[Form]]:
    """Forms by signature, at most PER_KERNEL each."""
    by: dict[tuple[str, tuple[str, ...], str], list[Form]] = {}
    for form in all_forms:
        by.setdefault(form.signature, []).append(form)
    return [g[k : k + PER_KERNEL] for g in by.values() for k in range(0, len(g), PER_KERNEL)]


def check(ptxas: str) -> list[str]:
    """Names of the candidates that ptxas refuses for sm_87."""
    left: list[Form] = candidates()
    gone: list[str] = []
    while True:
        lines, owner = HEAD.split("\n"), {}
        for n, group in enumerate(groups(left)):
            for text in kernel(f"k{n}", group).split("\n"):
                lines.append(text)
            where = len(lines) - 2 * len(group) - 2
            for k, form in enumerate(group):
                owner[where + 2 * k + 1] = form.name
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write("\n".join(lines))
            file.flush()
            done = subprocess.run([ptxas, "-arch=sm_87", "-o", "/dev/null", file.name],
                                  capture_output=True, text=True, check=False)  # fmt: skip
        bad = {int(m) for m in re.findall(r"line (\d+); error", done.stderr)}
        names = {owner[b] for b in bad if b in owner}
        if not names:
            if done.returncode:
                sys.exit(f"grammar: ptxas: {done.stderr[:2000]}")
            return gone
        gone += sorted(names)
        left = [f for f in left if f.name not in names]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", metavar="PTXAS", required=True, help="write refused.txt")
    gone = sorted(check(parser.parse_args().check))
    REFUSED.write_bytes(gzip.compress(("\n".join(gone) + "\n").encode(), mtime=0))
    print(len(candidates()), "candidates,", len(gone), "refused")


if __name__ == "__main__":
    main()
