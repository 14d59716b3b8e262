"""The simulator as a tool: `nvgpusim run`, the API, SARIF, pytest, a wheel of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
from tests.patches.conftest import wheel_file
from tests.simulator.cuda.hecbench import judged

from nvgpusim.api import Module
from nvgpusim.errors import SimError
from nvgpusim.findings import Finding, sarif_text

ROOT = Path(__file__).resolve().parents[3]
SOURCE = """#include <cstdio>
#include <cstdlib>
__global__ void scale(int n, float a, const float* x, float* y) {
  const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) y[i] = a * x[i];
}
int main(int argc, char** argv) {
  const int n = atoi(argv[1]);
  float *x, *y;
  cudaMalloc(&x, 400);
  cudaMalloc(&y, 400);
  cudaMemset(x, 0, 400);
  scale<<<1, 128>>>(n, 2, x, y);
  printf("ended: %d\\n", (int)cudaDeviceSynchronize());
}
"""
WRITE = 5
"""The line of SOURCE that goes past the buffer."""


@pytest.fixture(scope="module", autouse=True)
def compilers() -> None:
    os.environ["CUDA_PATH"] = str(wheel_file("cu13/bin/nvcc").parents[1])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "scale.cu").write_text(SOURCE)
    return tmp_path / "scale.cu"


def nvgpusim(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nvgpusim", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_run_compiles_runs_and_reports(source: Path) -> None:
    right = nvgpusim("run", "scale.cu", "100", cwd=source.parent)
    assert (right.returncode, right.stdout) == (0, "ended: 0\n")
    wrong = nvgpusim("run", "--sarif", "out.sarif", "scale.cu", "101", cwd=source.parent)
    assert wrong.returncode == 3
    log = json.loads((source.parent / "out.sarif").read_text())
    (write,) = (r for r in log["runs"][0]["results"] if "write" in r["message"]["text"])
    place = write["locations"][0]["physicalLocation"]
    assert write["ruleId"] == "bounds"
    assert place["artifactLocation"]["uri"] == "scale.cu"
    assert place["region"]["startLine"] == WRITE


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "none.cu"), "none.cu: No such file"),
        (("run", "--sarif", "/none/x", "scale.cu", "1"), "--sarif /none/x: No such file"),
        (("run", "-X", "-DWRONG=(", "scale.cu", "1"), "scale.cu does not compile:"),
    ],
)  # fmt: skip
def test_bad_use_of_run(source: Path, arguments: tuple[str, ...], said: str) -> None:
    if "-X" in arguments:
        source.write_text("int main() { return WRONG; }\n")
    done = nvgpusim(*arguments, cwd=source.parent)
    assert done.returncode == 2
    assert f"nvgpusim: error: {said}" in done.stderr


def test_kernels_on_arrays(source: Path) -> None:
    module = Module.compile(source)
    x, y = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
    assert not module.run("scale", 1, 128, np.int32(100), np.float32(3), x, y)
    assert y.tolist() == (3 * x).tolist()
    for _ in range(2):  # each run tells its own
        read, write = module.run("scale", 1, 128, np.int32(101), np.float32(3), x, y)
        assert (read.kind, write.kind) == ("bounds", "bounds")
    assert write.places[0] == (str(source), WRITE)
    for arguments, said in (
        ((np.int32(1),), "4 arguments expected, 1 given"),
        ((np.int64(1), np.float32(3), x, y), "argument 1 has 4 bytes, 8 given"),
        ((1, np.float32(3), x, y), "expected an array or one of numpy's scalars"),
    ):
        with pytest.raises(SimError, match=said):
            module.run("scale", 1, 128, *arguments)
    with pytest.raises(SimError, match="expected one of _Z5scaleifPKfPf"):
        module.run("nothing", 1, 1)
    with pytest.raises(SimError, match="a module cannot be loaded"):
        Module("no PTX at all, and more of it")


def test_sarif_names_each_kind() -> None:
    texts = ["kernel k: race: x (a.cu:7)", "leaks: 1 buffers", "kernel k: MMU fault"]
    log = json.loads(sarif_text(map(Finding.from_line, texts), Path("/")))
    found = [r["ruleId"] for r in log["runs"][0]["results"]]
    assert found == ["race", "leaks", "fault"]
    assert {"race", "leaks", "fault"} <= {
        r["id"] for r in log["runs"][0]["tool"]["driver"]["rules"]
    }


TESTS = """
import ctypes, pytest
def test_right(nvgpusim): assert "ended: 0" in nvgpusim.run("scale.cu", "100")
def test_wrong(nvgpusim): nvgpusim.run("scale.cu", "101")
@pytest.mark.nvgpusim
def test_library():
    rt = ctypes.CDLL("libcudart.so")
    p = ctypes.c_void_p()
    assert rt.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(100)) == 0
    assert rt.cudaMemset(p, 0, ctypes.c_size_t(100)) == 0
@pytest.mark.nvgpusim(sanitize="calls")
def test_library_wrong():
    rt = ctypes.CDLL("libcudart.so")
    p = ctypes.c_void_p()
    rt.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(100))
    rt.cudaMemset(p, 0, ctypes.c_size_t(200))
"""


def test_the_pytest_plugin(source: Path) -> None:
    (source.parent / "test_it.py").write_text(TESTS)
    (source.parent / "pytest.ini").write_text("[pytest]\n")  # no settings of a folder above
    command = [sys.executable, "-m", "pytest", "-q", "-p", "nvgpusim.pytest_plugin", "test_it.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=source.parent)
    assert "2 failed, 2 passed" in done.stdout, done.stdout
    assert f"scale.cu:{WRITE}" in done.stdout
    assert "a copy or memset writes 200 bytes: 100 bytes past the end" in done.stdout


def test_a_wheel_of_its_own(source: Path) -> None:
    """With numpy and click alone it runs a program."""
    wheels, tree = source.parent / "wheels", source.parent / "simulator"
    shutil.copytree(ROOT / "simulator", tree)  # setuptools builds where the sources are
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "-w", str(wheels), str(tree)], check=True)
    (wheel,) = wheels.glob("nvgpusim-*.whl")
    assert wheel.stat().st_size < 1_100_000
    venv.create(source.parent / "v")
    place = next((source.parent / "v/lib").glob("python*/site-packages"))
    target = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*target, str(place), str(wheel)], check=True)
    for name in ("numpy", "numpy.libs", "click"):
        if (origin := Path(np.__file__).parents[1] / name).exists():
            (place / name).symlink_to(origin)
    python = str(source.parent / "v/bin/python")
    command = [python, "-m", "nvgpusim", "run", str(source), "101"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert f"{source}:{WRITE}" in done.stderr


def test_a_program_that_did_nothing_has_not_passed() -> None:
    """Its calls and kernels failed, and two buffers that nobody wrote are the same."""
    end = "nvgpusim: {} launches, 9 thread instructions, {} findings\n"
    assert judged(0, "PASS\n", end.format(2, 0)) == "pass"
    fault = "nvgpusim: note: kernel k: MMU fault: atomic of 0x0: unmapped\n" + end.format(1, 1)
    assert judged(0, "PASS\n", fault).startswith("found: note: kernel k")
    assert judged(0, "PASS\n", end.format(0, 0)).startswith("ends with 0")
    assert judged(0, "PASS\nFAIL\n", end.format(2, 0)).startswith("ends with 0")
