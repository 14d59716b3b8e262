"""Install a host of a flake on this board: `orin-install [--disk NAME] [--erase] [--yes]`.

Says what it will erase and install, asks once, and starts a unit that does it: what happens to the
terminal or to ssh is nothing to it. The same command watches a unit that runs, and goes on where a
power cut ended one: a disk that this program has made is not made again. The image says what is
installed in ORIN_INSTALL, an InstallJob as JSON. Runs as root.
"""

import argparse
import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

MOUNT = Path("mnt")
#: The unit that works, and the file of its arguments, one a line (installer.nix).
UNIT = "orin-installation.service"
ANSWERS = Path("run/orin-installation")
#: Link that disko's script knows the disk by, and the labels of its partitions (layout.nix).
TARGET = Path("dev/orin-disk")
PARTITIONS = {"root": "disk-orin-root", "boot": "disk-orin-boot"}
#: File of the new root that is there until the installation is done.
BEGUN = ".orin-install"
CONNECTIONS = Path("etc/NetworkManager/system-connections")
#: What a host of systemd-networkd has instead: NixOS' networking.wireless reads it.
SUPPLICANT = Path("etc/wpa_supplicant/imperative.conf")
#: Kinds of disks, the best first, by their names in /sys/class/block and their types: neither a
#: partition nor nvme0c0n1, which is one path to a disk that has several.
KINDS = {
    "nvme": r"nvme\d+n\d+ .*",
    "emmc": r"mmcblk\d+ MMC",
    "sd": r"mmcblk\d+ SD",
    "usb": r"sd[a-z]+ .*",
}
PLAN = """\
board    {board}
erases   {disk.device}: {disk.model}, {size:.0f} GB, all of it
installs {job.host} of {job.flake}, a copy of which will be /etc/nixos: {source}
then     restarts; log in with ssh {job.user}@{job.name}.local
"""


