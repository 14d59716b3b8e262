"""The whole life of life.py under `python -m nvgpusim`, plainly and under every adversary."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.simulator.kernel.data.build import build, library
from tests.simulator.kernel.process.test_cli import cache, sim  # noqa: F401 - cache is a fixture

from nvgpusim import cli
from nvgpusim.orin.gpu import programs

HERE = Path(__file__).parent
DATA = HERE.parent / "data"
EXPECTED = {
    "right": True,
    "qmd_release": 7,
    "ordered": True,
    "woken": True,
    "errors": [None, None],
    "gpget": [1, 1],
}


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's PTX, where a process of the run finds it."""
    monkeypatch.setenv("NVGPUSIM_CACHE", str(tmp_path / "programs"))
    kept = programs.ProgramStore()
    kept.register_pair((DATA / "life.cubin").read_bytes(), (DATA / "life.ptx").read_bytes())


def live(*options: str, patience: float = 120) -> subprocess.CompletedProcess[str]:
    """Run life.py on the model; it waits so many seconds for a signal."""
    command = (str(HERE / "life.py"), str(DATA / "life.cubin"))
    return sim(*options, "--", *command, env={"PATIENCE": str(patience)})


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--delay", "3", "--seed", "5", "--poison"),
        ("--place", "random", "--seed", "2"),
        ("--place", "windows"),
        ("--board", "nano4", "--profile", "r39"),
    ],
)
def test_launch_copy_semaphore_teardown(options: tuple[str, ...]) -> None:
    run = live("--strict", *options)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == EXPECTED
    assert "leaks  none" in run.stderr and "launches 1" in run.stderr


@pytest.mark.usefixtures("known")
def test_the_trace_of_a_life_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    assert live("--record", str(trace)).returncode == 0
    assert cli.main(["replay", "--addresses", str(trace)]) == 0, capsys.readouterr().out


@pytest.mark.usefixtures("known")
def test_a_lost_doorbell_hangs() -> None:
    run = live("--inject", "lost-doorbell:p=1", patience=0.5)
    assert run.returncode == 1 and "TimeoutError: signal 0 < 1" in run.stderr


@pytest.mark.usefixtures("known")
def test_an_injected_error_kills_the_channel() -> None:
    run = live("--inject", "channel-error=13", patience=3)
    assert run.returncode == 1 and "GPU error 13: injected channel-error" in run.stderr
    assert "life.py" in run.stderr


def test_the_kept_cubin_is_what_nvrtc_makes() -> None:
    path = library()
    if path is None:
        pytest.skip("nvidia-cuda-nvrtc-cu12 is not installed")
    cubin, ptx = build(path)
    assert (DATA / "life.ptx").read_bytes() == ptx
    kept = programs.read_cubin((DATA / "life.cubin").read_bytes(), "")
    assert [p.text for p in kept] == [p.text for p in programs.read_cubin(cubin, "")]
