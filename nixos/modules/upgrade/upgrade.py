"""Keep a board on a system that works: `upgrade.py began|ended|arm|check|deadline`. Runs as root.

A system is good once it has passed the check after a boot of its own. Until then the boot menu
counts its tries: systemd-boot takes `orin-next+3.conf` while tries are left, and `orin-good.conf`,
the last good system, after that (https://systemd.io/AUTOMATIC_BOOT_ASSESSMENT). Standard library.
"""

import argparse
import contextlib
import fcntl
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from reachable import reachability_problems

#: Parts that a switch cannot change while the board runs.
AT_BOOT = ("kernel", "initrd", "kernel-modules")
POLL_SECONDS = 2.0
#: Between two looks that find the same: what dies soon after its start has not come up.
STEADY_SECONDS = 15.0
TRIES = 3
#: Exit code of a check that has found faults, unlike one that could not go on.
DECIDED = 3
#: Links to systems: the newest, the one switched to last or booted, the one that the board booted.
NEWEST = Path("nix/var/nix/profiles/system")
RUNNING, BOOTED = Path("run/current-system"), Path("run/booted-system")
#: The last good system: the garbage collector keeps it, and the boot loader's installation has an
#: entry of it, however many generations came after it.
GOOD = Path("nix/var/nix/profiles/system-profiles/orin-good")
DEFAULT = b"default orin-*"
KEPT = 8


@dataclass(frozen=True)
class BoardSystems:
    """Paths of a board's generations. root: / but in tests."""

    root: Path
    esp: Path

    def system_at(self, link: Path) -> Path:
        """The system that a link names."""
        return (self.root / link).resolve()

    def system_list_path(self, name: str) -> Path:
        """A list of ours: `good`, systems that passed, the last one last; `bad`, those that did
        not come up. And until the next boot: `before`, what was there when an upgrade began, while
        it runs; `trying`, what upgrades made. Those need no disk, which may be full by then."""
        passing = name in ("before", "trying")
        return self.root / ("run" if passing else "var/lib") / "orin-upgrade" / name

    def listed_systems(self, name: str) -> list[Path]:
        """Systems that a list names and the garbage collector has left; noise is none."""
        path = self.system_list_path(name)
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        there = [Path(line) for line in lines if line.startswith("/") and os.path.exists(line)]
        # A damaged list is no reason to stay with what does not work.
        kept = self.system_at(GOOD)
        return there or [kept] * (name == "good" and kept.exists())

    def update_system_list(self, name: str, system: Path, *, drop: bool = False) -> None:
        """Make a system the last one of a list, or drop it, whole or not at all; a full disk is
        said."""
        kept = [each for each in self.listed_systems(name) if each != system]
        path, kept = self.system_list_path(name), kept if drop else [*kept, system][-KEPT:]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, "".join(f"{each}\n" for each in kept))
        except OSError as error:
            print(f"{path}: not written: {error.strerror}", file=sys.stderr)

    def is_on_trial(self) -> bool:
        """True if the board started with the newest system, or with one that was given up, and it
        has not passed. An older one is what a person chose in the menu: it is nobody's to end."""
        good, booted = self.listed_systems("good"), self.system_at(BOOTED)
        ours = booted == self.system_at(NEWEST) or booted in self.listed_systems("bad")
        return bool(good) and booted not in good and ours

    def menu_entry_paths(self, pattern: str) -> list[Path]:
        """Entries of the boot menu."""
        return sorted((self.esp / "loader/entries").glob(f"{pattern}.conf"))

    def entry_text_of(self, system: Path) -> str | None:
        """The boot loader's own entry of a system, or None."""
        # A power cut may leave noise in a file of FAT.
        texts = (path.read_text(errors="replace") for path in self.menu_entry_paths("nixos*"))
        return next((text for text in texts if f"init={system}/init" in text.split()), None)


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a power cut leaves the old or the new one."""
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def write_menu_entry(board: BoardSystems, name: str, key: str, title: str, text: str) -> None:
    """Write an entry's text under a name, a title, and a key to sort by that are ours."""
    lines = [line for line in text.splitlines() if line.split(" ")[0] not in ("title", "sort-key")]
    said = "\n".join([f"title NixOS ({title})", f"sort-key {key}", *lines, ""])
    write_atomically(board.esp / f"loader/entries/{name}.conf", said)


def set_menu_default(board: BoardSystems) -> None:
    """Have the menu start with an entry of ours, whatever the boot loader's installation wrote, and
    a power cut right behind it left. In place: that needs no room where it is no longer."""
    with contextlib.suppress(OSError):
        settings = board.esp / "loader/loader.conf"
        lines = settings.read_bytes().split(b"\n")
        kept = [line for line in lines if line.split(b" ")[0] not in (b"default", b"preferred")]
        said = b"\n".join([DEFAULT, *kept])
        if board.menu_entry_paths("orin-*") and lines != said.split(b"\n"):
            with settings.open("r+b") as file:
                file.write(said)
                file.truncate(len(said))


