"""The units of the evaluated hosts, before systemd of this machine: well-formed, and hardened."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.nixos.recorded import recorded

# `systemd-analyze security` in tenths: 30 is 3.0. docs/reference/nixos-checks.md says why some
# exceed 1.0.
LIMITS = {
    "jetson-exporter.service": 30,
    "jetson-exporter-debugfs.service": 30,
    "orin-gpu.service": 30,
    "orin-llm-server-main.service": 30,
    "orin-performance-readback.service": 30,
}


@pytest.fixture(scope="session")
def units(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root folder with the units of `orin-llm` and a stand-in for each program that they run."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here: apt-get install systemd")
    kept = recorded()
    texts = {name: kept[name] for name in LIMITS}
    root = tmp_path_factory.mktemp("root")
    folder = root / "etc" / "systemd" / "system"
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
        for program in re.findall(r"^Exec\w+=[-+!@]*\"?(/[^\s\"]+)", text, flags=re.MULTILINE):
            stand_in = root / program.lstrip("/")
            stand_in.parent.mkdir(parents=True, exist_ok=True)
            stand_in.write_text("#!/bin/sh\n")
            stand_in.chmod(0o755)
    # Targets and units of others that ours name.
    for name in ("basic", "multi-user", "network", "shutdown", "sockets", "sysinit", "timers"):
        (folder / f"{name}.target").write_text(f"[Unit]\nDescription={name}\n")
    return root


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("name", LIMITS)
def test_systemd_finds_nothing_wrong(units: Path, name: str) -> None:
    result = analyze(
        f"--root={units}",
        "--recursive-errors=no",
        "--man=no",
        "verify",
        f"/etc/systemd/system/{name}",
    )
    assert result.stderr == ""
    assert result.returncode == 0


@pytest.mark.parametrize("name", LIMITS)
def test_the_sandbox_is_tight(units: Path, name: str) -> None:
    result = analyze(
        f"--root={units}", "--offline=true", f"--threshold={LIMITS[name]}", "security", name
    )
    assert result.returncode == 0, result.stdout
    assert "Overall exposure level" in result.stdout
