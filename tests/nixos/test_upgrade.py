"""An upgrade that does not work is undone; what a person switched to stays."""

import importlib
import os
from pathlib import Path

import pytest

upgrade = importlib.import_module("upgrade")
UNITS = ("orin-gpu.service", "orin-performance-readback.service")


class Generations:
    """A board of files: systems with a kernel each, and programs that leave word."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.word = root / "word"
        tools = root / "tools"
        tools.mkdir()
        scripts = {
            "systemctl": f'cat "{root}/state/$4"',
            "nix-env": f'echo "nix-env $*" >>{self.word}; ln -sfn "$4" "$2"',
            "shutdown": f'echo "shutdown $*" >>{self.word}',
        }
        for name, text in scripts.items():
            (tools / name).write_text(f"#!/bin/sh\n{text}\n")
            (tools / name).chmod(0o755)
        (root / "state").mkdir()
        (root / "nix/var/nix/profiles").mkdir(parents=True)
        (root / "run").mkdir()
        self.up()

    def system(self, name: str, kernel: str) -> Path:
        path = self.root / "store" / name
        (path / "bin").mkdir(parents=True)
        switch = path / "bin/switch-to-configuration"
        switch.write_text(f'#!/bin/sh\necho "{name} $1" >>{self.word}\n')
        switch.chmod(0o755)
        for link in ("kernel", "initrd", "kernel-modules"):
            (path / link).symlink_to(f"/boot/{kernel}-{link}")
        return path

    def link(self, name: str, system: Path) -> None:
        path = self.root / name
        path.unlink(missing_ok=True)
        path.symlink_to(system)

    def switched(self, system: Path, booted: Path | None = None) -> None:
        self.link("nix/var/nix/profiles/system", system)
        self.link("run/current-system", system)
        if booted is not None:
            self.link("run/booted-system", booted)

    def up(self, **states: str) -> None:
        for unit in UNITS:
            (self.root / "state" / unit).write_text(states.get(unit.split(".")[0], "active"))

    def down(self, unit: str, state: str = "failed") -> None:
        (self.root / "state" / unit).write_text(state)

    def run(self, *arguments: str) -> int:
        units = UNITS if arguments[0] == "check" else ()
        return int(upgrade.main([*arguments, *units, "--root", str(self.root), "--seconds", "0"]))

    def said(self) -> list[str]:
        return self.word.read_text().splitlines() if self.word.exists() else []


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generations:
    monkeypatch.setenv("PATH", f"{tmp_path}/tools:{os.environ['PATH']}")
    return Generations(tmp_path)


def test_an_upgrade_that_fails_goes_back_at_once(
    board: Generations, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = board.system("old", "6.1"), board.system("new", "6.1")
    board.switched(old, booted=old)
    assert board.run("check") == 0
    assert board.run("began") == 0
    board.switched(new)
    assert board.run("ended") == 0
    board.down(UNITS[1])
    assert board.run("check") == 1
    assert f"{UNITS[1]} is failed" in capsys.readouterr().err
    assert board.said() == [
        f"nix-env --profile {board.root}/nix/var/nix/profiles/system --set {old}",
        "old switch",
    ]
    # And once: the next check is of what the board went back to.
    board.switched(old)
    board.up()
    assert board.run("check") == 0
    assert len(board.said()) == 2


def test_another_kernel_is_checked_after_the_restart_and_undone_by_another(
    board: Generations, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = board.system("old", "6.1"), board.system("new", "6.6")
    board.switched(old, booted=old)
    assert board.run("check") == 0
    assert board.run("began") == 0
    board.link("nix/var/nix/profiles/system", new)
    assert board.run("ended") == 0
    assert board.run("check") == 0
    assert "waits for a restart" in capsys.readouterr().out
    board.switched(new, booted=new)
    board.down(UNITS[0], "activating")
    assert board.run("check") == 1
    assert [line.split(" /")[0] for line in board.said()][1:] == [
        "old boot",
        "shutdown -r +1 the upgrade failed",
    ]


def test_what_a_person_made_stays_and_so_does_the_only_system(
    board: Generations, capsys: pytest.CaptureFixture[str]
) -> None:
    old, mine = board.system("old", "6.1"), board.system("mine", "6.1")
    board.switched(old, booted=old)
    board.down(UNITS[0])
    assert board.run("ended") == 0
    assert board.run("check") == 1
    assert "no system that has passed before" in capsys.readouterr().err
    board.up()
    assert board.run("check") == 0
    board.switched(mine)
    board.down(UNITS[0])
    # An upgrade that builds nothing makes no generation its own.
    assert board.run("began") == board.run("ended") == 0
    assert board.run("check") == 1
    assert "no upgrade made it: it stays" in capsys.readouterr().err
    assert board.said() == []
