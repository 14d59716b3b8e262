"""Set the board's power mode by name, and read it back from the board itself.

nvpmodel.conf says for each mode which files hold which values. `set` hands the number of a mode to
nvpmodel; `check` compares the files, because nvpmodel records a mode as chosen even where the board
did not follow (a change of the TPC mask needs a GPU that nobody has opened, or a reboot).

Standard library only: this runs at boot, before anything else of ours.
"""

import argparse
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

# `< PARAM TYPE=FILE NAME=CPU_ONLINE >`, `< POWER_MODEL ID=0 NAME=MAXN >`, `< PM_CONFIG DEFAULT=2 >`
SECTION = re.compile(r"<\s*(?P<kind>\w+)\s+(?P<attributes>[^>]*?)\s*>")
# What nvpmodel only switches for a moment, to wake the GPU while it writes the rest.
MOMENTARY = re.compile(r"GPU_POWER_CONTROL_\w+")
# The same argument as a newer kernel spells its path (Jetson Linux r36 on).
NEXT_KERNEL = "_KNEXT"
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
    """What on the board is not as `mode` says, one phrase each; with `pinned`, clocks that move."""
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
    """Whether two values are one, as text or as numbers (`0xf0` and `240`)."""
    try:
        return int(got, 0) == int(wanted, 0)
    except ValueError:
        return got == wanted


def clock_deviation(
    parameter: Parameter, name: str, mode: Mode, value: int, root: Path
) -> list[str]:
    """Whether a clock's ceiling is the highest step of its table that `mode` allows."""
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


def set_mode(config: Config, name: str, path: Path, nvpmodel: str) -> None:
    """Become nvpmodel with the number of the mode."""
    number = config.mode(name, path).number
    os.execv(nvpmodel, [nvpmodel, "-f", str(path), "-m", str(number)])


def check(config: Config, name: str, path: Path, root: Path, pinned: bool) -> None:
    """Say that the board is in the mode; raises ModeError with all that is not."""
    wrong = deviations(config, config.mode(name, path), root, pinned)
    asked = name + (" with pinned clocks" if pinned else "")
    if wrong:
        raise ModeError(
            f"the board is not in {asked}: {'; '.join(wrong)}. Other TPCs need a reboot"
        )
    print(f"the board is in {asked}")


def main(arguments: list[str] | None = None) -> None:
    """Run `set MODE` or `check MODE`; exit code 2 with one line where it cannot be."""
    parser = argparse.ArgumentParser(prog="power-mode", description="Jetson power mode by name.")
    parser.add_argument("action", choices=["set", "check"])
    parser.add_argument("mode", help="a NAME of nvpmodel.conf, as MAXN")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where sys, etc and var lie")
    parser.add_argument("--pinned", action="store_true", help="check: GPU and CPU clocks fixed too")
    parser.add_argument("--nvpmodel", help="set: the program that writes the mode")
    options = parser.parse_args(arguments)
    path = options.root / "etc/nvpmodel.conf"
    try:
        config = read_config(path)
        if options.action == "set":
            set_mode(config, options.mode, path, options.nvpmodel or "nvpmodel")
        else:
            check(config, options.mode, path, options.root, options.pinned)
    except ModeError as error:
        print(f"power-mode: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
