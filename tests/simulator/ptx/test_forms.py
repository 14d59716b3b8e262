# ruff: noqa: E501 - PTX stays one instruction a line
"""Every recorded form, compiled: many in one kernel, folded to a word a group and lane."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.simulator.ptx.flat import FlatMemory
from tests.simulator.ptx.machine import code_of
from tests.simulator.ptx.recorded import grammar
from tests.simulator.ptx.recorded.test_grammar import GROUPS, RECORDED

from nvgpusim.ptx import Launch


def exact() -> list[list[grammar.Form]]:
    """The forms whose answers have one right value, in the groups that were recorded."""
    return [[f for f in group if is_exact(f)] for group in GROUPS]


def is_exact(form: grammar.Form) -> bool:
    """False where PTX gives a tolerance or leaves a NaN's bits open."""
    floats = ("f16", "f32", "f64", "f16x2")
    return form.tol == "exact" or form.signature[0] not in floats


def folded(groups: list[list[grammar.Form]]) -> tuple[str, list[Any]]:
    """A kernel that folds the results of each group into one word a lane, and its inputs."""
    lines = [f"{grammar.HEAD}.visible .entry k(.param .u64 po, .param .u64 pa)", "{",
             ".reg .b64 %acc, %w, %ro, %rp, %off; .reg .b32 %i, %q0, %q1; .reg .pred %p0, %p1, %pin;",
             "mov.u32 %i, %tid.x; and.b32 %q0, %i, 4; setp.ne.u32 %pin, %q0, 0; ld.param.u64 %ro, [po];",
             "mul.wide.u32 %off, %i, 8; add.u64 %ro, %ro, %off;"]  # fmt: skip
    inputs: list[Any] = []
    for k, group in enumerate(groups):
        out, ins, limit = group[0].signature
        reg = {8: 16}.get(grammar.width(out), grammar.width(out))
        lines.append(f".reg .b{reg} %d{k}; mov.u64 %acc, {k};")
        for n, (kind, array) in enumerate(zip(ins, grammar.inputs(ins, limit), strict=True)):
            bits = grammar.width(kind)
            at = sum(a.nbytes for a in inputs)
            inputs.append(
                np.concatenate([array.view(np.uint8), np.zeros(-array.nbytes % 8, np.uint8)])
            )
            lines += [f".reg .b{max(16, bits)} %x{k}_{n}; ld.param.u64 %rp, [pa]; mul.wide.u32 %off, %i, {bits // 8};",
                      f"add.u64 %rp, %rp, %off; ld.global.{kind if bits == 8 else f'b{bits}'} %x{k}_{n}, [%rp+{at}];"]  # fmt: skip
        names = {"d": f"%d{k}", **{"abc"[n]: f"%x{k}_{n}" for n in range(len(ins))}}
        for form in group:
            wide = (
                f"mov.b64 %w, %d{k};" if reg == 64 else f"cvt.u64.u{grammar.width(out)} %w, %d{k};"
            )
            lines += [
                form.text.format(**names),
                wide,
                "mad.lo.u64 %acc, %acc, 0x9E3779B97F4A7C15, %w;",
            ]
        lines.append(f"st.global.u64 [%ro+{8 * k * grammar.LANES}], %acc;")
    return "\n".join([*lines, "ret;", "}"]), inputs


def fold(text: str, inputs: list[Any], groups: int) -> Any:
    """The words (groups, lanes) of a folded kernel."""
    code, memory = code_of(text), FlatMemory()
    out = memory.add(np.zeros(8 * groups * grammar.LANES, np.uint8))
    given = memory.add(np.concatenate(inputs))
    bank = bytes(0x160) + out.to_bytes(8, "little") + given.to_bytes(8, "little")
    Launch(code, memory, (1, 1, 1), (grammar.LANES, 1, 1), {0: bank}).run_all_blocks()
    return memory.read(out, 8 * groups * grammar.LANES).view(np.uint64).reshape(groups, -1)


def of_recorded(number: int, forms: list[grammar.Form], start: int) -> Any:
    """The results of `folded` for a group's recorded answers."""
    group, want = GROUPS[number], RECORDED[f"g{number}"]
    rows = dict(zip((f.name for f in group), want.reshape(len(group), -1), strict=True))
    total = np.full(grammar.LANES, start, np.uint64)
    for form in forms:
        row = np.ascontiguousarray(rows[form.name])
        bits = row.view(f"u{row.nbytes // grammar.LANES}").astype(np.uint64)
        total = total * np.uint64(0x9E3779B97F4A7C15) + bits
    return total


def test_every_form_is_the_gpus() -> None:
    """4,653 of 4,683, folded; the others have a tolerance (see test_grammar)."""
    numbered = [(n, forms) for n, forms in enumerate(exact()) if forms]
    assert sum(len(forms) for _, forms in numbered) == 4653
    assert sum(map(len, GROUPS)) == 4683
    for start in range(0, len(numbered), 20):
        some_groups = numbered[start : start + 20]
        text, inputs = folded([forms for _, forms in some_groups])
        got = fold(text, inputs, len(some_groups))
        for k, (n, forms) in enumerate(some_groups):
            bad = np.flatnonzero(got[k] != of_recorded(n, forms, k))
            assert not len(bad), f"group {n}, lane {bad[0]}: {[f.name for f in forms]}"
