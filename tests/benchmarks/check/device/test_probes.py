"""The process of a program for a GPU, and what it leaves of an error."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.benchmarks.orinbench_command import Patch

from orinbench.check.device.probes import PROGRAMS, Found, ProbeSettings, main
from orinbench.check.device.steps import PROBES


@pytest.mark.parametrize("error", ["the GPU\nhas stopped", None])
def test_an_exception_is_what_a_program_found(
    tmp_path: Path, monkeypatch: Patch, error: str | None
) -> None:
    def computes(work: ProbeSettings) -> Found:
        if error:
            raise RuntimeError(error)
        return {"sum": True}

    monkeypatch.setitem(PROGRAMS, "computes", computes)
    out = tmp_path / "found.json"
    assert main(str(out), "computes", "tiny", "-") == bool(error)
    failed = {"failed": "RuntimeError: the GPU has stopped"}
    assert json.loads(out.read_text()) == (failed if error else {"sum": True})


def test_a_program_of_its_own_without_a_board_says_why(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, *PROBES, str(out), "computes", "tiny", "-"]
    environment = {"DEV": "TEGRA+NV", "PATH": "/usr/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 1 and "failed" in json.loads(out.read_text())
