"""pytest: tests that run CUDA on the simulator, and fail with the finding's source line.

    def test_saxpy(nvgpusim):
        assert "passed" in nvgpusim.run("tests/saxpy.cu", "1000")

    @pytest.mark.nvgpusim(sanitize="race,bounds")
    def test_my_extension():
        import my_extension  # whose libcudart is a shared one
        my_extension.check()

The fixture compiles and runs a program. The mark runs a whole test in a process of its own, whose
libcudart and libcuda are the simulator's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from .findings import Finding

_INSIDE = "NVGPUSIM_CUDA"


class CudaRunner:
    """Value of the fixture; `findings` are those of the last run."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def run(
        self,
        source: str | Path,
        *arguments: str,
        sanitize: str = "race,init,sync,bounds,calls",
        options: Sequence[str] = (),
    ) -> str:
        """Compile and run a program; returns its stdout. Fails for a finding or an exit status."""
        from .cuda.compile import compile_program
        from .cuda.server import CudaServer
        from .options import CUDA_CHECKS, parse_checks

        server = CudaServer(frozenset(parse_checks(sanitize, CUDA_CHECKS)))
        with tempfile.TemporaryDirectory(prefix="nvgpusim-") as folder:
            goal, out = Path(folder, Path(source).stem), Path(folder, "stdout")
            compile_program(Path(source), goal, options)
            status = _run_captured([str(goal), *arguments], server, out)
            text = out.read_text(errors="replace")
        self.findings = [Finding.from_line(text) for text in server.findings]
        _fail_on_findings_or_status(self.findings, status, text)
        return text


def _run_captured(argv: list[str], server: object, out: Path) -> int:
    """Run a program with its stdout in a file; the exit status."""
    from .cuda.program_runner import run_program
    from .cuda.server import CudaServer

    assert isinstance(server, CudaServer)
    sys.stdout.flush()
    kept = os.dup(1)
    with out.open("wb") as file:
        os.dup2(file.fileno(), 1)
        try:
            return run_program(argv, server, os.environ)
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def _fail_on_findings_or_status(findings: list[Finding], status: int, text: str) -> None:
    for finding in findings:
        places = "".join(f"\n  {file}:{line}" for file, line in finding.places)
        pytest.fail(f"{finding.message}{places}", pytrace=False)
    if status:
        pytest.fail(f"the program ends with status {status}\n{text}", pytrace=False)


@pytest.fixture
def nvgpusim() -> CudaRunner:
    """Runs CUDA programs on the simulator."""
    return CudaRunner()


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line(
        "markers",
        "nvgpusim(sanitize): run the test's CUDA on the simulator, under its sanitizer",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test in a process of its own."""
    mark = pyfuncitem.get_closest_marker("nvgpusim")
    if mark is None or _INSIDE in os.environ:
        return None
    sanitize = mark.kwargs.get("sanitize", "race,init,sync,bounds,calls")
    command = [sys.executable, "-m", "nvgpusim", "cuda", "--sanitize", sanitize, sys.executable]
    command += ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", pyfuncitem.nodeid]
    done = subprocess.run(
        command, cwd=pyfuncitem.config.rootpath, capture_output=True, text=True, check=False
    )
    notes = [line for line in done.stderr.splitlines() if line.startswith("nvgpusim: note: ")]
    _fail_on_findings_or_status(
        [Finding.from_line(line.removeprefix("nvgpusim: note: ")) for line in notes], 0, ""
    )
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
    return True
