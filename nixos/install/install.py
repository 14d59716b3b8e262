"""Install a host of a flake on this board: `orin-install [--disk NAME] [--erase] [--yes]`.

Says what it will erase and install, asks once, and starts a unit that does it: what happens to the
terminal or to ssh is nothing to it. The same command watches a unit that runs, and goes on where a
power cut ended one: a disk that this program has made is not made again. disko makes the disk, the
flake goes to /etc/nixos of the new system, nixos-install copies the system that the stick carries.
The image names all of it in ORIN_INSTALL, as JSON: {"host", "name", "user", "flake", "labels",
"script", "system", "supplicant"}. Runs as root.
"""

import argparse
import configparser
import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

MOUNT = Path("/mnt")
SECTOR = 512
UNIT = "orin-installation.service"
AT_WORK = ("running", "start")
#: Link that disko's script knows the disk by, and the labels of its partitions (layout.nix).
TARGET = Path("dev/orin-disk")
PARTITIONS = {"root": "disk-orin-root", "boot": "disk-orin-boot"}
#: File of the new root that is there until the installation is done.
BEGUN = ".orin-install"
CONNECTIONS = Path("etc/NetworkManager/system-connections")
#: What a host of systemd-networkd has instead: NixOS' networking.wireless reads it.
SUPPLICANT = Path("etc/wpa_supplicant/imperative.conf")
#: wpa_supplicant's lines for the security that NetworkManager names, which means WEP by "none"; SAE
#: (WPA3) demands protected management frames, and a password of WPA2 may be one of WPA3 too.
SECURITY = {
    "": "key_mgmt=NONE",
    "wpa-psk": "key_mgmt=WPA-PSK WPA-PSK-SHA256 SAE\n  ieee80211w=1",
    "sae": "key_mgmt=SAE\n  ieee80211w=2",
}
#: Kinds of disks, the best first.
KINDS = ("nvme", "emmc", "sd", "usb")


