"""0013, 0014, 0019, 0020: every kernel of 1B and 8B by ptxas: below 128 registers, no spills."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patches.conftest import REPOSITORY, wheel_file

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
from orinbench import sass
from orinbench.shapes import shape_named

# What an Orin has, and what the H200 has on which the kernels are timed: (device, multiprocessors).
MACHINES = {"sm_87": ("NV", 16), "sm_90": ("CUDA", 132)}
ENTRY = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)


def used(made: dict[str, str], arch: str, folder: Path) -> dict[str, tuple[int, int]]:
    """Registers and spilled bytes of each kernel, by ptxas."""
    from tinygrad.llm.kernels import nv
    from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler

    # Entries of one source share the time that reading it takes.
    ptx = NVRTCCompiler(arch, ptx=True, cache_key="none").compile(
        nv.cuda_source() + "".join(made.values())
    )
    (folder / "kernels.ptx").write_bytes(ptx.rstrip(b"\0"))
    ptxas = wheel_file("cuda_nvcc/bin/ptxas")
    done = subprocess.run(
        [ptxas, f"-arch={arch}", "-v", "-o", folder / "kernels.cubin", folder / "kernels.ptx"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = {name: (int(r), int(a) + int(b)) for name, a, b, r in ENTRY.findall(done.stderr)}
    assert found.keys() == made.keys()
    return found


def within(found: dict[str, tuple[int, int]]) -> bool:
    over = {name: use for name, use in found.items() if use[0] >= 128 or use[1]}
    assert over == {}
    return bool(found)


@pytest.mark.parametrize("arch", MACHINES)
@pytest.mark.parametrize("quant", ["Q6_K", "Q5_K", "Q4_K", "Q8_0", "F16"])
def test_registers_and_spills(
    quant: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinygrad.llm.kernels import nv

    device, multiprocessors = MACHINES[arch]
    monkeypatch.setattr(nv, "multiprocessors", lambda device: multiprocessors)
    made = {
        kernel.name: kernel.source.removeprefix(nv.cuda_source())
        for shape in ("1b", "8b")
        for batch in (1, 4)
        for kernel, _ in sass.kernels(nv, shape_named(shape), quant, device, batch)
    }
    assert within(used(made, arch, tmp_path))


def test_registers_of_a_prompt(tmp_path: Path) -> None:
    """The products of a prompt alone, which need no kernel of a batch."""
    from tinygrad.llm.kernels import nv

    made = {}
    for quant in ("Q6_K", "Q8_0"):
        typ = sass._TYPES[quant]
        _, width, size, _, _ = nv.TYPES[typ]
        for shape in map(shape_named, ("1b", "8b")):
            dim, hidden, none = shape.n_embd, shape.n_ff, sass._Bytes(0)
            for role, mode, rows, cols, n in (
                ("out", "ADD", dim, dim, 1),
                ("gate_up", "SWIGLU", hidden, dim, 2),
                ("down", "ADD", dim, hidden, 1),
            ):
                packed = sass._Bytes(rows * cols // width * size)
                weights = [nv.Weight(packed, typ, rows, cols)] * n
                for kernel, _ in nv.gemm(role, mode, weights, [None] * n, none, none, none, 1.0):
                    made[kernel.name] = kernel.source.removeprefix(nv.cuda_source())
    assert within(used(made, "sm_90", tmp_path))
