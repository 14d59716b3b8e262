"""Keep a board on a system that works: `upgrade.py began|ended|check`, for nixos-upgrade.service.

`began` and `ended` note the generation that an upgrade has made, if it made one. `check` waits
until every unit of it that matters is up. Where one is not, and the generation is the noted one,
the board goes back to the last generation that passed: at once with the same kernel, else by a
restart. A generation that a person has switched to stays, and the unit fails. Runs as root.
Standard library only.
"""

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

#: Parts that a switch cannot change while the board runs.
BOOTED = ("kernel", "initrd", "kernel-modules")
POLL_SECONDS = 2.0


@dataclass(frozen=True)
class Board:
    """Paths of a board's generations. root: / but in tests."""

    root: Path

    @property
    def profile(self) -> Path:
        """The link to the newest generation."""
        return self.root / "nix/var/nix/profiles/system"

    def newest(self) -> Path:
        """The system that the profile names."""
        return self.profile.resolve()

    def running(self) -> Path:
        """The system that was switched to last, or booted."""
        return (self.root / "run/current-system").resolve()

    def same_kernel(self, system: Path) -> bool:
        """True if the board need not restart for a system."""
        booted = self.root / "run/booted-system"
        return all((booted / name).resolve() == (system / name).resolve() for name in BOOTED)

    def note(self, name: str) -> Path:
        """A note of ours: `good`, the last system that passed; `trying`, what an upgrade made;
        `before`, what was there when it began."""
        return self.root / "var/lib/orin-upgrade" / name

    def noted(self, name: str) -> Path | None:
        """Return the system that a note names, or None if the garbage collector took it."""
        path = self.note(name)
        system = Path(path.read_text().strip()) if path.exists() else None
        return system if system is not None and system.exists() else None

    def write(self, name: str, system: Path) -> None:
        """Write a note."""
        self.note(name).parent.mkdir(parents=True, exist_ok=True)
        self.note(name).write_text(f"{system}\n")


def not_up(units: list[str], seconds: float) -> list[str]:
    """Units that are failed, or not active after `seconds`; ends as soon as all are decided."""
    end = time.monotonic() + seconds
    while True:
        shown = [
            subprocess.run(
                ["systemctl", "show", "--property=ActiveState", "--value", unit],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout.strip()
            for unit in units
        ]
        states = dict(zip(units, shown, strict=True))
        waiting = [unit for unit, state in states.items() if state not in ("active", "failed")]
        if not waiting or time.monotonic() >= end:
            return [f"{unit} is {state}" for unit, state in states.items() if state != "active"]
        time.sleep(POLL_SECONDS)


def go_back(board: Board, good: Path) -> str:
    """Make `good` the newest generation, and what runs; say how."""
    subprocess.run(["nix-env", "--profile", str(board.profile), "--set", str(good)], check=True)
    switch = str(good / "bin/switch-to-configuration")
    if board.same_kernel(good):
        subprocess.run([switch, "switch"], check=True)
        return "went back to it"
    subprocess.run([switch, "boot"], check=True)
    subprocess.run(["shutdown", "-r", "+1", "the upgrade failed"], check=True)
    return "will restart with it in a minute"


def check(board: Board, units: list[str], seconds: float) -> int:
    """Check what runs, note it or go back; the exit code."""
    system = board.running()
    if system != board.newest():
        print(f"{board.newest()} waits for a restart; nothing to check yet")
        return 0
    wrong = not_up(units, seconds)
    if not wrong:
        board.write("good", system)
        print(f"{system} works: {len(units)} units are up")
        return 0
    print(f"{system} does not work: {'; '.join(wrong)}", file=sys.stderr)
    good = board.noted("good")
    if board.noted("trying") != system:
        print("no upgrade made it: it stays", file=sys.stderr)
    elif good is None or good == system:
        print("there is no system that has passed before: it stays", file=sys.stderr)
    else:
        board.note("trying").unlink()
        print(f"the last that passed is {good}: {go_back(board, good)}", file=sys.stderr)
    return 1


def main(arguments: list[str] | None = None) -> int:
    """Run `began`, `ended` or `check`; 1 where the system does not work."""
    parser = argparse.ArgumentParser(prog="upgrade", description="Keep a board on what works.")
    parser.add_argument("action", choices=["began", "ended", "check"])
    parser.add_argument("units", nargs="*", help="check: units that have to be up")
    parser.add_argument("--seconds", type=float, default=900, help="check: how long to wait")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where the board lies")
    options = parser.parse_intermixed_args(arguments)
    board = Board(options.root)
    if options.action == "began":
        board.write("before", board.newest())
        return 0
    if options.action == "ended":
        if board.newest() != board.noted("before"):
            board.write("trying", board.newest())
        return 0
    return check(board, options.units, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
