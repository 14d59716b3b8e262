"""`make` on a machine where nothing is set up yet."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files that make looks at, and no .venv."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    folder = Path("patches", "tinygrad")
    shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


def make(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=clone,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("target", ["bench", "telemetry-demo"])
def test_users_do_not_wait_for_the_tools_of_developers(clone: Path, target: str) -> None:
    done = make(clone, "--dry-run", target)
    assert done.returncode == 0, done.stderr
    assert ".[cpu,nvml]" in done.stdout
    assert "cuda-tools" not in done.stdout


def test_the_demonstration_says_what_it_lacks(clone: Path) -> None:
    command = ["--assume-old=.venv/.bench", "telemetry-demo", "PATH=/nonexistent"]
    done = make(clone, *command)
    assert done.returncode == 2
    assert done.stderr.startswith("make: there is no prometheus on PATH: sudo apt-get install ")


def test_an_environment_that_fails_halfway_is_made_anew(clone: Path) -> None:
    """As Debian's python3 without python3-venv: bin/python is there, pip is not."""
    python = clone / "python3"
    python.write_text(
        '#!/bin/sh\n[ "$1" = -c ] && exit 0\n'
        "mkdir -p .venv/bin && touch .venv/bin/python\necho ensurepip is not available\nexit 1\n"
    )
    python.chmod(0o755)
    for _ in range(2):
        done = make(clone, "bench", f"PYTHON={python}")
        assert done.returncode == 2
        assert done.stdout.endswith("ensurepip is not available\n")
        assert not (clone / ".venv").exists()


def test_an_old_python_is_refused(clone: Path) -> None:
    done = make(clone, "bench", "PYTHON=false")
    assert done.returncode == 2
    assert "make: false is older than 3.11: pass a newer one" in done.stderr


def test_the_chosen_python_is_no_device_of_tinygrad(clone: Path) -> None:
    """tinygrad takes the variable PYTHON for a device's, and fails on a program's name."""
    with (clone / "Makefile").open("a") as makefile:
        makefile.write("\nshow:\n\t@env\n")
    done = make(clone, "show", "PYTHON=python3.11")
    assert "\nPATH=" in done.stdout and "\nPYTHON=" not in done.stdout


def test_every_module_says_what_it_is_for() -> None:
    done = make(ROOT, "modules")
    modules = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert modules["engine/orinllm/gpu/cuda/gate.cu"].startswith("What becomes of a product where")
    assert modules["nixos/install/install.py"].startswith("Install a host of a flake")  # no #!
    assert {"engine", "benchmarks", "simulator", "telemetry", "nixos"} <= {
        name.partition("/")[0] for name in modules
    }
    assert [name for name, text in modules.items() if " " not in text] == []


KERNEL_ROWS = re.compile(r"(?m)^TESTS_(\w+) := (.+)$")


def test_every_kernel_has_tests_of_its_own() -> None:
    rows = dict(KERNEL_ROWS.findall((ROOT / "Makefile").read_text()))
    assert set(rows) == {path.stem for path in (ROOT / "engine/orinllm/gpu/cuda").glob("*.cu")}
    for node in " ".join(rows.values()).split():
        file, _, test = node.partition("::")
        text = (ROOT / "tests" / "engine" / file).read_text()
        assert f"\ndef {test.partition('[')[0]}(" in text or not test, node


@pytest.mark.parametrize("kernel", ["", "gem", "gemv gemm"])
def test_an_unknown_kernel_is_refused(clone: Path, kernel: str) -> None:
    cuda = clone / "engine" / "orinllm" / "gpu" / "cuda"
    cuda.mkdir(parents=True)
    (cuda / "gemv.cu").touch()
    # As if all were installed already.
    done = make(clone, "--assume-old=.venv/.dev", "kernel", f"K={kernel}")
    assert done.returncode == 2
    assert f"make: K='{kernel}' is no kernel: want one of gemv\n" in done.stderr
