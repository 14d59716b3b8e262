"""Flash an Orin's firmware as flake.lock has it: `flash [--dry-run] [--yes] BOARD`.

Says what it will do, looks for the board in recovery mode on USB, asks once, builds the one script
of jetpack-nixos that the board needs, and becomes it as root. `nix run .#flash` names the firmware
in ORIN_FIRMWARE, as JSON: {"flake", "releases", "revision"}. Standard library only.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

NVIDIA = "0955"
# A module's USB product name in recovery mode (Jetson Linux Developer Guide r36, "Quick
# Start": To Determine Whether the Developer Kit Is in Force Recovery Mode).
MODULES = {
    "7023": ("AGX Orin 64 GB, 32 GB devkit or Industrial", "orin-agx"),
    "7223": ("AGX Orin 32 GB", "orin-agx"),
    "7323": ("Orin NX 16 GB", "orin-nx"),
    "7423": ("Orin NX 8 GB", "orin-nx"),
    "7523": ("Orin Nano 8 GB", "orin-nano"),
    "7623": ("Orin Nano 4 GB", "orin-nano"),
}
USB = Path("/sys/bus/usb/devices")
RECOVERY = (
    "connect USB-C (AGX: the port beside the 40 pins), hold the recovery button, press reset "
    "(NX, Nano: bridge FC REC and GND, then power on), and try again"
)


class FlashError(Exception):
    """One line: what was found, and what would be right. Exit code 2."""


@dataclass(frozen=True)
class Firmware:
    """Versions in flake.lock: the flake, NVIDIA's releases by board, jetpack-nixos' commit."""

    flake: str
    releases: dict[str, str]
    revision: str

    def attribute(self, board: str) -> str:
        """Attribute that Nix builds for a board; raises FlashError with the known boards."""
        if board not in self.releases:
            known = ", ".join(self.releases)
            raise FlashError(f"there is no board {board!r}: write one of {known}")
        return f"{self.flake}#lib.flashScripts.{board}"


def in_recovery(usb: Path) -> list[str]:
    """USB product numbers of the modules in recovery mode, one each."""
    devices = [path.parent for path in sorted(usb.glob("*/idVendor"))]
    ours = [path for path in devices if (path / "idVendor").read_text().strip() == NVIDIA]
    numbers = [(path / "idProduct").read_text().strip() for path in ours]
    return [number for number in numbers if number in MODULES]


def expected(board: str) -> list[str]:
    """The USB product numbers that a board may have."""
    return [number for number, (_, module) in MODULES.items() if board.startswith(module)]


def wrong_device(board: str, usb: Path) -> str | None:
    """Return the reason why the board cannot be flashed now, in one line, or None."""
    found, wanted = in_recovery(usb), expected(board)
    if not found:
        return f"no Jetson in recovery mode is on USB: {RECOVERY}"
    if len(found) > 1:
        named = ", ".join(f"{NVIDIA}:{number}" for number in found)
        return f"{len(found)} Jetsons in recovery mode are on USB ({named}): leave one connected"
    if found[0] not in wanted:
        module, _ = MODULES[found[0]]
        right = " or ".join(f"{NVIDIA}:{number}" for number in wanted)
        return f"on USB is {NVIDIA}:{found[0]}, an {module}, but {board} is {right}"
    return None


def plan(firmware: Firmware, board: str) -> str:
    """Steps to be done, for a person."""
    return (
        f"board     {board}: {' or '.join(f'{NVIDIA}:{n}' for n in expected(board))} on USB\n"
        f"firmware  Jetson Linux {firmware.releases[board]}, "
        f"jetpack-nixos {firmware.revision[:12]},"
        " as flake.lock has it\n"
        "writes    the module's QSPI flash: boot firmware, UEFI, UEFI's variables\n"
        "keeps     NVMe, eMMC, SD card and USB disks\n"
        f"builds    {firmware.attribute(board)}\n"
        "takes     5 to 15 minutes; do not pull the cable\n"
    )


def build(attribute: str) -> str:
    """The program that flashes; raises FlashError where Nix does not build it."""
    command = ["nix", *("--extra-experimental-features", "nix-command flakes"), "build"]
    command += ["--no-link", "--print-out-paths", attribute]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise FlashError(f"Nix did not build the firmware: {shlex.join(command)}")
    (program,) = (Path(done.stdout.strip()) / "bin").iterdir()
    return str(program)


def confirmed(board: str) -> bool:
    """Ask for the board's name; everything else is no."""
    try:
        return input(f"Write {board} to go on, anything else to stop: ").strip() == board
    except EOFError:
        print()
        return False


def flash(firmware: Firmware, options: argparse.Namespace) -> None:
    """Say it, check it, ask, build and become the script; raises FlashError."""
    board = options.board
    firmware.attribute(board)
    print(plan(firmware, board), end="", flush=True)
    wrong = wrong_device(board, USB)
    if options.dry_run:
        print(f"usb       {wrong or 'the board is there, in recovery mode'}")
        print("dry run: nothing was built or written")
        return
    if wrong is not None:
        raise FlashError(wrong)
    if not options.yes and not confirmed(board):
        raise FlashError("stopped: nothing was written")
    program = build(firmware.attribute(board))
    # A board that was unplugged while Nix built.
    if (wrong := wrong_device(board, USB)) is not None:
        raise FlashError(wrong)
    command = [program] if os.geteuid() == 0 else ["sudo", program]
    os.execvp(command[0], command)


def main(arguments: list[str] | None = None) -> None:
    """Run `flash BOARD`; exit code 2 with one line where it cannot be."""
    firmware = Firmware(**json.loads(os.environ["ORIN_FIRMWARE"]))
    parser = argparse.ArgumentParser(
        prog="flash", description="Flash an Orin's firmware as flake.lock has it, over USB."
    )
    parser.add_argument("board", help=f"one of {', '.join(firmware.releases)}")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and stop")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    options = parser.parse_args(arguments)
    try:
        flash(firmware, options)
    except FlashError as error:
        print(f"flash: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
