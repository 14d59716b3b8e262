"""Set the board's power mode by name, and read it back from the board itself.

nvpmodel.conf says for each mode which files hold which values. `set` hands the number of a mode to
nvpmodel; `check` compares the files, because nvpmodel records a mode as chosen even where the board
did not follow (a change of the TPC mask needs a GPU that nobody has opened, or a reboot).

Where a program has had the GPU open, nvpmodel asks whether to reboot now. `set` says no and leaves
word in run/ that the mode waits for the next boot, when it is set before anything opens the GPU.
With `--reboot` the board restarts in a minute, once: one that asks again then is an error.

Standard library only: this runs at boot, before anything else of ours.
"""

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

# `< PARAM TYPE=FILE NAME=CPU_ONLINE >`, `< POWER_MODEL ID=0 NAME=MAXN >`, `< PM_CONFIG DEFAULT=2 >`
SECTION = re.compile(r"<\s*(?P<kind>\w+)\s+(?P<attributes>[^>]*?)\s*>")
# Files that nvpmodel only switches for a moment, to wake the GPU while it writes the rest.
MOMENTARY = re.compile(r"GPU_POWER_CONTROL_\w+")
# The same argument as a newer kernel spells its path (Jetson Linux r36 on).
NEXT_KERNEL = "_KNEXT"
# nvpmodel's question, as boards with r35 and r36 print it: "NVPM WARN: Reboot required for changing
# to this power mode: 0", "DO YOU WANT TO REBOOT NOW? enter YES/yes to confirm:".
QUESTION = "Reboot required"
# The mode that waits for the next boot, whose run/ is empty; and the one of the last restart.
WAITING = "run/orin-power-mode"
RESTARTED = "var/lib/nvpmodel/orin-restarted-for"
# nvpmodel takes -1 as INT_MAX: the highest frequency of the table.
UNLIMITED = -1


class ModeError(Exception):
    """One line for the journal: what was found, and what would be right. Exit code 2."""


@dataclass(frozen=True)
class Parameter:
    """A PARAM section: its kind (FILE or CLOCK) and the path behind each argument."""

    kind: str
    paths: dict[str, str] = field(default_factory=dict)

    def path(self, argument: str, root: Path) -> Path | None:
        """The file of `argument` on this kernel, or None where there is none."""
        for name in (argument + NEXT_KERNEL, argument):
            if name in self.paths and (path := root / self.paths[name].lstrip("/")).exists():
                return path
        return None


