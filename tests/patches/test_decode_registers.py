"""0013, 0014, 0019-0025: every kernel of 1B and 8B by ptxas: below 128 registers, no spills."""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


def entries(kernels: Iterable[Any]) -> dict[str, str]:
    """The source of each kernel without what all share, by name."""
    from tinygrad.llm.kernels import nv

    made = {kernel.name: kernel.source.removeprefix(nv.cuda_source()) for kernel in kernels}
    assert made
    return made


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


def over(found: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Those that leave no room for two blocks of 256 threads, or spill."""
    return {name: use for name, use in found.items() if use[0] >= 128 or use[1]}


@pytest.mark.parametrize("arch", MACHINES)
@pytest.mark.parametrize("quant", ["Q6_K", "Q5_K", "Q4_K", "Q8_0", "F16", "BF16"])
def test_registers_and_spills(
    quant: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinygrad.llm.kernels import nv

    device, multiprocessors = MACHINES[arch]
    monkeypatch.setattr(nv, "multiprocessors", lambda device: multiprocessors)
    made = entries(
        kernel
        for shape in ("1b", "8b")
        for batch in (1, 4)
        for kernel, _ in sass.kernels(nv, shape_named(shape), quant, device, batch)
    )
    assert over(used(made, arch, tmp_path)) == {}


def test_registers_of_a_prompt(tmp_path: Path) -> None:
    """The products of a prompt alone, which need no kernel of a batch."""
    from tinygrad.llm.kernels import nv

    made = entries(
        kernel
        for quant in ("Q6_K", "Q8_0")
        for shape in ("1b", "8b")
        for kernel, _ in sass.gemm_kernels(nv, shape_named(shape), quant)
    )
    assert over(used(made, "sm_90", tmp_path)) == {}


@pytest.mark.parametrize("role", ["gemv_out", "gemv_down"])
def test_what_a_product_is_added_to_is_read_before_it(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is waited for once, and not for the one behind the other."""
    from tinygrad.llm.kernels import nv
    from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler

    monkeypatch.setattr(nv, "multiprocessors", lambda device: 16)
    (kernel,) = (k for k, _ in sass.kernels(nv, shape_named("1b"), "Q6_K") if role in k.name)
    ptx = NVRTCCompiler("sm_87", ptx=True, cache_key="none").compile(kernel.source).decode()
    products = ptx[ptx.index("dp4a") :]
    assert "ld.global.f32" not in products[: products.index("st.global.f32")]
    assert "ld.global.f32" in ptx[: -len(products)]
