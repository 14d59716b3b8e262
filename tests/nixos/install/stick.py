"""The installer on its stick, for one disk: stopped and started at any of its steps."""

import importlib
import json
import os
import select
import shutil
import subprocess
from pathlib import Path

from tests.nixos.recorded import DISK, recorded

PROGRAM = Path(str(importlib.import_module("install").__file__))
KEYS = {"host": "orin-minimal", "name": "orin-1", "user": "orin", "labels": ["ESP", "nixos"]}
CARRIED = "/nix/store/any-nixos-system"

#: Counts a step of the installer. The one that FOLDER/stop names says that it is there, and waits.
STEP = """#!/bin/sh
n=0
test ! -e "FOLDER/steps/$1" || read -r n <"FOLDER/steps/$1"
name="$1 $((n + 1))"
echo "$((n + 1))" >"FOLDER/steps/$1"
echo "$name" >>FOLDER/names
read -r stop <FOLDER/stop
test "$name" = "$stop" || exit 0
# Of what a program wrote last, its beginning alone has reached the disk.
test -z "$3" || dd if=/dev/zero of="$2" bs=1k seek="$3" count=256 conv=notrunc,fsync status=none
echo >FOLDER/reached
read -r _ <FOLDER/go
"""
#: A program that writes to the disk: before it, and where the power goes while it writes.
WRITES = """#!/bin/sh
step NAME
LD_PRELOAD=FOLDER/awake.so PROGRAM "$@" || exit
for device; do :; done
step "NAME, in part" "$device" FROM
"""
#: sgdisk sleeps a second after each table, for kernels that are slow to read one again.
AWAKE = "unsigned sleep(unsigned seconds) { return 0 * seconds; }\n"
#: How many KiB at the beginning are written then: a table's header, a file system's superblock.
WRITERS = {"sgdisk": 1, "mkfs.vfat": 2, "mkfs.ext4": 2}
#: As udev does on a board: a link by name for each partition.
UDEV = """#!/bin/sh
mkdir -p /dev/disk/by-partlabel
for part in DISKp*; do
  name=$(blkid -p -s PART_ENTRY_NAME -o value "$part") || continue
  ln -sfn "$part" "/dev/disk/by-partlabel/$name"
done
"""
#: File of disko's own folder, which is there to forget what the disk held.
FORGET = """#!/bin/sh
step wipefs
for device in "$(readlink -f "$1")"p* "$(readlink -f "$1")"; do
  test ! -b "$device" || wipefs --all --force --quiet "$device"
done
"""
#: Many a kernel of a build machine has no vfat: its partition is a folder that outlives a mount.
MOUNT = """#!/bin/sh
case "$*" in *" -t "*) step "first mount" ;; *) step mount ;; esac
case "$*" in
*disk-orin-boot*)
  set -- $(blkid -o value -s TYPE -s LABEL /dev/disk/by-partlabel/disk-orin-boot)
  test "$*" = "ESP vfat" || test "$*" = "vfat ESP" || exit 1
  mkdir -p /mnt/boot FOLDER/esp && exec /usr/bin/mount --bind FOLDER/esp /mnt/boot ;;
*) exec /usr/bin/mount "$@" ;;
esac
"""
#: Copies a system path by path, each whole or not there, as nixos-install copies a store.
COPY = """#!/bin/sh
set -e
mkdir -p /mnt/nix/store
for n in $(seq PATHS); do
  test ! -e /mnt/nix/store/$n || continue
  echo "path $n" >/mnt/nix/store/$n.new
  step "copy of $n"
  mv /mnt/nix/store/$n.new /mnt/nix/store/$n
  echo "$n" >>FOLDER/copied
done
step entry
echo "$@" >/mnt/boot/entry
"""
PATHS = 4
#: systemd, as far as the installer asks: a unit is a process that no terminal ends, and who starts
#: it waits for its end.
CTL = """#!/bin/sh
works() { grep -q '^State:.[^Z]' "/proc/$(cat FOLDER/unit)/status" 2>/dev/null; }
case "$*" in
*start*)
  if ! test -e FOLDER/unit; then
    setsid python3 FOLDER/program.py @/run/orin-installation >>FOLDER/journal 2>&1 </dev/null &
    echo $! >FOLDER/unit
  fi
  while works; do sleep 0.1; done
  grep -q 'done. ssh' FOLDER/journal ;;
*)
  test -e FOLDER/unit || { echo inactive; exit; }
  works && echo activating && exit
  grep -q 'done. ssh' FOLDER/journal && echo active || echo failed ;;
esac
"""
#: The stick's boot, its `/mnt` empty. It is on while the unit works, or somebody watches.
BOOT = """mount --make-rprivate / && mount -t tmpfs none /mnt && mkdir -p /dev/disk &&
mount -t tmpfs none /dev/disk && mount -t tmpfs none /run &&
partprobe DISK && udevadm && { python3 "$@"; code=$?
while systemctl is-active | grep -q activating || pgrep -f "python3 $1 --yes" >/dev/null
do sleep 0.1; done; exit $code; }
"""
#: The unit runs the same program, which knows the disk. The page cache outlives these cuts, so that
#: a sync is a step and no more.
START = """import subprocess, sys
sys.path.insert(0, INSTALLER)
import install
install.installable_disks = lambda _: [install.Disk("nvme", "DISK", 1200 << 20, "loop")]
caller = lambda: sys._getframe(2).f_code.co_name
install.os.sync = lambda: subprocess.run(["step", f"sync of {caller()}"])
install.time.sleep = lambda seconds, sleep=install.time.sleep: sleep(seconds / 20)
install.__file__ = __file__
install.main()
"""