class InstallError(Exception):
    """One line: what was found, and what would be right. Exit code 2, or 1 once it has begun."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


class Disk(NamedTuple):
    """A disk of this board; its size in bytes."""

    kind: str
    device: str
    size: int
    model: str


class InstallJob(NamedTuple):
    """Installation job. script: disko's for TARGET. system: what the stick carries, or None.
    supplicant: the host reads SUPPLICANT, and has no NetworkManager."""

    host: str
    name: str
    user: str
    flake: str
    labels: list[str]
    script: str
    system: str | None
    supplicant: bool = False

    @property
    def marker_text(self) -> str:
        """Text of BEGUN: whose installation it is."""
        return f"{self.host} {self.flake} {self.system}\n"


def installable_disks(root: Path) -> list[Disk]:
    """Disks that are there, but the one that this program runs from; the best kind first."""
    found = []
    stick = re.findall(r"(?m)^(\S+) /iso ", (root / "proc/self/mounts").read_text())
    for block in (root / "sys/class/block").iterdir():
        device, size = f"/dev/{block.name}", int((block / "size").read_text()) * 512
        files = [block / "device" / name for name in ("type", "name", "model")]
        said = {path.name: path.read_text().strip() for path in files if path.exists()}
        name = f"{block.name} {said.get('type')}"
        kind = next((kind for kind, names in KINDS.items() if re.fullmatch(names, name)), None)
        # A reader of cards without a card has no size.
        if kind and size and not any(source.startswith(device) for source in stick):
            model = said.get("model", said.get("name", "no name"))
            found.append(Disk(kind, device, size, model))
    return sorted(found, key=lambda disk: ([*KINDS].index(disk.kind), disk.device))


def choose_disk(there: list[Disk], wanted: str | None) -> Disk:
    """The disk that was asked for, or the first; raises InstallError."""
    fitting = [disk for disk in there if wanted in (None, disk.kind, disk.device)]
    listed = ", ".join(f"{disk.kind} ({disk.device})" for disk in there) or "none"
    if not fitting:
        raise InstallError(f"this board has no disk {wanted or 'at all'}: there is {listed}")
    if wanted is not None and len(fitting) > 1:
        raise InstallError(f"there are several of {wanted}: name one by its device: {listed}")
    return fitting[0]


def refuse_duplicate_labels(labels: list[str], device: str) -> None:
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


def run_step(what: str, *command: str) -> None:
    """Run a step; raises InstallError that names it."""
    print(f"orin-install: {what}", flush=True)
    if code := subprocess.run(command).returncode:
        raise InstallError(f"{what} failed with {code}; the reason is above", code=1)


def try_mount_unfinished(job: InstallJob, disk: Disk, root: Path) -> bool:
    """Mount what an installation of this job has left on the disk; False if there is none."""
    mount = root / MOUNT
    links = {name: root / "dev/disk/by-partlabel" / label for name, label in PARTITIONS.items()}
    if not all(str(link.resolve()).startswith(disk.device) for link in links.values()):
        return False
    if not (mount / BEGUN).exists():
        mount.mkdir(parents=True, exist_ok=True)
        if subprocess.run(["mount", links["root"], mount], capture_output=True).returncode:
            return False
    # Another system's, a finished one's, or on a damaged file system.
    found = subprocess.run(["cat", mount / BEGUN], capture_output=True).stdout
    if found != job.marker_text.encode():
        subprocess.run(["umount", mount], check=True)
        return False
    (boot := mount / "boot").mkdir(exist_ok=True)
    if not boot.is_mount():
        run_step("mounting its boot", "mount", "-o", "umask=0077", str(links["boot"]), str(boot))
    return True


def erase_and_mount(job: InstallJob, disk: Disk, root: Path) -> None:
    """Erase and mount; from then on a rerun goes on."""
    mount, link = root / MOUNT, root / TARGET
    subprocess.run(["umount", "--recursive", "--quiet", mount])
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(disk.device)
    making = (f"making file systems on {disk.device}", job.script, "--yes-wipe-all-disks")
    try:
        run_step(*making)
    except InstallError:
        # sgdisk fails where it mends a table that a power cut has left half written.
        run_step(*making)
    mount.mkdir(exist_ok=True)
    new = mount / f"{BEGUN}.new"
    new.write_text(job.marker_text)
    os.sync()
    new.replace(mount / BEGUN)
    os.sync()


def wpa_network_block(path: Path) -> str:
    """A Wi-Fi of NetworkManager's as wpa_supplicant reads it; empty where it cannot be kept.
    wpa_passphrase refuses what is no password. One of WPA2 may be one of WPA3 too."""
    asks = ["nmcli", "--show-secrets", "--escape", "no", "--get-values"]
    keys = "802-11-wireless.ssid,802-11-wireless-security.psk"
    shown = subprocess.run([*asks, keys, "connection", "show", "filename", path], stdout=-1).stdout
    command = ["wpa_passphrase", *shown.splitlines()[:2]]
    made = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    # A name that is no text is numbers, at whose letters nmcli guesses.
    if made.returncode or re.search(rb"(?m)^ssid=(\d+;)+$", path.read_bytes()):
        return ""
    sae = "key_mgmt=WPA-PSK WPA-PSK-SHA256 SAE\n\tieee80211w=1\n\tscan_ssid=1\n\tsae_password="
    return made.stdout.decode().replace("#psk=", sae)


def copy_networks(job: InstallJob, root: Path, mount: Path) -> None:
    """Keep the networks that the installer was told of, Wi-Fi above all, passwords with it; says
    which a host of systemd-networkd cannot keep."""
    files = sorted(path for path in (root / CONNECTIONS).glob("*") if path.is_file())
    kept = {CONNECTIONS / path.name: path.read_bytes() for path in files}
    if job.supplicant:
        wireless = [path for path in files if b"[wifi]" in path.read_bytes()]
        networks = {path.stem: wpa_network_block(path) for path in wireless}
        for name in (name for name, network in networks.items() if not network):
            print(f"orin-install: Wi-Fi {name} is not kept: wpa_supplicant would not take it")
        kept = {SUPPLICANT: "".join(networks.values()).encode()}
    for path, content in kept.items():
        (target := mount / path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.touch(mode=0o600)
        target.write_bytes(content)


def install(job: InstallJob, disk: Disk, root: Path, erase: bool = False) -> None:
    """Erase unless it goes on, copy, install; raises InstallError with the step that failed."""
    mount = root / MOUNT
    if not erase and try_mount_unfinished(job, disk, root):
        print("orin-install: going on with what was begun", flush=True)
    else:
        erase_and_mount(job, disk, root)
    nixos = mount / "etc/nixos"
    # Writable, so that it can be edited there; anew, as a copy that was cut has links already.
    copy = 'rm -rf "$1"; mkdir -p "${1%/*}"; cp -r "$0" "$1"; chmod -R u+w "$1"'
    run_step(f"copying {job.flake}", "sh", "-ec", copy, job.flake, str(nixos))
    copy_networks(job, root, mount)
    built = ["--flake", f"path:{nixos}#{job.host}"]
    what = built if job.system is None else ["--system", job.system]
    flags = ("--no-root-passwd", "--no-channel-copy")
    run_step(f"installing {job.host}", "nixos-install", "--root", str(mount), *what, *flags)
    os.sync()
    (mount / BEGUN).unlink()
    os.sync()


def unit_state() -> str:
    """The unit: `activating` while it works, `active` once it has installed, or another."""
    command = ["systemctl", "is-active", UNIT]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.strip()


def start_and_follow_unit(verb: str) -> int:
    """Start the unit, or join who has, and show its journal; its exit code. Who leaves stops
    nothing."""
    print("orin-install: leave whenever you like; sudo orin-install shows it again", flush=True)
    command = ["journalctl", f"--unit={UNIT}", "--follow", "--output=cat", "--lines=50"]
    shown = subprocess.Popen(command)
    try:
        code = subprocess.run(["systemctl", "--quiet", verb, UNIT]).returncode
        time.sleep(1)
        return code
    except KeyboardInterrupt:
        print("\norin-install: it goes on without you")
        return 0
    finally:
        shown.terminate()


def choose_and_confirm_disk(job: InstallJob, options: argparse.Namespace, root: Path) -> Disk:
    """The disk, after all questions; raises InstallError."""
    disk = choose_disk(installable_disks(root), options.disk)
    if not options.erase and try_mount_unfinished(job, disk, root):
        print(f"orin-install: going on with the installation of {job.host} on {disk.device}")
        return disk
    model = root / "proc/device-tree/model"
    board = model.read_text().rstrip("\0\n") if model.exists() else "not named by its firmware"
    source = "builds and fetches it" if job.system is None else "from this stick, without a network"
    said = PLAN.format(job=job, disk=disk, board=board, size=disk.size / 1e9, source=source)
    print(said, end="", flush=True)
    refuse_duplicate_labels(job.labels, disk.device)
    shown = subprocess.run("ip -4 route; ip -6 route", shell=True, stdout=subprocess.PIPE).stdout
    # Linux has one for IPv6 that leads nowhere, "unreachable default".
    if job.system is None and not re.search(rb"(?m)^default ", shown):
        raise InstallError("there is no network: plug in Ethernet, or set up Wi-Fi with nmtui")
    if not options.yes and input("Write yes to go on, anything else to stop: ") != "yes":
        raise InstallError("stopped: nothing was written")
    return disk


def main(arguments: list[str] | None = None, root: Path = Path("/")) -> None:
    """Run `orin-install`; one line and an exit code where it cannot be."""
    job = InstallJob(**json.loads(os.environ["ORIN_INSTALL"]))
    what = f"Install {job.host} on a disk of this board, or go on."
    parser = argparse.ArgumentParser("orin-install", description=what, fromfile_prefix_chars="@")
    parser.add_argument("--disk", help="nvme, emmc, sd, usb, or a device; else the first of these")
    parser.add_argument("--erase", action="store_true", help="begin anew, whatever was begun")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--no-reboot", action="store_true", help="stay in the installer")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        if options.work:
            install(job, choose_disk(installable_disks(root), options.disk), root, options.erase)
            print(f"orin-install: done. ssh {job.user}@{job.name}.local", flush=True)
            if not options.no_reboot:
                subprocess.run(["systemctl", "--no-block", "reboot"], check=True)
            return
        if (now := unit_state()) == "active" and not options.erase:
            # Who asks again, after a line that dropped, wants to know this and not to begin anew.
            print(f"orin-install: {job.host} is installed: reboot, or --erase to begin anew")
            return
        verb = "start"
        if now != "activating":
            given = {"--no-reboot": options.no_reboot, "--erase": options.erase}
            disk = choose_and_confirm_disk(job, options, root)
            work = ["--work", "--disk", disk.device, *filter(given.get, given)]
            # Who was asked on the serial console may answer when another has begun, or is done.
            if unit_state() == now:
                (root / ANSWERS).write_text("\n".join(work))
                verb = "restart" if options.erase else verb
        if code := start_and_follow_unit(verb):
            raise InstallError("it failed; the same command goes on: sudo orin-install", code)
    except (EOFError, KeyboardInterrupt, UnicodeDecodeError):
        # The third: noise on a serial line.
        parser.exit(2, "\norin-install: nobody answered: nothing was written\n")
    except InstallError as error:
        parser.exit(error.code, f"orin-install: {error}\n")


if __name__ == "__main__":
    main()
