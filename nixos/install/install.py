"""Install a host of a flake on this board: `orin-install [--disk nvme|emmc] [--yes]`.

Says what it will erase and install, asks once, and then needs nobody: disko makes the disk, the
flake goes to /etc/nixos of the new system, nixos-install builds and fetches onto the disk. The
image names all of it in ORIN_INSTALL, as JSON: {"host", "name", "user", "flake", "labels",
"disks"}. Runs as root.
"""

import argparse
import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO

MOUNT = Path("/mnt")
SECTOR = 512


class InstallError(Exception):
    """One line: what was found, and what would be right. Exit code 2, or 1 once it has begun."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Disk:
    """A disk that may be installed on: its short name, its device, disko's script for it."""

    name: str
    device: str
    script: str

    def _block(self, root: Path) -> Path:
        return root / "sys/class/block" / Path(self.device).name

    def present(self, root: Path) -> bool:
        """True if this board has it."""
        return self._block(root).exists()

    def size(self, root: Path) -> int:
        """Its size in bytes."""
        return int((self._block(root) / "size").read_text()) * SECTOR

    def model(self, root: Path) -> str:
        """The disk's model name, or an empty string."""
        for name in ("device/model", "device/name"):
            if (path := self._block(root) / name).exists():
                return path.read_text().strip()
        return "no name"


@dataclass(frozen=True)
class Job:
    """Installation job: a host of a flake in the store, its labels, disks in order."""

    host: str
    name: str
    user: str
    flake: str
    labels: list[str]
    disks: list[Disk]


def read_job(text: str) -> Job:
    """Read ORIN_INSTALL."""
    given = json.loads(text)
    return Job(**{**given, "disks": [Disk(**disk) for disk in given["disks"]]})


def choose(disks: list[Disk], wanted: str | None, root: Path) -> Disk:
    """The disk that was asked for, or the first that is there; raises InstallError."""
    there = [disk for disk in disks if disk.present(root)]
    known = ", ".join(f"{disk.name} ({disk.device})" for disk in disks)
    if wanted is not None:
        there = [disk for disk in there if disk.name == wanted]
    if not there:
        raise InstallError(f"this board has no disk {wanted or known}: plug in an NVMe disk")
    return there[0]


def refuse_twins(labels: list[str], device: str) -> None:
    """Raise InstallError where another disk has one of the labels."""
    command = ["lsblk", "--json", "--list", "--output", "PATH,LABEL,PKNAME"]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    for each in json.loads(listed)["blockdevices"]:
        if each["label"] in labels and each["pkname"] != Path(device).name:
            raise InstallError(
                f"{each['path']} has the label {each['label']} too, and the board might start from "
                f"it: empty it with wipefs --all {each['path']}, or unplug it"
            )


def has_route(root: Path) -> bool:
    """True if there is a default route: the network supplies what the disk lacks."""
    lines = (root / "proc/net/route").read_text().splitlines()[1:]
    return any(line.split()[1] == "00000000" for line in lines)


def plan(job: Job, disk: Disk, root: Path) -> str:
    """Steps to be done, for a person."""
    model = root / "proc/device-tree/model"
    board = model.read_text().rstrip("\0\n") if model.exists() else "not named by its firmware"
    return (
        f"board    {board}\n"
        f"erases   {disk.device}: {disk.model(root)}, {disk.size(root) / 1e9:.0f} GB, all of it\n"
        f"installs {job.host} of {job.flake}, a copy of which will be /etc/nixos\n"
        f"then     restarts; log in with ssh {job.user}@{job.name}.local\n"
    )


def run(what: str, *command: str) -> None:
    """Run a step; raises InstallError that names it."""
    print(f"orin-install: {what}", flush=True)
    try:
        done = subprocess.run(command)
    except OSError as error:
        raise InstallError(f"{what}: {command[0]}: {error.strerror}", code=1) from error
    if done.returncode:
        raise InstallError(f"{what} failed with {done.returncode}; the reason is above", code=1)


def alone(root: Path) -> IO[str]:
    """The file whose lock says that an installation runs; raises InstallError where one does."""
    path = root / "run/orin-install"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise InstallError("another console is installing already: look there") from error
    return file


def copy_flake(source: str, target: Path) -> None:
    """Copy a flake out of the store, writable, so that it can be edited on the board."""
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    for path in [target, *target.rglob("*")]:
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | stat.S_IWUSR)


def install(job: Job, disk: Disk, mount: Path) -> None:
    """Erase, copy, install; raises InstallError with the step that failed."""
    run(f"making file systems on {disk.device}", disk.script, "--yes-wipe-all-disks")
    nixos = mount / "etc/nixos"
    copy_flake(job.flake, nixos)
    flake = f"path:{nixos}#{job.host}"
    flags = ("--no-root-passwd", "--no-channel-copy")
    run(f"installing {job.host}", "nixos-install", "--root", str(mount), "--flake", flake, *flags)


def main(arguments: list[str] | None = None, root: Path = Path("/")) -> None:
    """Run `orin-install`; one line and an exit code where it cannot be."""
    job = read_job(os.environ["ORIN_INSTALL"])
    parser = argparse.ArgumentParser(
        prog="orin-install", description=f"Install {job.host} on a disk of this board."
    )
    parser.add_argument("--disk", choices=[disk.name for disk in job.disks], help="else the first")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--no-reboot", action="store_true", help="stay in the installer")
    options = parser.parse_args(arguments)
    try:
        disk = choose(job.disks, options.disk, root)
        print(plan(job, disk, root), end="", flush=True)
        refuse_twins(job.labels, disk.device)
        if not has_route(root):
            raise InstallError("there is no network: plug in Ethernet, or set up Wi-Fi with nmtui")
        if not options.yes and input("Write yes to go on, anything else to stop: ") != "yes":
            raise InstallError("stopped: nothing was written")
        with alone(root):
            install(job, disk, root / MOUNT.relative_to("/"))
    except EOFError:
        print("\norin-install: nobody answered: nothing was written", file=sys.stderr)
        sys.exit(2)
    except InstallError as error:
        print(f"orin-install: {error}", file=sys.stderr)
        sys.exit(error.code)
    print(f"orin-install: done. ssh {job.user}@{job.name}.local", flush=True)
    if not options.no_reboot:
        subprocess.run(["systemctl", "reboot"], check=True)


if __name__ == "__main__":
    main()
