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


@pytest.mark.parametrize("arch", MACHINES)
@pytest.mark.parametrize("quant", ["Q6_K", "Q5_K", "Q4_K", "Q8_0", "F16"])
def test_registers_and_spills(
    quant: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinygrad.llm.kernels import nv
    from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler

    device, multiprocessors = MACHINES[arch]
    monkeypatch.setattr(nv, "multiprocessors", lambda device: multiprocessors)
    made = {
        kernel.name: kernel.source.removeprefix(nv.cuda_source())
        for shape in ("1b", "8b")
        for batch in (1, 4)
        for kernel, _ in sass.kernels(nv, shape_named(shape), quant, device, batch)
    }
    # Entries of one source share the time that reading it takes.
    ptx = NVRTCCompiler(arch, ptx=True, cache_key="none").compile(
        nv.cuda_source() + "".join(made.values())
    )
    (tmp_path / "kernels.ptx").write_bytes(ptx.rstrip(b"\0"))
    ptxas = wheel_file("cuda_nvcc/bin/ptxas")
    done = subprocess.run(
        [ptxas, f"-arch={arch}", "-v", "-o", tmp_path / "kernels.cubin", tmp_path / "kernels.ptx"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = {name: (int(r), int(a) + int(b)) for name, a, b, r in ENTRY.findall(done.stderr)}
    assert found.keys() == made.keys()
    assert {name: used for name, used in found.items() if used[0] >= 128 or used[1]} == {}
