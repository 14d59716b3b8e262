"""PTX against a GPU: oracle.npz holds what an H200 computed (see record_oracle.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.simulator.ptx.flat import FlatMemory
from tests.simulator.ptx.recorded.oracle_cases import Case, cases

from nvgpusim.ptx import Launch, parse, translate_kernel

HERE = Path(__file__).resolve().parent
RECORDED = np.load(HERE / "oracle.npz")
ABOUT = json.loads(RECORDED["about"].tobytes())
FLOAT = {"f16": "<f2", "f32": "<f4", "f64": "<f8", "f16x2": "<f2"}


def interpret(case: Case) -> Any:
    """Run a case; returns the output's raw bits."""
    module = parse(case.ptx)
    code = translate_kernel(module, module.kernels[case.entry])
    memory = FlatMemory()
    out = np.zeros(case.out_count, f"<u{case.out_bits // 8}")
    extra = case.initial if case.initial is not None else np.zeros(4, "<u4")
    arrays = [out, *case.inputs, *[extra] * (3 - len(case.inputs))]
    pointers = [memory.add(a.view(np.uint8)) for a in map(np.ascontiguousarray, arrays)]
    bank = bytes(0x160) + b"".join(p.to_bytes(8, "little") for p in pointers)
    symbols = {}
    for v in module.variables.values():
        if v.space in ("global", "const"):
            symbols[v.name] = memory.add(np.frombuffer(v.data, np.uint8).copy())
    grid, block = (case.grid, 1, 1), (case.block, 1, 1)
    Launch(code, memory, grid, block, {0: bank}, symbols=symbols).run_all_blocks()
    if case.initial is not None:
        return memory.read(pointers[3], case.initial.nbytes).view("<u4")
    return memory.read(pointers[0], out.nbytes).view(out.dtype)


def ordered(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Float bits as integers whose difference is the distance in ulp."""
    signed = bits.view(f"i{bits.dtype.itemsize}").astype(object)
    top = 1 << (8 * bits.dtype.itemsize - 1)
    return np.where(
        bits >> (8 * bits.dtype.itemsize - 1) != 0, -(bits.astype(object) - top), signed
    )


def differences(case: Case, got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> Any:
    """Indices of elements that differ by more than the case allows."""
    if case.tol == "exact":
        return np.flatnonzero(got != want)
    g, w = got.view(FLOAT[case.kind]), want.view(FLOAT[case.kind])
    with np.errstate(all="ignore"):
        both_nan = np.isnan(g) & np.isnan(w)
        same = both_nan | (got.view(g.dtype) == w) if case.tol != "nan" else both_nan
        if case.tol == "nan":
            ok = both_nan | (got == want)
        elif case.tol.startswith("ulp:"):
            far = np.abs(ordered(got) - ordered(want)) <= int(case.tol[4:])
            ok = same | far.astype(bool)
        elif case.tol == "full":  # div.full: 2 ulp, for 2^-126 <= |b| <= 2^126 (PTX ISA)
            size = np.abs(case.inputs[1].view("<f4"))
            far = np.abs(ordered(got) - ordered(want)) <= 2
            ok = same | far.astype(bool) | ~((size >= 2.0**-126) & (size <= 2.0**126))
        elif case.tol == "lg2":  # absolute 2^-22 around 1, 2 ulp elsewhere (PTX ISA)
            far = np.abs(ordered(got) - ordered(want)) <= 3
            ok = same | far.astype(bool) | (np.abs(g - w) <= 2.0**-22)
        else:
            kind, value = case.tol.split(":")
            gap = np.abs(g.astype(np.float64) - w.astype(np.float64))
            limit = float(value) * (1 if kind == "abs" else np.abs(w.astype(np.float64)))
            ok = same | (gap <= limit)
    return np.flatnonzero(~ok)


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_same_as_gpu(case: Case) -> None:
    want = RECORDED[case.name]
    got = interpret(case).reshape(-1)
    if case.kind == "f16x2":
        got, want = got.view("<u2"), want.view("<u2")
    bad = differences(case, got, want)
    if len(bad):
        lines = []
        for i in bad[:8]:
            given = [hex(int(a[i])) for a in case.inputs if len(a) == len(want)]
            lines.append(f"lane {i}: inputs {given}: got {int(got[i]):#x}, GPU {int(want[i]):#x}")
        pytest.fail(f"{len(bad)} of {len(want)} differ\n" + "\n".join(lines))


def test_recording_is_complete() -> None:
    assert not ABOUT["failed"]
    assert set(RECORDED.files) == {c.name for c in cases()} | {"about"}
    assert ABOUT["machine"].startswith("NVIDIA")