@dataclass(frozen=True)
class Mode:
    """A POWER_MODEL section: (parameter, argument, value) in the file's order."""

    number: int
    name: str
    settings: list[tuple[str, str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Config:
    """An nvpmodel.conf."""

    parameters: dict[str, Parameter]
    modes: dict[str, Mode]

    def mode(self, name: str, where: Path) -> Mode:
        """The mode called `name`; raises ModeError that says which there are."""
        if name not in self.modes:
            known = ", ".join(self.modes) or "none"
            raise ModeError(f"{where} has no power mode {name!r}: it has {known}")
        return self.modes[name]


def read_config(path: Path) -> Config:
    """Read nvpmodel.conf; raises ModeError for a file that is missing or no such file."""
    config = Config({}, {})
    parameter, mode = None, None
    for raw in read_text(path).splitlines():
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if section := SECTION.fullmatch(line):
            pairs = dict(pair.split("=", 1) for pair in section["attributes"].split())
            parameter = mode = None
            if section["kind"] == "PARAM":
                parameter = config.parameters[pairs["NAME"]] = Parameter(pairs["TYPE"])
            elif section["kind"] == "POWER_MODEL":
                mode = config.modes[pairs["NAME"]] = Mode(int(pairs["ID"]), pairs["NAME"])
            continue
        words = line.split()
        if parameter is not None and len(words) == 2:
            parameter.paths[words[0]] = words[1]
        elif mode is not None and len(words) == 3:
            mode.settings.append((words[0], words[1], words[2]))
    if not config.modes:
        raise ModeError(f"{path}: no POWER_MODEL section: this is no nvpmodel.conf")
    return config


def read_text(path: Path) -> str:
    """The text of a file; raises ModeError that names it."""
    try:
        return path.read_text()
    except OSError as error:
        raise ModeError(f"{path}: {error.strerror}: is this a Jetson?") from error


def read_status(root: Path) -> int | None:
    """The mode that nvpmodel recorded (`pmode:0000`), or None where it never ran."""
    path = root / "var/lib/nvpmodel/status"
    if not path.exists():
        return None
    found = re.search(r"pmode:(\d+)", read_text(path))
    return int(found[1]) if found else None


def deviations(config: Config, mode: Mode, root: Path, pinned: bool) -> list[str]:
    """Differences of the board from `mode`, one phrase each; with `pinned`, clocks that move."""
    found: list[str] = []
    names = {other.number: other.name for other in config.modes.values()}
    recorded = read_status(root)
    if recorded != mode.number:
        word = "none" if recorded is None else names.get(recorded, str(recorded))
        found.append(f"nvpmodel's recorded mode is {word}")
    for name, argument, value in mode.settings:
        parameter = config.parameters.get(name)
        if parameter is None or MOMENTARY.fullmatch(name):
            continue
        path = parameter.path(argument, root)
        if path is None:
            continue  # this board or kernel has no such knob
        if parameter.kind == "FILE":
            if not same(got := read_text(path).strip(), value):
                found.append(f"{name} {argument} is {got}, {mode.name} wants {value}")
        elif argument == "MAX_FREQ":
            found += clock_deviation(parameter, name, mode, int(value), root)
    if pinned:
        for name, parameter in config.parameters.items():
            low, high = parameter.path("MIN_FREQ", root), parameter.path("MAX_FREQ", root)
            if low and high and read_text(low).strip() != read_text(high).strip():
                found.append(
                    f"{name} may run from {read_text(low).strip()} to {read_text(high).strip()}"
                )
    return found


def same(got: str, wanted: str) -> bool:
    """True if two values are one, as text or as numbers (`0xf0` and `240`)."""
    try:
        return int(got, 0) == int(wanted, 0)
    except ValueError:
        return got == wanted


def clock_deviation(
    parameter: Parameter, name: str, mode: Mode, value: int, root: Path
) -> list[str]:
    """Compare a clock's ceiling with the highest step of its table that `mode` allows."""
    table, ceiling = parameter.path("FREQ_TABLE", root), parameter.path("MAX_FREQ", root)
    if table is None or ceiling is None:
        return []  # a cap without a table (EMC, DLA) is written in units of its own
    steps = [int(step) for step in read_text(table).split()]
    allowed = [step for step in steps if value == UNLIMITED or step <= value]
    if not allowed:
        return []
    got = int(read_text(ceiling))
    if got == max(allowed):
        return []
    return [f"{name} may run up to {got}, {mode.name} wants {max(allowed)}"]


def in_memory(folder: Path) -> bool:
    """True if a restart empties a folder."""
    command = ["stat", "--file-system", "--format=%T", str(folder)]
    kind = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    return kind in ("tmpfs", "ramfs")


def set_mode(mode: Mode, root: Path, nvpmodel: str, shutdown: str | None) -> None:
    """Run nvpmodel with the number of the mode; raises ModeError where a restart did not help.

    shutdown: the program that restarts the board where nvpmodel asks for it; None: nobody does.
    """
    command = [nvpmodel, "-f", str(root / "etc/nvpmodel.conf"), "-m", str(mode.number)]
    done = subprocess.run(
        command, input="NO\n", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout, end="", flush=True)
    restarted = root / RESTARTED
    if QUESTION not in done.stdout:
        restarted.unlink(missing_ok=True)
        sys.exit(done.returncode)
    waiting = root / WAITING
    waiting.parent.mkdir(parents=True, exist_ok=True)
    waiting.write_text(mode.name + "\n")
    if shutdown is None:
        print(f"power-mode: {mode.name} waits for the next boot: reboot the board")
        return
    if restarted.exists() and restarted.read_text().strip() == mode.name:
        raise ModeError(
            f"the board was restarted for {mode.name} and wants it again: something opens the GPU "
            "before nvpmodel.service (systemd-analyze critical-chain nvpmodel.service)"
        )
    restarted.parent.mkdir(parents=True, exist_ok=True)
    if in_memory(restarted.parent):
        raise ModeError(
            f"{restarted.parent} is in memory and forgets that the board was restarted for "
            f"{mode.name}: it would restart for ever; keep this folder on a disk"
        )
    restarted.write_text(mode.name + "\n")
    # A minute, so that a switch that is under way ends.
    subprocess.run([shutdown, "-r", "+1", f"power mode {mode.name}"], check=True)
    print(f"power-mode: {mode.name} waits for a reboot, in a minute")


def check(mode: Mode, config: Config, root: Path, pinned: bool) -> None:
    """Say that the board is in the mode; raises ModeError with all that is not."""
    wrong = deviations(config, mode, root, pinned)
    asked = mode.name + (" with pinned clocks" if pinned else "")
    waiting = root / WAITING
    if wrong and waiting.exists() and waiting.read_text().strip() == mode.name:
        print(f"the board is not in {asked} yet, reboot it: {'; '.join(wrong)}")
    elif wrong:
        raise ModeError(
            f"the board is not in {asked}: {'; '.join(wrong)}. Other TPCs need a reboot"
        )
    else:
        print(f"the board is in {asked}")


def main(arguments: list[str] | None = None) -> None:
    """Run `set MODE` or `check MODE`; exit code 2 with one line where it cannot be."""
    parser = argparse.ArgumentParser(prog="power-mode", description="Jetson power mode by name.")
    parser.add_argument("action", choices=["set", "check"])
    parser.add_argument("mode", help="a NAME of nvpmodel.conf, as MAXN")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where sys, etc and var lie")
    parser.add_argument("--pinned", action="store_true", help="check: GPU and CPU clocks fixed too")
    parser.add_argument("--nvpmodel", default="nvpmodel", help="set: what writes the mode")
    parser.add_argument("--reboot", metavar="SHUTDOWN", help="set: what restarts the board")
    options = parser.parse_args(arguments)
    path = options.root / "etc/nvpmodel.conf"
    try:
        config = read_config(path)
        mode = config.mode(options.mode, path)
        if options.action == "set":
            set_mode(mode, options.root, options.nvpmodel, options.reboot)
        else:
            check(mode, config, options.root, options.pinned)
    except ModeError as error:
        print(f"power-mode: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