class InstallError(Exception):
    """One line: what was found, and what would be right. Exit code 2, or 1 once it has begun."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Disk:
    """A disk of this board: its kind, its device, its size in bytes, its model."""

    kind: str
    device: str
    size: int
    model: str


@dataclass(frozen=True)
class Job:
    """Installation job. script: disko's for TARGET. system: what the stick carries, or None.

    supplicant: the host reads SUPPLICANT, and has no NetworkManager.
    """

    host: str
    name: str
    user: str
    flake: str
    labels: list[str]
    script: str
    system: str | None
    supplicant: bool = False


def kind_of(block: Path) -> str | None:
    """The kind of a disk of /sys/class/block, or None for what is no place for a system."""
    # Neither a partition nor nvme0c0n1, which is one path to a disk that has several.
    if re.fullmatch(r"nvme\d+n\d+", block.name):
        return "nvme"
    said = block / "device/type"
    if block.name.startswith("mmcblk") and said.exists():
        return {"MMC": "emmc", "SD": "sd"}.get(said.read_text().strip())
    return "usb" if block.name.startswith("sd") and not (block / "partition").exists() else None


def disks(root: Path) -> list[Disk]:
    """Disks that are there, but the one that this program runs from; the best kind first."""
    found = []
    mounts = (root / "proc/self/mounts").read_text().split("\n")
    sources = [line.split(" ")[0] for line in mounts if " /iso " in line]
    for block in sorted((root / "sys/class/block").iterdir()):
        kind, device = kind_of(block), f"/dev/{block.name}"
        size = int((block / "size").read_text()) * SECTOR
        # A reader of cards without a card has no size.
        if kind is None or not size or any(source.startswith(device) for source in sources):
            continue
        models = [block / "device" / name for name in ("model", "name")]
        model = next((path.read_text().strip() for path in models if path.exists()), "no name")
        found.append(Disk(kind, device, size, model))
    return sorted(found, key=lambda disk: (KINDS.index(disk.kind), disk.device))


def choose_disk(there: list[Disk], wanted: str | None) -> Disk:
    """The disk that was asked for, or the first; raises InstallError."""
    fitting = [disk for disk in there if wanted in (None, disk.kind, disk.device)]
    listed = ", ".join(f"{disk.kind} ({disk.device})" for disk in there) or "none"
    if not fitting:
        what = "no disk" if wanted is None else f"no disk {wanted}"
        raise InstallError(f"this board has {what}: there is {listed}")
    if wanted is not None and len(fitting) > 1:
        raise InstallError(f"there are several of {wanted}: name one by its device: {listed}")
    return fitting[0]


def refuse_twins(labels: list[str], device: str) -> None:
    """Raise InstallError where another disk has one of the labels."""
    command = ["lsblk", "--json", "--list", "--output", "PATH,LABEL,PARTLABEL,PKNAME"]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    for each in json.loads(listed)["blockdevices"]:
        label = each["label"] if each["label"] in labels else each.get("partlabel")
        if label in [*labels, *PARTITIONS.values()] and each["pkname"] != Path(device).name:
            raise InstallError(
                f"{each['path']} has the label {label} too, and the board might start from "
                f"it: empty it with wipefs --all {each['path']}, or unplug it"
            )


def has_route(root: Path) -> bool:
    """True if there is a default route, of IPv4 or IPv6: the network supplies what is missing."""
    four = (root / "proc/net/route").read_text().splitlines()[1:]
    six = root / "proc/net/ipv6_route"
    lines = six.read_text().splitlines() if six.exists() else []
    return any(line.split()[1] == "00000000" for line in four) or any(
        # Destination and its prefix are 0, and the interface is not the loopback's.
        line.split()[:2] == ["0" * 32, "00"] and line.split()[-1] != "lo"
        for line in lines
    )


def plan(job: Job, disk: Disk, root: Path) -> str:
    """Steps to be done, for a person."""
    model = root / "proc/device-tree/model"
    board = model.read_text().rstrip("\0\n") if model.exists() else "not named by its firmware"
    source = "builds and fetches it" if job.system is None else "from this stick, without a network"
    return (
        f"board    {board}\n"
        f"erases   {disk.device}: {disk.model}, {disk.size / 1e9:.0f} GB, all of it\n"
        f"installs {job.host} of {job.flake}, a copy of which will be /etc/nixos: {source}\n"
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
        raise InstallError("an installation runs already") from error
    return file


def mount_begun(job: Job, disk: Disk, root: Path) -> bool:
    """Mount what an installation of this job has left on the disk; False if there is none."""
    mount = root / MOUNT.relative_to("/")
    links = {name: root / "dev/disk/by-partlabel" / label for name, label in PARTITIONS.items()}
    if not all(str(link.resolve()).startswith(disk.device) for link in links.values()):
        return False
    if not (mount / BEGUN).exists():
        mount.mkdir(parents=True, exist_ok=True)
        if subprocess.run(["mount", links["root"], mount], capture_output=True).returncode:
            return False
    try:
        said = (mount / BEGUN).read_text()
    except (OSError, ValueError):
        # Another system, a finished one, or a damaged file system.
        said = ""
    if said != f"{job.host} {job.flake} {job.system}\n":
        subprocess.run(["umount", mount], check=True)
        return False
    boot = mount / "boot"
    boot.mkdir(exist_ok=True)
    if not boot.is_mount():
        mounting = ["mount", "-o", "umask=0077", str(links["boot"]), str(boot)]
        run("mounting its boot partition", *mounting)
    return True


def make_disk(job: Job, disk: Disk, root: Path) -> None:
    """Erase and mount; from then on a rerun goes on."""
    mount, link = root / MOUNT.relative_to("/"), root / TARGET
    subprocess.run(["umount", "--recursive", "--quiet", mount])
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(disk.device)
    making = (f"making file systems on {disk.device}", job.script, "--yes-wipe-all-disks")
    try:
        run(*making)
    except InstallError:
        # sgdisk fails where it mends a table that a power cut has left half written.
        run(*making)
    mount.mkdir(exist_ok=True)
    new = mount / f"{BEGUN}.new"
    new.write_text(f"{job.host} {job.flake} {job.system}\n")
    os.sync()
    new.replace(mount / BEGUN)
    os.sync()


def copy_flake(source: str, target: Path) -> None:
    """Copy a flake out of the store, writable, so that it can be edited on the board."""
    # A copy that was cut is made anew: a link that is there cannot be made again.
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)
    for path in [target, *target.rglob("*")]:
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | 0o200)


def supplicant_network(keyfile: str) -> str | None:
    """A Wi-Fi of NetworkManager's as wpa_supplicant writes it; None for what has no password."""
    read = configparser.ConfigParser(interpolation=None, strict=False, delimiters=("=",))
    # NetworkManager leaves out what it cannot read, too.
    with contextlib.suppress(configparser.Error):
        read.read_string(keyfile)
    # GKeyFile's escapes; a name that is no text is numbers, each with a semicolon.
    escapes = {"s": " ", "t": "\t", "n": "\n", "r": "\r"}

    def plain(section: str, key: str) -> str:
        text = read.get(section, key, fallback="")
        return re.sub(r"\\(.)", lambda hit: escapes.get(hit[1], hit[1]), text)

    name = plain("wifi", "ssid").encode()
    if re.fullmatch(rb"(\d{1,3};)+", name):
        numbers = [int(number) for number in name.split(b";")[:-1]]
        name = bytes(numbers) if max(numbers) < 256 else b""
    security = SECURITY.get(plain("wifi-security", "key-mgmt"))
    password = plain("wifi-security", "psk")
    is_key = re.fullmatch("[0-9a-fA-F]{64}", password)
    # One line that wpa_supplicant does not take, and it takes none of the file.
    is_phrase = 8 <= len(password.encode()) < 64 and password.isprintable()
    fits = is_key or is_phrase if security != SECURITY[""] else not password
    if not 0 < len(name) <= 32 or security is None or not fits:
        return None
    lines = [f"ssid={name.hex()}", security]
    if password:
        lines.append(f"psk={password}" if is_key else f'psk="{password}"')
    if plain("wifi", "hidden") == "true":
        lines.append("scan_ssid=1")
    return "network={\n  " + "\n  ".join(lines) + "\n}\n"


