"""`nix run .#flash` says what it will do, looks for the board on USB, and asks before it writes."""

import importlib
import json
import os
import subprocess
from pathlib import Path

import pytest

flash = importlib.import_module("flash")
AGX, NANO = "orin-agx-devkit", "orin-nano-super-devkit"


@pytest.fixture
def usb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a board: an empty USB, `nix` and `sudo` that leave word."""
    firmware = {
        "flake": "path:/nix/store/any",
        "revision": "4d857d6da48c420da39964b6fb7ba23a958abad3",
        "releases": {AGX: "36.5.0", NANO: "36.5.0", f"{AGX}-jp7": "39.2.0"},
    }
    monkeypatch.setenv("ORIN_FIRMWARE", json.dumps(firmware))
    built = tmp_path / "built" / "bin"
    built.mkdir(parents=True)
    program = built / "initrd-flash"
    program.write_text(f"#!/bin/sh\necho flashed >>{tmp_path}/word\n")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nix").write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/word\necho {built.parent}\n')
    (tools / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
    for each in (program, *tools.iterdir()):
        each.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr(flash, "USB", tmp_path / "usb")
    return tmp_path


def plug(usb: Path, number: str, port: str = "1-1", vendor: str = "0955") -> None:
    device = usb / "usb" / port
    device.mkdir(parents=True)
    (device / "idVendor").write_text(f"{vendor}\n")
    (device / "idProduct").write_text(f"{number}\n")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        flash.main(list(arguments))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("flash: "), error
    return error


def test_a_board_that_there_is_not(usb: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "xavier-agx-devkit")
    assert f"no board 'xavier-agx-devkit': write one of {AGX}, {NANO}" in line


def test_no_board_two_boards_and_another_board(
    usb: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plug(usb, "0001", port="1-9", vendor="1d6b")
    # A Jetson that runs Linux has another number.
    plug(usb, "7020", port="1-8")
    assert "no Jetson in recovery mode is on USB" in refusal(capsys, AGX)
    plug(usb, "7523")
    line = refusal(capsys, AGX)
    assert "on USB is 0955:7523, an Orin Nano 8 GB, but orin-agx-devkit is 0955:7023" in line
    plug(usb, "7023", port="1-2")
    assert "2 Jetsons in recovery mode are on USB" in refusal(capsys, AGX)
    assert not (usb / "word").exists()


@pytest.mark.parametrize("plugged", [False, True])
def test_a_dry_run_says_it_all_and_builds_nothing(
    usb: Path, capsys: pytest.CaptureFixture[str], plugged: bool
) -> None:
    if plugged:
        plug(usb, "7623")
    flash.main(["--dry-run", NANO])
    said = capsys.readouterr().out
    assert "Jetson Linux 36.5.0, jetpack-nixos 4d857d6da48c, as flake.lock has it" in said
    assert f"path:/nix/store/any#lib.flashScripts.{NANO}" in said
    assert ("the board is there" in said) == plugged
    assert ("no Jetson in recovery mode" in said) != plugged
    assert not (usb / "word").exists()


def test_without_the_name_nothing_is_written(
    usb: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plug(usb, "7023")
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert "stopped: nothing was written" in refusal(capsys, AGX)
    assert not (usb / "word").exists()


def test_the_script_of_this_board_is_built_and_run(usb: Path) -> None:
    """In a process of its own, which becomes the script."""
    plug(usb, "7223")
    start = (
        f"import sys; sys.path.insert(0, {str(Path(str(flash.__file__)).parent)!r}); import flash\n"
        f"from pathlib import Path; flash.USB = Path({str(usb / 'usb')!r}); flash.main({[AGX]!r})"
    )
    subprocess.run(["python3", "-c", start], input=AGX, text=True, check=True, timeout=60)
    nix, ran = (usb / "word").read_text().splitlines()
    assert nix.endswith(
        f"build --no-link --print-out-paths path:/nix/store/any#lib.flashScripts.{AGX}"
    )
    assert ran == "flashed"
