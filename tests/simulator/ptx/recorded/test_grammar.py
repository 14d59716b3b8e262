"""Every form of PTX's grammar against a GPU: grammar.npz holds what an H200 computed."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.simulator.ptx.recorded import grammar
from tests.simulator.ptx.recorded.oracle_cases import Case
from tests.simulator.ptx.recorded.test_oracle import differences, interpret

from nvgpusim.ptx.translate import supported_opcodes

HERE = Path(__file__).resolve().parent
RECORDED = np.load(HERE / "grammar.npz")
ABOUT = json.loads(RECORDED["about"].tobytes())
FORMS = json.loads(RECORDED["forms"].tobytes())
GROUPS = grammar.groups(grammar.forms())


def _split(array: Any, forms: int) -> list[Any]:
    return list(array.reshape(forms, grammar.LANES))


def compared(number: int) -> list[str]:
    """The forms of a group that are not as recorded."""
    group = GROUPS[number]
    kind, ins, limit = group[0].signature
    inputs = tuple(grammar.inputs(ins, limit))
    text = grammar.HEAD + grammar.kernel("k", group)
    bits, count = grammar.width(kind), grammar.LANES * len(group)
    case = Case(f"g{number}", text, inputs, bits, count, kind, grid=1, block=grammar.LANES)
    got = _split(interpret(case), len(group))
    want = _split(RECORDED[case.name], len(group))
    lines = []
    for form, mine, gpu in zip(group, got, want, strict=True):
        tol = form.tol if form.tol == "exact" or kind in ("f16", "f32", "f64", "f16x2") else "exact"
        if kind == "f16x2":
            mine, gpu = mine.view("<u2"), gpu.view("<u2")
        bad = differences(Case(form.name, "", inputs, bits, count, kind, tol), mine, gpu)
        if len(bad):
            i = int(bad[0])
            lane = i // 2 if kind == "f16x2" else i
            given = [hex(int(a[lane])) for a in inputs]
            lines.append(f"{form.name}: {len(bad)} of {len(gpu)} differ; lane {lane}: inputs "
                         f"{given}: got {int(mine[i]):#x}, GPU {int(gpu[i]):#x}")  # fmt: skip
    return lines


@pytest.mark.parametrize("number", range(len(GROUPS)))
def test_same_as_gpu(number: int) -> None:
    lines = compared(number)
    assert not lines, "\n".join(lines)


def test_no_form_is_without_a_case() -> None:
    assert not ABOUT["failed"]
    assert ABOUT["machine"].startswith("NVIDIA")
    assert [[f.name for f in g] for g in GROUPS] == FORMS


def table() -> list[str]:
    """The opcodes that run, and how many forms of each have a case, eight on a line."""
    counts = Counter(form.name.split(".")[0] for form in grammar.forms())
    named = [f"`{op}` {counts[op]}" if op in counts else f"`{op}`" for op in supported_opcodes()]
    return [", ".join(named[n : n + 8]) for n in range(0, len(named), 8)]


NEWER = {f"cvt{m}.ftz.f32.bf16" for m in ("", ".rn", ".rz", ".rm", ".rp")}
"""Forms that CUDA 12's ptxas takes for sm_87 and CUDA 13's, like the driver, does not."""


def test_refused_forms_are_ptxas_word() -> None:
    """The list of forms that do not exist on sm_87 is not ours to write."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(p) / "cuda_nvcc/bin/ptxas" for p in (spec.submodule_search_locations or ())]  # type: ignore[union-attr]
    ptxas = next((p for p in places if p.exists()), None)
    if ptxas is None:
        pytest.skip("no ptxas: install the extra cuda-tools")
    assert set(grammar.refused()) - set(grammar.check(str(ptxas))) <= NEWER
    assert set(grammar.check(str(ptxas))) <= set(grammar.refused())


if __name__ == "__main__":
    print("\n".join(table()))