class Stick:
    """The installer on its stick, in a mount namespace of its own, for one disk."""

    def __init__(self, folder: Path, disk: str) -> None:
        self.folder, self.disk = folder, disk
        script = recorded()[DISK].replace(
            "/nix/store/any/disk-deactivate", "FOLDER/disk-deactivate"
        )
        files = {
            "script": f"#!/usr/bin/env bash\n{script}",
            "disk-deactivate": FORGET,
            "program.py": START.replace("INSTALLER", repr(str(PROGRAM.parent))),
            "tools/step": STEP,
            "tools/udevadm": UDEV,
            "tools/mount": MOUNT,
            "tools/nixos-install": COPY.replace("PATHS", str(PATHS)),
            "tools/systemctl": CTL,
            "tools/journalctl": "#!/bin/sh\necho >FOLDER/watched\nexec sleep 1000\n",
            "flake/flake.nix": "{ }\n",
            "awake.c": AWAKE,
            "root/proc/self/mounts": "",
        }
        for name, kept in WRITERS.items():
            text = WRITES.replace("PROGRAM", str(shutil.which(name))).replace("NAME", name)
            files[f"tools/{name}"] = text.replace("FROM", str(kept))
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            text = text.replace("DISK", disk).replace("FOLDER", str(folder))
            (folder / path).write_text(text)
            (folder / path).chmod(0o755)
        # A link is copied again, too, where a copy was cut.
        (folder / "flake/default.nix").symlink_to("flake.nix")
        library = ["cc", "-shared", "-fPIC", "-o", str(folder / "awake.so")]
        subprocess.run([*library, str(folder / "awake.c")], check=True)
        self.pipes = {}
        for name in ("reached", "go", "watched"):
            os.mkfifo(folder / name)
            self.pipes[name] = os.open(folder / name, os.O_RDWR | os.O_NONBLOCK)
        job = {**KEYS, "flake": str(folder / "flake"), "script": str(folder / "script")}
        self.environment = {
            **os.environ,
            "ORIN_INSTALL": json.dumps({**job, "system": CARRIED}),
            "PATH": f"{folder}/tools:{os.environ['PATH']}:/usr/sbin",
        }

    def start(self, *arguments: str, stop: str = "") -> subprocess.Popen[bytes]:
        """Boot the stick and run the command that also goes on."""
        (self.folder / "stop").write_text(f"{stop}\n")
        shutil.rmtree(self.folder / "steps", ignore_errors=True)
        (self.folder / "steps").mkdir()
        for name in ("names", "unit"):
            (self.folder / name).unlink(missing_ok=True)
        given = [*arguments] or ["--yes"]
        boot = BOOT.replace("DISK", self.disk)
        program = [str(self.folder / "program.py"), *given, "--no-reboot"]
        namespaces = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        return subprocess.Popen(
            ["unshare", *namespaces, "sh", "-c", boot, "sh", *program],
            env=self.environment,
            stdout=(self.folder / "log").open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def told(self, machine: subprocess.Popen[bytes], what: str = "reached") -> bool:
        """True once the machine says it, False where it has ended before."""
        while machine.poll() is None:
            if select.select([self.pipes[what]], [], [], 0.2)[0]:
                return bool(os.read(self.pipes[what], 1))
        return False

    def go_on(self, machine: subprocess.Popen[bytes], stop: str) -> None:
        """Let the step go on that waits, up to the next that does."""
        (self.folder / "stop").write_text(f"{stop}\n")
        os.write(self.pipes["go"], b"\n")

    def watch(self, machine: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Log in once more, and run the command."""
        command = ["nsenter", "--mount", "--pid", "--target", first_inside(machine), "python3"]
        program = [str(self.folder / "program.py"), "--yes", "--no-reboot"]
        log = (self.folder / "log").open("ab")
        return subprocess.Popen([*command, *program], env=self.environment, stdout=log, stderr=log)

    def names(self) -> list[str]:
        """Steps of the last boot, numbered by kind."""
        return (self.folder / "names").read_text().splitlines()

    def journal(self) -> str:
        """Words of the unit, and of those who watched it."""
        logs = [self.folder / name for name in ("journal", "log")]
        return "".join(path.read_text() for path in logs if path.exists())


def first_inside(machine: subprocess.Popen[bytes]) -> str:
    """The process whose end is the end of all, and of their mounts."""
    return Path(f"/proc/{machine.pid}/task/{machine.pid}/children").read_text().split()[0]


def assert_installed(stick: Stick) -> None:
    """A host is on the disk: its labels, its flake, all of its store, its boot entry."""
    inspect = (
        f"mount {stick.disk}p2 /mnt && findmnt --noheadings --output LABEL,FSTYPE /mnt && "
        "ls /mnt/etc/nixos && ls /mnt/nix/store | wc -l && ls -A /mnt | grep -c orin-install; true"
    )
    command = ["unshare", "--mount", "sh", "-c", inspect]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    flake = ["default.nix", "flake.nix"]
    assert said.split() == ["nixos", "ext4", *flake, str(PATHS), "0"], stick.journal()
    entry = (stick.folder / "esp/entry").read_text()
    assert entry == f"--root /mnt --system {CARRIED} --no-root-passwd --no-channel-copy\n"
