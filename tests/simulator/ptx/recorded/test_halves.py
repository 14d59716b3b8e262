"""Every function of cuda_fp16.h and cuda_bf16.h against a GPU: halves.npz has an H200's answers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tests.patches.conftest import wheel_file
from tests.simulator.ptx.flat import FlatMemory
from tests.simulator.ptx.recorded import halves

from nvgpusim.ptx import Launch, PtxModule, parse, translate_kernel

RECORDED = np.load(Path(__file__).resolve().parent / "halves.npz")
ABOUT = json.loads(RECORDED["about"].tobytes())
TANH = ("htanh_approx(__half)", "h2tanh_approx(__half2)")
"""tanh.approx.f16: an absolute error of 2^-10.987 (PTX ISA)."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[PtxModule, list[halves.Function]]:
    folder, cuda = tmp_path_factory.mktemp("halves"), wheel_file("cu13/bin/nvcc").parents[1]
    text, found = halves.source(cuda / "include")
    (folder / "halves.cu").write_text(text)
    nvcc: list[str | Path] = [cuda / "bin/nvcc", "-ptx", "-arch=compute_87"]
    subprocess.run([*nvcc, folder / "halves.cu", "-o", folder / "halves.ptx"], check=True)
    return parse((folder / "halves.ptx").read_text()), found


def run(module: PtxModule, f: halves.Function) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    memory = FlatMemory()
    arrays = np.zeros(f.words, "<u8"), *halves.inputs(f)
    pointers = [memory.add(a.view(np.uint8).copy()) for a in arrays]
    bank = bytes(0x160) + b"".join(p.to_bytes(8, "little") for p in pointers)
    code = translate_kernel(module, module.kernels[f.kernel])
    Launch(code, memory, (1, 1, 1), (halves.LANES, 1, 1), {0: bank}).run_all_blocks()
    return np.asarray(memory.read(pointers[0], 8 * f.words).view("<u8"))


def test_every_function_of_the_headers(compiled: tuple[PtxModule, list[halves.Function]]) -> None:
    module, found = compiled
    assert not ABOUT["failed"]
    known = [f for f in found if f.signature in RECORDED.files]
    assert len(known) >= 450, "record the functions of this CUDA"
    wrong = []
    for f in found:
        got = run(module, f)
        if f.signature not in RECORDED.files:  # of a newer CUDA: it runs
            continue
        want = RECORDED[f.signature]
        if f.signature in TANH:
            g, w = (x.view("<f2").astype(float) for x in (got, want))
            same = (np.abs(g - w) <= 2**-10.987 + 2**-11) | (np.isnan(g) & np.isnan(w))
        else:
            same = got == want
        wrong += [] if same.all() else [f"{f.signature}: {int((~same).sum())} words"]
    assert not wrong