def write_trial_entry(board: BoardSystems, target: Path) -> None:
    """After the boot loader's installation: count the tries of what has not passed."""
    if not (proven := board.listed_systems("good")):
        # There is nothing to go back to.
        return
    # A check may end while a switch goes on.
    fcntl.flock(lock := os.open(board.system_list_path("good").parent, os.O_RDONLY), fcntl.LOCK_EX)
    if target in proven:
        board.update_system_list("good", target)
        proven = board.listed_systems("good")
    # A person who switches to it again wants another try; the nightly upgrade does not.
    bad = board.listed_systems("bad") if board.system_list_path("before").exists() else []
    try:
        for old in board.menu_entry_paths("orin-next*"):
            old.unlink()
        # The last one, but where a full disk has kept it out of its profile and so out of the menu.
        good = next((each for each in reversed(proven) if board.entry_text_of(each)), proven[-1])
        if (text := board.entry_text_of(good)) is None:
            print(f"{good}: the boot menu has no entry of it: tries are not counted")
            return
        write_menu_entry(board, "orin-good", "orin-2", "the last that worked", text)
        # First, so that no power cut leaves a menu that starts what nobody counts.
        set_menu_default(board)
        new = board.entry_text_of(target)
        if new is not None and target not in [*proven, *bad]:
            write_menu_entry(board, f"orin-next+{TRIES}", "orin-1", "not proven yet", new)
            board.update_system_list("bad", target, drop=True)
    except OSError as error:
        set_menu_default(board)
        raise SystemExit(f"{board.esp}: {error.strerror}: the good system is next") from error
    finally:
        os.sync()
        os.close(lock)


def mark_as_good(board: BoardSystems, system: Path) -> None:
    """Note a system as good, keep it from the garbage collector, stop counting."""
    board.update_system_list("good", system)
    set_profile(board.root / GOOD, system, alone=True)
    # An upgrade may have been installed meanwhile, and waits for its restart.
    newest = board.system_at(NEWEST)
    if (board.esp / "loader/loader.conf").exists():
        try:
            write_trial_entry(board, system if newest in board.listed_systems("bad") else newest)
        except SystemExit as full:
            # The system is good all the same; a check that failed would be made again for ever.
            print(full, file=sys.stderr)


def set_profile(profile: Path, system: Path, *, alone: bool = False) -> None:
    """Make a system a profile's, as one of its generations, or its only one; a failure is said.
    Without nix-env, which a full disk or a damaged database of Nix stops."""
    name, folder = profile.name, profile.parent
    try:
        folder.mkdir(exist_ok=True)
        numbers = re.findall(rf"(?m)^{name}-(\d+)-link$", "\n".join(os.listdir(folder)))
        made = [folder / f"{name}-{n}-link" for n in sorted(map(int, numbers))]
        its = next((link for link in reversed(made) if link.resolve() == system), None)
        if its is None:
            its = folder / f"{name}-{max(map(int, numbers), default=0) + 1}-link"
            its.symlink_to(system)
        (new := folder / f"{name}.new").unlink(missing_ok=True)
        new.symlink_to(its.name)
        new.replace(profile)
        for link in {*made} - {its} if alone else ():
            link.unlink()
    except OSError as error:
        print(f"{profile}: not written: {error.strerror}", file=sys.stderr)


def give_up_system(board: BoardSystems, good: Path, bad: Path) -> None:
    """Leave a system that has not come up: the next boot is the good one's."""
    # Linux makes a FAT with a fault read-only: the boot loader still counts tries.
    with contextlib.suppress(OSError):
        for entry in board.menu_entry_paths("orin-next*"):
            entry.unlink()
    set_menu_default(board)
    board.update_system_list("bad", bad)
    set_profile(board.root / NEWEST, good)
    os.sync()


def unit_states_and_start_ids(units: list[str]) -> dict[str, tuple[str, str]]:
    """ActiveState and InvocationID by unit: each start has an id of its own."""
    command = ["systemctl", "show", "--property=ActiveState,InvocationID", *units]
    blocks = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.split("\n\n")
    found = {}
    for unit, block in zip_longest(units, blocks, fillvalue=""):
        said = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        found[unit] = (said.get("ActiveState", "unknown"), said.get("InvocationID", ""))
    return found


def problems_after_wait(options: argparse.Namespace) -> list[str]:
    """Return faults after about `--seconds`, and nothing as soon as all is well and stays so."""
    end = time.monotonic() + options.seconds
    well: dict[str, tuple[str, str]] = {}
    while True:
        now = unit_states_and_start_ids(options.units)
        down = [f"{unit} is {state}" for unit, (state, _) in now.items() if state != "active"]
        lost = reachability_problems(options.ssh, options.peer)
        is_over = time.monotonic() >= end
        waits = lost or any(state not in ("active", "failed") for state, _ in now.values())
        if (wrong := down + lost) and (is_over or not waits):
            return wrong
        if not wrong and (now == well or (well and is_over)):
            return [f"{unit} does not stay up" for unit in now if now[unit] != well[unit]]
        well = {} if wrong else now
        time.sleep(POLL_SECONDS if wrong else STEADY_SECONDS)