def connections(root: Path) -> list[Path]:
    """The files of networks that the installer was told of."""
    return sorted(path for path in (root / CONNECTIONS).glob("*") if path.is_file())


def write_supplicant(root: Path, mount: Path) -> None:
    """Keep the installer's Wi-Fi for a host of systemd-networkd; says which cannot be kept."""
    networks = []
    for path in connections(root):
        keyfile = path.read_text(errors="replace")
        network = supplicant_network(keyfile)
        if network is not None:
            networks.append(network)
        elif "[wifi]" in keyfile:
            print(f"orin-install: Wi-Fi {path.stem} is not kept: wpa_supplicant would not take it")
    if networks:
        target = mount / SUPPLICANT
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.touch(mode=0o600)
        target.write_text("".join(networks))


def copy_connections(root: Path, mount: Path) -> None:
    """Keep the networks that the installer was told of: Wi-Fi above all, its password with it."""
    (mount / CONNECTIONS).mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in connections(root):
        target = mount / CONNECTIONS / path.name
        target.touch(mode=0o600)
        shutil.copyfile(path, target)


def install(job: Job, disk: Disk, root: Path, erase: bool = False) -> None:
    """Erase unless it goes on, copy, install; raises InstallError with the step that failed."""
    mount = root / MOUNT.relative_to("/")
    if not erase and mount_begun(job, disk, root):
        print("orin-install: going on with what was begun", flush=True)
    else:
        make_disk(job, disk, root)
    nixos = mount / "etc/nixos"
    copy_flake(job.flake, nixos)
    (write_supplicant if job.supplicant else copy_connections)(root, mount)
    built = ["--flake", f"path:{nixos}#{job.host}"]
    what = built if job.system is None else ["--system", job.system]
    flags = ("--no-root-passwd", "--no-channel-copy")
    run(f"installing {job.host}", "nixos-install", "--root", str(mount), *what, *flags)
    os.sync()
    (mount / BEGUN).unlink()
    os.sync()


def state() -> str:
    """The unit's: `running`, `exited` once it has installed, `dead` or `failed`."""
    command = ["systemctl", "show", "--property=SubState", "--value", UNIT]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.strip()


