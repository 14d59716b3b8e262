"""`nix run .#flash` says what it will do, looks for the board on USB, and asks before it writes."""

import os
import subprocess
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[3] / "nixos/install/flash.sh"
AGX, NANO = "orin-agx-devkit", "orin-nano-super-devkit"


@pytest.fixture
def usb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a board: an empty USB, `nix` and `sudo` that leave word."""
    monkeypatch.setenv("ORIN_FLAKE", "path:/nix/store/any")
    monkeypatch.setenv("ORIN_REVISION", "4d857d6da48c420da39964b6fb7ba23a958abad3")
    monkeypatch.setenv("ORIN_RELEASES", f"{AGX}=36.5.0 {NANO}=36.5.0 {AGX}-jp7=39.2.0")
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
    monkeypatch.setenv("ORIN_USB", str(tmp_path / "usb"))
    return tmp_path


def plug(usb: Path, number: str, port: str = "1-1", vendor: str = "0955") -> None:
    device = usb / "usb" / port
    device.mkdir(parents=True)
    (device / "idVendor").write_text(f"{vendor}\n")
    (device / "idProduct").write_text(f"{number}\n")


def flash(*arguments: str, answer: str = "") -> subprocess.CompletedProcess[str]:
    """Run it as writeShellApplication does."""
    command = ["bash", "-euo", "pipefail", str(PROGRAM), *arguments]
    return subprocess.run(command, input=answer, capture_output=True, text=True, timeout=60)


def refusal(*arguments: str, answer: str = "") -> str:
    done = flash(*arguments, answer=answer)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("flash: "), done.stderr
    return done.stderr


@pytest.mark.parametrize("board", ["xavier-agx-devkit", "orin-agx", "", ".*", "devkit"])
def test_a_board_that_there_is_not(usb: Path, board: str) -> None:
    line = refusal(board)
    assert f"no board '{board}': write one of {AGX}, {NANO}, {AGX}-jp7\n" in line
    assert "no option --dryrun: flash [--dry-run] [--yes] BOARD" in refusal("--dryrun", board)
    assert f"BOARD, which is one of {AGX}, " in flash("--help").stdout


def test_no_board_two_boards_and_another_board(usb: Path) -> None:
    plug(usb, "0001", port="1-9", vendor="1d6b")
    # A Jetson that runs Linux has another number.
    plug(usb, "7020", port="1-8")
    assert "no Jetson in recovery mode is on USB" in refusal(AGX)
    plug(usb, "7523")
    line = refusal(AGX)
    assert "on USB is 0955:7523, an Orin Nano 8 GB, but orin-agx-devkit is 0955:7023" in line
    plug(usb, "7023", port="1-2")
    assert "2 Jetsons in recovery mode are on USB" in refusal(AGX)
    assert not (usb / "word").exists()


@pytest.mark.parametrize("plugged", [False, True])
def test_a_dry_run_says_it_all_and_builds_nothing(usb: Path, plugged: bool) -> None:
    if plugged:
        plug(usb, "7623")
    done = flash("--dry-run", NANO)
    assert done.returncode == 0 and not done.stderr
    said = done.stdout
    assert "Jetson Linux 36.5.0, jetpack-nixos 4d857d6da48c, as flake.lock has it" in said
    assert f"path:/nix/store/any#lib.flashScripts.{NANO}" in said
    assert ("the board is there" in said) == plugged
    assert ("no Jetson in recovery mode" in said) != plugged
    assert not (usb / "word").exists()


@pytest.mark.parametrize("answer", ["y\n", ""])
def test_without_the_name_nothing_is_written(usb: Path, answer: str) -> None:
    plug(usb, "7023")
    assert "stopped: nothing was written" in refusal(AGX, answer=answer)
    assert not (usb / "word").exists()


def test_a_board_that_is_unplugged_while_nix_builds(usb: Path) -> None:
    plug(usb, "7023")
    with (usb / "tools/nix").open("a") as nix:
        nix.write(f"rm -r {usb}/usb/1-1\n")
    assert "no Jetson in recovery mode" in refusal("--yes", AGX)
    (usb / "tools/nix").write_text("#!/bin/sh\nexit 1\n")
    plug(usb, "7023")
    assert f"nix build path:/nix/store/any#lib.flashScripts.{AGX}" in refusal("--yes", AGX)


def test_the_script_of_this_board_is_built_and_run(usb: Path) -> None:
    """Typed by a person; the process becomes the script."""
    plug(usb, "7223")
    assert flash(AGX, answer=f"{AGX}\n").returncode == 0
    nix, ran = (usb / "word").read_text().splitlines()
    assert nix.endswith(
        f"build --no-link --print-out-paths path:/nix/store/any#lib.flashScripts.{AGX}"
    )
    assert ran == "flashed"
