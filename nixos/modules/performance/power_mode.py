"""Set the board's power mode by name, and read it back from the board itself.

nvpmodel.conf says for each mode which files hold which values. `set` hands the number of a mode to
nvpmodel; `check` compares the files, because nvpmodel records a mode as chosen even where the board
did not follow (a change of the TPC mask needs a GPU that nobody has opened, or a reboot).
Standard library only: this runs at boot, before anything else of ours.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# `< PARAM TYPE=FILE NAME=CPU_ONLINE >`, `< POWER_MODEL ID=0 NAME=MAXN >`, `< PM_CONFIG DEFAULT=2 >`
SECTION = re.compile(r"<\s*(\w+)\s+([^>]*?)\s*>")
# The same argument as a newer kernel spells its path (Jetson Linux r36 on).
NEXT_KERNEL = "_KNEXT"
# nvpmodel's question, as boards with r35 and r36 print it: "NVPM WARN: Reboot required for changing
# to this power mode: 0", "DO YOU WANT TO REBOOT NOW? enter YES/yes to confirm:".
QUESTION = "Reboot required"
# `set` says no, and leaves word of the mode that waits for the next boot, whose run/ is empty.
WAITING = "run/orin-power-mode"


class ModeError(Exception):
    """One line for the journal: what was found, and what would be right. Exit code 2."""


class ConfigSection(NamedTuple):
    """A PARAM, with rows of argument and path, or a POWER_MODEL: parameter, argument, value."""

    said: dict[str, str]
    rows: list[list[str]]

    def argument_path(self, argument: str, root: Path) -> Path | None:
        """The file of `argument` on this kernel, or None where there is none."""
        paths = dict(row for row in self.rows if len(row) == 2)
        for name in (argument + NEXT_KERNEL, argument):
            if name in paths and (path := root / paths[name].lstrip("/")).exists():
                return path
        return None


#: An nvpmodel.conf: its sections by kind and name.
Config = dict[str, dict[str, ConfigSection]]


def read_config(path: Path) -> Config:
    """Read nvpmodel.conf; raises ModeError for a file that is missing or no such file."""
    config: Config = {"PARAM": {}, "POWER_MODEL": {}}
    for block in re.split(r"(?m)^(?=[ \t]*<)", read_text(path)):
        head, *lines = [line for line in block.splitlines() if not line.startswith("#")] or [""]
        if (found := SECTION.fullmatch(head.strip())) and found[1] in config:
            said = dict(pair.split("=", 1) for pair in found[2].split())
            config[found[1]][said["NAME"]] = ConfigSection(said, [line.split() for line in lines])
    if not config["POWER_MODEL"]:
        raise ModeError(f"{path}: no POWER_MODEL section: this is no nvpmodel.conf")
    return config


def read_text(path: Path) -> str:
    """The text of a file; raises ModeError that names it."""
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ModeError(f"{path}: {error.strerror}: is this a Jetson?") from error


def deviations(config: Config, mode: str, root: Path, pinned: bool) -> Iterator[str]:
    """Differences of the board from a mode, one phrase each; with `pinned`, clocks that move."""
    status = root / "var/lib/nvpmodel/status"
    found = re.search(r"pmode:(\d+)", read_text(status)) if status.exists() else None
    names = {int(each.said["ID"]): name for name, each in config["POWER_MODEL"].items()}
    if (recorded := names.get(int(found[1]), found[1]) if found else "none") != mode:
        yield f"nvpmodel's recorded mode is {recorded}"
    for name, argument, value in (row for row in config["POWER_MODEL"][mode].rows if len(row) == 3):
        parameter = config["PARAM"].get(name)
        # It only switches these for a moment, to wake the GPU while it writes the rest.
        if parameter is None or name.startswith("GPU_POWER_CONTROL_"):
            continue
        path = parameter.argument_path(argument, root)
        table = parameter.argument_path("FREQ_TABLE", root)
        if path is None:
            continue  # this board or kernel has no such knob
        if parameter.said["TYPE"] == "FILE":
            if number_or_text(got := read_text(path)) != number_or_text(value):
                yield f"{name} {argument} is {got}, {mode} wants {value}"
        # A cap without a table (EMC, DLA) is written in units of its own.
        elif argument == "MAX_FREQ" and table is not None:
            # -1 is the highest of the table, else the highest that is no higher.
            steps = [int(step) for step in read_text(table).split()]
            allowed = [step for step in steps if int(value) == -1 or step <= int(value)]
            if allowed and (got := read_text(path)) != str(max(allowed)):
                yield f"{name} may run up to {got}, {mode} wants {max(allowed)}"
    for name, parameter in config["PARAM"].items() if pinned else ():
        ends = [parameter.argument_path(argument, root) for argument in ("MIN_FREQ", "MAX_FREQ")]
        low, high = (path and read_text(path) for path in ends)
        if low and high and low != high:
            yield f"{name} may run from {low} to {high}"


def number_or_text(text: str) -> int | str:
    """A value as a number (`0xf0` is `240`), or as its text."""
    try:
        return int(text, 0)
    except ValueError:
        return text


def set_mode(config: Config, mode: str, options: argparse.Namespace) -> None:
    """Run nvpmodel with the number of the mode."""
    wanted = config["POWER_MODEL"][mode].said["ID"]
    command = [options.nvpmodel, "-f", str(options.root / "etc/nvpmodel.conf"), "-m", wanted]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, input="NO\n", text=True, **pipes)
    print(done.stdout, end="", flush=True)
    if QUESTION not in done.stdout:
        sys.exit(done.returncode)
    (waiting := options.root / WAITING).parent.mkdir(parents=True, exist_ok=True)
    waiting.write_text(mode)
    print(f"power-mode: {mode} waits for the next boot: reboot the board")


def require_mode(config: Config, mode: str, options: argparse.Namespace) -> None:
    """Say that the board is in the mode; raises ModeError with all that is not."""
    wrong = "; ".join(deviations(config, mode, options.root, options.pinned))
    asked = mode + (" with pinned clocks" if options.pinned else "")
    waiting = options.root / WAITING
    if not wrong:
        print(f"the board is in {asked}")
    elif waiting.exists() and read_text(waiting) == mode:
        print(f"the board is not in {asked} yet, reboot it: {wrong}")
    else:
        raise ModeError(f"the board is not in {asked}: {wrong}. Other TPCs need a reboot")


def main(arguments: list[str] | None = None) -> None:
    """Run `set MODE` or `check MODE`; exit code 2 with one line where it cannot be."""
    parser = argparse.ArgumentParser(prog="power-mode", description="Jetson power mode by name.")
    parser.add_argument("action", choices=["set", "check"])
    parser.add_argument("mode", help="a NAME of nvpmodel.conf, as MAXN")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where sys, etc and var lie")
    parser.add_argument("--pinned", action="store_true", help="check: GPU and CPU clocks fixed too")
    parser.add_argument("--nvpmodel", default="nvpmodel", help="set: what writes the mode")
    options = parser.parse_args(arguments)
    try:
        config = read_config(path := options.root / "etc/nvpmodel.conf")
        if options.mode not in config["POWER_MODEL"]:
            known = ", ".join(config["POWER_MODEL"])
            raise ModeError(f"{path} has no power mode {options.mode!r}: it has {known}")
        (set_mode if options.action == "set" else require_mode)(config, options.mode, options)
    except ModeError as error:
        parser.exit(2, f"power-mode: {error}\n")


if __name__ == "__main__":
    main()
