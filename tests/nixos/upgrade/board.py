"""A board that restarts: generations, a boot menu, a real systemd for each boot that gets so far.

What lies on its disks outlives a boot. The menu is chosen from as systemd-boot does it (its sort
order and its counters: https://uapi-group.org/specifications/specs/boot_loader_specification); the
test in QEMU has the real one. The boot loader's installer writes what nixpkgs' builder writes.
"""

import contextlib
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.nixos.pid1 import PYTHON, ROOT, Machine, with_checkout
from tests.nixos.recorded import STORE, recorded

UPGRADE_FOLDER = ROOT / "nixos/modules/upgrade"
CHECK, UPGRADE = "orin-upgrade-check.service", "nixos-upgrade.service"
RESTART, DEADLINE = "orin-restart.service", "orin-upgrade-deadline"
GPU, NET, SSHD, FIREWALL = "orin-gpu.service", "net.service", "sshd.service", "firewall.service"
PROFILES = "/nix/var/nix/profiles"
ADDRESS, OTHER = "10.9.0.2", "10.9.0.1"
RESTARTING = ("reboot.target", "final.target", "systemd-reboot.service", "emergency.target")
HANGS = "/usr/bin/sleep 1000"
#: Seconds: what a system that does not come up is given, what one that hangs is, and what nothing
#: on a busy machine needs.
SHORT, HUNG, LONG = 1, 4, 240
#: Waits of the modules, and here: what answers on this machine answers at once.
QUICK = {
    "POLL_SECONDS = 2.0": "POLL_SECONDS = 0.3",
    "STEADY_SECONDS = 15.0": "STEADY_SECONDS = 0.3",
    "\nSECONDS = 5\n": "\nSECONDS = 2\n",
    "timeout=5": "timeout=1",
}


def oneshot(command: str, before: str = "") -> str:
    """A unit's text: a command at boot."""
    start = command.replace("$", "$$").replace('"', '\\"').replace("%", "%%")
    return (
        f"[Unit]\nBefore={before}\n[Service]\nType=oneshot\nRemainAfterExit=yes\n"
        f'ExecStart=/bin/sh -c "{start}"\n[Install]\nWantedBy=multi-user.target\n'
    )