def watch() -> int:
    """Show the unit's journal until it ends; its exit code. Who leaves does not stop it."""
    print("orin-install: leave whenever you like; sudo orin-install shows it again", flush=True)
    command = ["journalctl", f"--unit={UNIT}", "--follow", "--output=cat", "--lines=50"]
    shown = subprocess.Popen(command)
    try:
        while state() in AT_WORK:
            time.sleep(1)
        time.sleep(1)
    except KeyboardInterrupt:
        print("\norin-install: it goes on without you")
        return 0
    finally:
        shown.terminate()
    command = ["systemctl", "show", "--property=ExecMainStatus", "--value", UNIT]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout or 1)


def start(disk: Disk, options: argparse.Namespace) -> None:
    """Start the unit that works."""
    subprocess.run(["systemctl", "stop", UNIT], capture_output=True)
    subprocess.run(["systemctl", "reset-failed", UNIT], capture_output=True)
    keep = [f"--setenv={name}={os.environ[name]}" for name in ("ORIN_INSTALL", "PATH")]
    work = [sys.executable, __file__, "--work", "--disk", disk.device]
    unit = [f"--unit={UNIT}", "--service-type=exec", "--remain-after-exit", "--quiet", *keep]
    given = {"--no-reboot": options.no_reboot, "--erase": options.erase}
    passed = [name for name, is_on in given.items() if is_on]
    subprocess.run(["systemd-run", *unit, *work, *passed], check=True)


def asked(job: Job, options: argparse.Namespace, root: Path) -> Disk:
    """The disk, after all questions; raises InstallError."""
    disk = choose_disk(disks(root), options.disk)
    if not options.erase and mount_begun(job, disk, root):
        print(f"orin-install: going on with the installation of {job.host} on {disk.device}")
        return disk
    print(plan(job, disk, root), end="", flush=True)
    refuse_twins(job.labels, disk.device)
    if job.system is None and not has_route(root):
        raise InstallError("there is no network: plug in Ethernet, or set up Wi-Fi with nmtui")
    if not options.yes and input("Write yes to go on, anything else to stop: ") != "yes":
        raise InstallError("stopped: nothing was written")
    return disk


def install_and_reboot(job: Job, options: argparse.Namespace, root: Path) -> None:
    """Install, as the unit does."""
    with alone(root):
        install(job, choose_disk(disks(root), options.disk), root, options.erase)
    print(f"orin-install: done. ssh {job.user}@{job.name}.local", flush=True)
    if not options.no_reboot:
        subprocess.run(["systemctl", "--no-block", "reboot"], check=True)


def main(arguments: list[str] | None = None, root: Path = Path("/")) -> None:
    """Run `orin-install`; one line and an exit code where it cannot be."""
    job = Job(**json.loads(os.environ["ORIN_INSTALL"]))
    parser = argparse.ArgumentParser(
        prog="orin-install", description=f"Install {job.host} on a disk of this board, or go on."
    )
    parser.add_argument("--disk", help="nvme, emmc, sd, usb, or a device; else the first of these")
    parser.add_argument("--erase", action="store_true", help="begin anew, whatever was begun")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--no-reboot", action="store_true", help="stay in the installer")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        if options.work:
            return install_and_reboot(job, options, root)
        if (now := state()) == "exited" and not options.erase:
            # Who asks again, after a line that dropped, wants to know this and not to begin anew.
            print(f"orin-install: {job.host} is installed: reboot, or --erase to begin anew")
            return
        if now not in AT_WORK:
            disk = asked(job, options, root)
            # Who was asked on the serial console may answer when another has begun, or is done.
            if state() == now:
                start(disk, options)
        if code := watch():
            raise InstallError("it failed; the same command goes on: sudo orin-install", code)
    except (EOFError, KeyboardInterrupt, UnicodeDecodeError):
        # The third: noise on a serial line.
        print("\norin-install: nobody answered: nothing was written", file=sys.stderr)
        sys.exit(2)
    except InstallError as error:
        print(f"orin-install: {error}", file=sys.stderr)
        sys.exit(error.code)


if __name__ == "__main__":
    main()