def go_back_to_good(board: BoardSystems, good: Path, bad: Path, options: argparse.Namespace) -> str:
    """Return to the good system: at once with the same kernel, else by a restart; say how."""
    give_up_system(board, good, bad)
    booted = board.system_at(BOOTED)
    same = all((booted / part).resolve() == (good / part).resolve() for part in AT_BOOT)
    if booted != bad and same:
        switch = str(good / "bin/switch-to-configuration")
        # One that hangs is left behind by the restart.
        switched = subprocess.run(["timeout", str(options.seconds + 60), switch, "switch"])
        if switched.returncode == 0 and not problems_after_wait(options):
            return "went back to it"
    # Into its entry, or into what its own installation makes.
    if not board.menu_entry_paths("orin-good"):
        subprocess.run([str(good / "bin/switch-to-configuration"), "boot"])
    subprocess.run(["systemctl", "--no-block", "reboot"])
    return "restarting with it"


def keep_or_leave_system(board: BoardSystems, options: argparse.Namespace) -> int:
    """Check what runs, note it or go back; the exit code."""
    system, newest = board.system_at(RUNNING), board.system_at(NEWEST)
    good = board.listed_systems("good")
    # One that was given up may have started again: what cannot write the menu cannot leave it.
    if system != newest and system not in board.listed_systems("bad"):
        spent = board.menu_entry_paths("orin-next+0-*") or newest in board.listed_systems("bad")
        if not spent or system not in good:
            print(f"{newest} waits for a restart; nothing to check yet")
            return 0
        print(f"{newest} did not come up: back to {system}", file=sys.stderr)
        give_up_system(board, system, newest)
    wrong = problems_after_wait(options)
    if board.system_at(RUNNING) != system:
        # An upgrade came in between, and found its check under way.
        return keep_or_leave_system(board, options)
    if system in board.listed_systems("bad"):
        wrong.append("it did not come up when the board started with it")
    if not wrong and board.system_at(BOOTED) == system:
        mark_as_good(board, system)
        print(f"{system} is good: {len(options.units)} units are up, and the board answers")
    elif not wrong:
        print(f"{system} works so far; it is good when the board has started with it")
    if not wrong:
        return 0
    print(f"{system} does not work: {'; '.join(wrong)}", file=sys.stderr)
    if not good or system in good:
        print("there is no system that has passed before: it stays", file=sys.stderr)
    elif not board.is_on_trial() and system not in board.listed_systems("trying"):
        print("no upgrade made it: it stays until the next boot", file=sys.stderr)
    else:
        how = go_back_to_good(board, good[-1], system, options)
        print(f"the last that passed is {good[-1]}: {how}", file=sys.stderr)
    return DECIDED


def end_undecided_boot(board: BoardSystems) -> int:
    """End a boot that has come to no decision: restart, so that its tries are spent."""
    if not board.is_on_trial():
        return 0
    print(f"{board.system_at(BOOTED)} came to no decision: restarting", file=sys.stderr)
    if not board.menu_entry_paths("orin-next*"):
        # Power went before its tries were counted.
        board.update_system_list("bad", board.system_at(BOOTED))
        set_menu_default(board)
    # A manager that hangs is asked for nothing.
    subprocess.run(["systemctl", "--force", "reboot"])
    return 1


def note_trying_or_restore_profile(board: BoardSystems, result: str) -> None:
    """After an upgrade: note what it made, or put the profile back where it was not switched to."""
    newest, running = board.system_at(NEWEST), board.system_at(RUNNING)
    before = board.listed_systems("before")
    board.system_list_path("before").unlink(missing_ok=True)
    if running == newest or result == "success":
        if newest not in before:
            board.update_system_list("trying", newest)
        return
    print(f"the upgrade to {newest} failed: the profile is {running} again", file=sys.stderr)
    set_profile(board.root / NEWEST, running)
    subprocess.run([str(running / "bin/switch-to-configuration"), "boot"])


def main(arguments: list[str] | None = None) -> int:
    """Run one of the actions; DECIDED where the system does not work, 1 at a deadline."""
    parser = argparse.ArgumentParser(prog="upgrade", description="Keep a board on what works.")
    parser.add_argument("action", choices=["began", "ended", "arm", "check", "deadline"])
    parser.add_argument("units", nargs="*", help="check: units that are up; arm: the system")
    parser.add_argument("--seconds", type=float, default=900, help="check: how long to wait")
    parser.add_argument("--ssh", type=int, metavar="PORT", help="check: where ssh must answer")
    parser.add_argument("--peer", help="check: HOST or HOST:PORT that must be reached")
    parser.add_argument("--esp", type=Path, default=Path("/boot"), help="the boot partition")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where the board lies")
    options = parser.parse_intermixed_args(arguments)
    board = BoardSystems(options.root, options.esp)
    if options.action == "began":
        board.update_system_list("before", board.system_at(NEWEST))
    elif options.action == "ended":
        note_trying_or_restore_profile(board, os.environ.get("SERVICE_RESULT", "success"))
    elif options.action == "arm":
        write_trial_entry(board, Path(options.units[0]).resolve())
    elif options.action == "deadline":
        return end_undecided_boot(board)
    else:
        return keep_or_leave_system(board, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