def service(command: str) -> str:
    """A unit's text: a program that goes on."""
    return (
        f"[Unit]\nAfter={NET}\n[Service]\nExecStart={command}\nRuntimeDirectory=sshd\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )


NETWORK = (
    "ip netns add lan; ip link add eth0 type veth peer name eth1 netns lan;"
    f"ip address add {ADDRESS}/24 dev eth0; ip link set eth0 up;"
    f"ip netns exec lan ip address add {OTHER}/24 dev eth1; ip netns exec lan ip link set eth1 up"
)
SSH = "/usr/sbin/sshd -D -e -h /srv/key -f /dev/null -o PidFile=none -p {port} {more}"
HEALTHY = {
    NET: oneshot(NETWORK, SSHD),
    SSHD: service(SSH.format(port=22, more="")),
    GPU: oneshot("true"),
    FIREWALL: oneshot("true"),
}
#: Jobs, and units that start or are about to start again: by one state, as between two questions a
#: unit goes from the one to the other.
BUSY = "systemctl list-jobs --no-legend; systemctl list-units --no-legend --state=activating"
ENVIRONMENT = f"\n[Service]\nEnvironment=PATH={STORE}/bin:/usr/sbin:/usr/bin\n"
#: Kernels by what they do: start systemd, or end before it.
STARTS, PANICS = "starts", "panics"


@dataclass
class Generation:
    """A system: its units, its kernel, what its switch does before and after the units.

    seconds, deadline: what its check has for the units, and its boot for a decision.
    build: what building it does. peer: what its check must reach.
    """

    units: dict[str, str] = field(default_factory=lambda: dict(HEALTHY))
    kernel: str = STARTS
    version: str = "6.1"
    before_switch: str = "true"
    after_switch: str = "true"
    seconds: int = SHORT
    deadline: int = LONG
    build: str = "true"
    peer: str = ""

    @property
    def hangs(self) -> bool:
        """True if an upgrade to it comes to no end."""
        return HANGS in (self.build, self.before_switch, self.after_switch)

    def texts(self) -> dict[str, str]:
        """Units by name, those of a host with upgrades among them."""
        kept = recorded()
        peer = f"--peer {self.peer} " if self.peer else ""
        check = f"check --esp /boot --seconds {self.seconds} --ssh 22 {peer}{GPU}"
        timer = kept[f"{DEADLINE}.timer"]
        # Else systemd puts it off by up to a minute.
        after = f"OnActiveSec={self.deadline}\nAccuracySec=100ms"
        return self.units | {
            CHECK: re.sub(r"check .*", check, kept[CHECK]).replace("Sec=30", "Sec=1") + ENVIRONMENT,
            f"{DEADLINE}.service": kept[f"{DEADLINE}.service"],
            f"{DEADLINE}.timer": re.sub("OnBootSec=.*", after, timer),
            RESTART: kept[RESTART],
        }


SWITCH = """#!/bin/sh
# Order of nixpkgs' switch-to-configuration: checks, boot loader, units.
ACTION=$1
here=$(dirname "$(dirname "$(readlink -f "$0")")")
sh -e "$here/before" || exit 1
for link in {profiles}/system-*-link {profiles}/system-profiles/*-link; do
  test -e "$link" || continue
  n=$(basename "$link" -link | sed 's/^system-//')
  system=$(readlink -f "$link")
  cp "$system/kernel" /boot/EFI/nixos/$n.new || exit 1
  mv /boot/EFI/nixos/$n.new /boot/EFI/nixos/$n.efi
  {
    printf 'title NixOS\\nsort-key nixos\\nversion %s\\n' "${n##*-}"
    printf 'linux /EFI/nixos/%s.efi\\noptions init=%s/init\\n' "$n" "$system"
  } >/boot/loader/entries/$n.new || exit 1
  mv /boot/loader/entries/$n.new /boot/loader/entries/nixos-generation-$n.conf
  test "$(readlink -f "$link")" != "$here" ||
    printf 'timeout 5\\ndefault nixos-generation-%s.conf\\n' "$n" >/boot/loader/loader.conf
done
sh -e /nix/store/boot-loader "$here" || exit 1
test "$ACTION" != boot || exit 0
ln -sfn "$here" /run/current-system
for unit in "$here"/units/*; do
  grep -q X-RestartIfChanged=false "$unit" && continue
  test "${unit%.timer}" = "$unit" || continue
  cmp -s "$unit" "/etc/systemd/system/${unit##*/}" || changed="$changed ${unit##*/}"
done
cp "$here"/units/* /etc/systemd/system/
systemctl daemon-reload
# shellcheck disable=SC2086
test -z "$changed" || systemctl --no-block restart $changed
sh -e "$here/after"
"""
PROGRAMS = {
    # Without site packages, which none of this needs and which are looked for at each start.
    "python3": with_checkout(f'exec {PYTHON}/bin/python3 -S "$@"'),
    "bash": 'exec /bin/bash "$@"',
    "systemctl": 'exec /usr/bin/systemctl "$@"',
    "sleep": "exec /usr/bin/sleep 1",
    "nixos-rebuild": f"""set -e
new=/nix/store/$(cat /srv/new)
sh -e "$new/build"
nix-env --profile {PROFILES}/system --set "$new"
exec "$new/bin/switch-to-configuration" switch""",
}
#: nix-env's `--set`, which makes a generation of its own number each time.
NIX_ENV = """#!/bin/sh
test ! -e /srv/nix-env-fails || exit 1
test "$(readlink -f "$2")" != "$4" || exit 0
n=$(($(ls "$(dirname "$2")" | grep -c link) + 1))
ln -sfn "$4" "$2-$n-link"
ln -sfn "$(basename "$2")-$n-link" "$2"
"""


class Board:
    """Disks of a board with one generation, `old`, that has passed, and the machine that it is.

    new: systems that it is upgraded to, by name. small: disks that are full by then.
    """

    def __init__(self, folder: Path, new: dict[str, Generation], small: Sequence[str] = ()) -> None:
        self.folder = folder
        # What works has all the time that a busy machine may need.
        self.systems = {"old": Generation(seconds=LONG), **new}
        self.boots: list[str] = []
        self.journal = ""
        self.machine: Machine | None = None
        self.esp = folder / "boot"
        self.notes = folder / "notes"
        self.nix = folder / "nix-var"
        for path in (self.notes, self.nix / "nix/profiles", folder / "srv"):
            path.mkdir(parents=True)
        self.esp.mkdir()
        self.small = [folder / name for name in small]
        for path in self.small:
            options = ["-t", "tmpfs", "-o", "size=128k", "small", str(path)]
            subprocess.run(["mount", *options], check=True)
        for path in (self.esp / "loader/entries", self.esp / "EFI/nixos"):
            path.mkdir(parents=True)
        self.install("old", 1)
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "srv/key")]
        subprocess.run(key, check=True)

    def install(self, name: str, n: int) -> None:
        """Make a generation as nixpkgs does, and nothing of ours behind it."""
        (profiles := self.nix / "nix/profiles").joinpath("system").unlink(missing_ok=True)
        (profiles / f"system-{n}-link").symlink_to(f"/nix/store/{name}")
        (profiles / "system").symlink_to(f"system-{n}-link")
        (self.esp / f"EFI/nixos/{n}.efi").write_text(self.systems[name].kernel)
        text = f"title NixOS\nsort-key nixos\nversion {n}\nlinux /EFI/nixos/{n}.efi\n"
        path = self.esp / f"loader/entries/nixos-generation-{n}.conf"
        path.write_text(f"{text}options init=/nix/store/{name}/init\n")
        settings = f"timeout 5\ndefault nixos-generation-{n}.conf\n"
        (self.esp / "loader/loader.conf").write_text(settings)

    def choose(self) -> str:
        """The system that systemd-boot starts, one of its tries less."""
        found = []
        for path in (self.esp / "loader/entries").glob("*.conf"):
            match = re.fullmatch(r"(.*?)(?:\+(\d+)(?:-(\d+))?)?\.conf", path.name)
            assert match is not None
            base, left, done = match.group(1), match.group(2), int(match.group(3) or 0)
            said = dict(line.split(" ", 1) for line in path.read_text().splitlines())
            spent = left is not None and int(left) == 0
            key = (spent, said["sort-key"], -int(said["version"]))
            found.append((key, base, left, done, path, said))
        found.sort(key=lambda each: each[0])
        settings = (self.esp / "loader/loader.conf").read_text()
        glob = re.search(r"^default (.*)$", settings, flags=re.MULTILINE)
        assert glob is not None
        fits = [each for each in found if each[4].match(glob.group(1))]
        _, base, left, done, path, said = (fits or found)[0]
        if left is not None and int(left) > 0:
            path.rename(path.with_name(f"{base}+{int(left) - 1}-{done + 1}.conf"))
        system = re.search(r"init=/nix/store/(\w+)/init", said["options"])
        assert system is not None and (self.esp / said["linux"].lstrip("/")).exists()
        return system.group(1)

    def _machine(self, name: str) -> Machine:
        kept = recorded()
        texts = self.systems[name].texts() | {UPGRADE: kept[UPGRADE] + ENVIRONMENT}
        links = "; ".join(f"ln -s /nix/store/{name} /run/{n}-system" for n in ("booted", "current"))
        texts["booted.service"] = oneshot(links, "sysinit.target").replace(
            "[Unit]\n", "[Unit]\nDefaultDependencies=no\n"
        )
        for unit in RESTARTING:
            texts[unit] = (Path("/usr/lib/systemd/system") / unit).read_text()
        # In the place of sulogin, which nobody answers.
        texts["emergency.service"] = (
            f"[Unit]\nDefaultDependencies=no\n[Service]\nType=idle\nExecStart={HANGS}\n"
        )
        texts["booted.service"] += "WantedBy=sysinit.target\n"
        scripts = {"nixos-upgrade-start": kept["nixos-upgrade-start.sh"]}
        disks = {"/boot": self.esp, "/nix/var": self.nix, "/srv": self.folder / "srv"}
        machine = Machine(
            self.folder / f"boot-{len(list(self.folder.glob('boot-*')))}",
            texts,
            PROGRAMS | scripts,
            {},
            disks | {"/var/lib/orin-upgrade": self.notes},
        )
        # A command of ours that is under way holds a restart up for as long: its end is told to
        # its parent, out here, and not to systemd.
        machine.write("/etc/systemd/system.conf", "[Manager]\nDefaultTimeoutStopSec=1s\n")
        for module in ("upgrade.py", "reachable.py"):
            text = (UPGRADE_FOLDER / module).read_text()
            for waits, less in QUICK.items():
                text = text.replace(waits, less)
            machine.write(f"{STORE}/{module}", text)
        machine.write("/nix/store/boot-loader", kept["boot-loader.sh"])
        machine.write(f"{STORE}/bin/nix-env", NIX_ENV, 0o755)
        for system, generation in self.systems.items():
            at = f"/nix/store/{system}"
            switch = SWITCH.replace("{profiles}", PROFILES)
            machine.write(f"{at}/bin/switch-to-configuration", switch, 0o755)
            machine.write(f"{at}/kernel", generation.kernel)
            machine.write(f"{at}/initrd", generation.version)
            machine.write(f"{at}/build", generation.build)
            machine.write(f"{at}/before", generation.before_switch)
            machine.write(f"{at}/after", generation.after_switch)
            for unit, text in generation.texts().items():
                machine.write(f"{at}/units/{unit}", text)
        return machine

    def start(self) -> Machine:
        """Start, and start again, until the board stays up after a check."""
        while True:
            name = self.choose()
            self.boots.append(name)
            assert len(self.boots) < 12, f"the board restarts for ever: {self.boots}"
            # A kernel that ends before systemd leaves nothing to see.
            if self.systems[name].kernel == STARTS:
                self.machine = self._machine(name)
                self.machine.__enter__()
                # Without a word from us: systemd says when the boot's last job has ended.
                self.machine.run("systemctl", "is-system-running", "--wait", check=False)
                if self._settles(self.machine):
                    return self.machine
                self.stop()

    def upgrade(self, name: str) -> Machine:
        """Upgrade to a system; the machine where it has come to rest."""
        machine = self.machine
        assert machine is not None
        self.boots, self.journal = [], ""
        (self.folder / "srv/new").write_text(name)
        patience = HUNG if self.systems[name].hangs else LONG
        # What follows its end has all the time that it needs, unlike what a restart ends.
        drop_in = f"[Service]\nTimeoutStartSec={patience}\nTimeoutStopSec={LONG}\n".encode()
        machine.put(f"/etc/systemd/system/{UPGRADE}.d/patience.conf", drop_in)
        machine.run("systemctl", "daemon-reload")
        self._fill()
        machine.run("journalctl", "--rotate", "--vacuum-time=1us", check=False)
        machine.run("systemctl", "start", UPGRADE, check=False)
        if self._settles(machine):
            return machine
        self.stop()
        return self.start()

    def restart(self) -> Machine:
        """Turn the board off and on."""
        self.stop()
        return self.start()

    def stop(self) -> None:
        """Turn it off."""
        if self.machine is not None:
            self.machine.__exit__()
            self.machine = None

    def __enter__(self) -> "Board":
        return self

    def __exit__(self, *error: object) -> None:
        """Turn it off, and let go of the small disks."""
        self.stop()
        for path in self.small:
            subprocess.run(["umount", "--lazy", path], check=True)

    def _fill(self) -> None:
        """Leave no room on the disks that are small."""
        for path in self.small:
            with contextlib.suppress(OSError), (path / "filler").open("wb", buffering=0) as file:
                while file.write(b"x" * 4096):
                    pass

    def _settles(self, machine: Machine) -> bool:
        """True when no job is left and the board is up, False when it restarts."""
        end = time.monotonic() + LONG
        jobs = None
        while time.monotonic() < end and not machine.ended():
            if machine.works(CHECK, UPGRADE):
                time.sleep(0.1)
                continue
            jobs = machine.run("sh", "-c", BUSY, check=False)
            if jobs.returncode == 0 and not jobs.stdout.strip():
                journal = self._journal_until_now(machine, end)
                self.journal += journal.stdout
                return journal.returncode == 0
            time.sleep(0.2)
        assert machine.ended(), f"the board does not settle:\n{jobs}\n{self.journal}"
        return False

    def _journal_until_now(
        self, machine: Machine, end: float
    ) -> "subprocess.CompletedProcess[str]":
        """Journal with a line that is written now: journald may be behind what has ended."""
        mark = f"settled {time.monotonic_ns()}"
        machine.run("sh", "-c", f"echo {mark} | systemd-cat", check=False)
        while True:
            journal = machine.run("journalctl", "--no-pager", "--output=cat", check=False)
            late = machine.ended() or time.monotonic() > end
            if late or journal.returncode or mark in journal.stdout:
                return journal
            time.sleep(0.1)
