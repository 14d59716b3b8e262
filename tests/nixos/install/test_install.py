"""The installer makes a disk that the host starts from, whatever interrupts it: on loop devices."""

import fcntl
import hashlib
import importlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.nixos.recorded import DISK, recorded

install = importlib.import_module("install")
PROGRAM = Path(str(install.__file__))
TOOLS = ("sgdisk", "partprobe", "mkfs.vfat", "mkfs.ext4", "jq", "losetup", "unshare", "setsid")
KEYS = {"host": "orin-minimal", "name": "orin-1", "user": "orin", "labels": ["ESP", "nixos"]}
CARRIED = "/nix/store/any-nixos-system"


def board(root: Path, **disks: int) -> Path:
    """A board of files: sizes in bytes by device name."""
    for name, size in disks.items():
        block = root / "sys/class/block" / name
        (block / "device").mkdir(parents=True)
        (block / "size").write_text(f"{size // 512}\n")
        (block / "device/model").write_text("Samsung SSD\n")
        (block / "device/type").write_text("SD\n" if name == "mmcblk1" else "MMC\n")
    (root / "sys/class/block").mkdir(parents=True, exist_ok=True)
    (root / "proc/self").mkdir(parents=True)
    (root / "run").mkdir()
    (root / "proc/self/mounts").write_text("/dev/sda1 /iso iso9660 ro 0 0\n")
    return root


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A flake in a store that is read-only, a disko and a systemd that leave word."""
    flake = tmp_path / "store"
    (flake / "nixos").mkdir(parents=True)
    (flake / "flake.nix").write_text("{ }\n")
    (flake / "flake.nix").chmod(0o444)
    (flake / "nixos").chmod(0o555)
    tools = tmp_path / "tools"
    tools.mkdir()
    word = tmp_path / "word"
    scripts = {
        "script": f'echo "script $@" >>{word}',
        "nixos-install": f'echo "$@" >>{word}',
        "lsblk": 'echo "{\\"blockdevices\\": [${TWIN:-}]}"',
        "systemctl": f'test $1 = is-active && echo inactive || echo "systemctl $@" >>{word}',
        "journalctl": "exec true",
        "umount": "exec true",
        # As iproute2 writes them, with a kernel that shows its route to nowhere.
        "ip": 'test "$1" != "${ROUTE:--4}" || echo "default via fe80::1 dev eth0 metric 100"\n'
        'test "$1" = -4 || echo "unreachable default dev lo metric 4294967295 error -101"',
    }
    for name, text in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    given = {**KEYS, "flake": str(flake), "script": str(tools / "script"), "system": None}
    monkeypatch.setenv("ORIN_INSTALL", json.dumps(given))
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return tmp_path


def refusal(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str, code: int = 2) -> str:
    with pytest.raises(SystemExit) as stop:
        install.main(list(arguments), root=root)
    assert stop.value.code == code
    error = capsys.readouterr().err
    assert error.strip().count("\n") == 0, error
    return error


def test_one_yes_and_the_rest_needs_nobody(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = board(job / "root", nvme0n1=1_000_204_886_016, mmcblk0=63_652_757_504)
    answers = iter(["yes"])
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    install.main(["--no-reboot"], root=root)
    assert next(answers, None) is None
    said = capsys.readouterr().out
    assert "erases   /dev/nvme0n1: Samsung SSD, 1000 GB, all of it" in said
    assert "ssh orin@orin-1.local" in said
    started = "systemctl --quiet start orin-installation.service\n"
    assert (job / "word").read_text() == started
    work = (root / "run/orin-installation").read_text().splitlines()
    assert work == ["--work", "--disk", "/dev/nvme0n1", "--no-reboot"]
    wifi = root / "etc/NetworkManager/system-connections/attic.nmconnection"
    wifi.parent.mkdir(parents=True)
    wifi.write_text("[wifi-security]\npsk=correct-horse\n")
    install.main([f"@{root}/run/orin-installation"], root=root)
    nixos = root / "mnt/etc/nixos"
    assert (job / "word").read_text().removeprefix(started).splitlines() == [
        "script --yes-wipe-all-disks",
        f"--root {root}/mnt --flake path:{nixos}#orin-minimal --no-root-passwd --no-channel-copy",
    ]
    # Its owner can edit it there, and it joins the network that it was installed over.
    assert (nixos / "flake.nix").stat().st_mode & 0o200 and nixos.stat().st_mode & 0o200
    kept = root / "mnt" / wifi.relative_to(root)
    assert kept.read_text() == wifi.read_text() and kept.stat().st_mode & 0o777 == 0o600
    assert not (root / "mnt/.orin-install").exists()


#: The first two lines of `nmcli --get-values 802-11-wireless.ssid,802-11-wireless-security.psk`,
#: as NetworkManager 1.42 writes them, by the name of the file; and what is in there.
WIFI = {
    "attic": ('Caf\u00e9\na\\b;"c%12', "ssid=Caf\u00e9"),
    "open": ("o\n", "ssid=o"),
    "work": ("w\n", "ssid=w\n[wifi-security]\nkey-mgmt=wpa-eap"),
    "short": ("s\n1234567", "ssid=s"),
    "latin": ("C\u00e9\n12345678", "ssid=67;233;"),
    "refused": ("", "ssid="),
}


@pytest.mark.skipif(not shutil.which("wpa_passphrase"), reason="apt-get install wpasupplicant")
def test_a_host_of_networkd_keeps_the_wifi(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In wpa_supplicant's words, for its eyes alone; what it has none for is said."""
    given = {**json.loads(os.environ["ORIN_INSTALL"]), "supplicant": True}
    root = board(job / "root", nvme0n1=10**12)
    told = root / "etc/NetworkManager/system-connections"
    told.mkdir(parents=True)
    for name, (shown, keyfile) in WIFI.items():
        (told / f"{name}.nmconnection").write_text(f"[wifi]\n{keyfile}\n")
        (told / f"{name}.nmconnection.shown").write_text(f"{shown}\n")
    (told / "wire.nmconnection").write_text("[ethernet]\n")
    (told / "noise.nmconnection").write_bytes(b"\xff")
    (job / "tools/nmcli").write_text('#!/bin/sh\nfor path; do :; done\ncat "$path.shown"\n')
    (job / "tools/nmcli").chmod(0o755)
    disk = install.choose_disk(install.disks(root), None)
    install.install(install.Job(**given), disk, root)
    kept = root / "mnt/etc/wpa_supplicant/imperative.conf"
    text = kept.read_text()
    assert text.count("network={") == 1 and '\tssid="Caf\u00e9"\n' in text
    # What WPA2 takes, and WPA3, which has no key without the password.
    key = hashlib.pbkdf2_hmac("sha1", b'a\\b;"c%12', "Caf\u00e9".encode(), 4096, 32).hex()
    assert f"\tpsk={key}\n" in text and '\tsae_password="a\\b;"c%12"\n' in text
    assert kept.stat().st_mode & 0o777 == 0o600 and kept.parent.stat().st_mode & 0o777 == 0o700
    assert not (root / "mnt/etc/NetworkManager").exists()
    lost = re.findall("Wi-Fi (.*) is not kept", capsys.readouterr().out)
    assert lost == ["latin", "open", "refused", "short", "work"]


def test_what_cannot_be_is_one_line_and_writes_nothing(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = board(job / "bare", sda=10**10)
    assert "this board has no disk at all: there is none" in refusal(capsys, bare, "--yes")
    emmc = board(job / "emmc", mmcblk0=63_652_757_504, mmcblk1=10**11)
    line = refusal(capsys, emmc, "--disk", "nvme")
    assert "no disk nvme: there is emmc (/dev/mmcblk0), sd (/dev/mmcblk1)" in line
    alone = board(job / "alone", nvme0n1=10**12)
    monkeypatch.setenv("ROUTE", "none")
    assert "there is no network" in refusal(capsys, alone, "--yes")
    monkeypatch.delenv("ROUTE")
    monkeypatch.setattr("builtins.input", lambda _: "Y")
    assert "stopped: nothing was written" in refusal(capsys, emmc)
    twin = {"path": "/dev/mmcblk0p2", "label": "nixos", "pkname": "mmcblk0"}
    monkeypatch.setenv("TWIN", json.dumps(twin))
    both = board(job / "both", nvme0n1=10**12, mmcblk0=10**11)
    assert "/dev/mmcblk0p2 has the label nixos too" in refusal(capsys, both, "--yes")
    assert not (job / "word").exists()


@pytest.mark.parametrize("stop", [EOFError, KeyboardInterrupt, "noise"])
def test_who_does_not_answer_has_agreed_to_nothing(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stop: object
) -> None:
    """A closed line, Ctrl-C, and a serial line's noise."""

    def answer(_: str) -> str:
        if isinstance(stop, str):
            return b"\xff".decode()
        raise stop  # type: ignore[misc]

    monkeypatch.setattr("builtins.input", answer)
    root = board(job / "root", nvme0n1=10**12)
    assert "nobody answered: nothing was written" in refusal(capsys, root)
    assert not (job / "word").exists()


def test_networks_are_kept_whatever_lies_beside_them(job: Path) -> None:
    """A folder and a link to nowhere, which a copy of the whole stopped at."""
    source = job / "root" / install.CONNECTIONS
    (source / "folder").mkdir(parents=True)
    (source / "nowhere").symlink_to("/nowhere")
    (source / "attic").write_text("[wifi]\n")
    given = install.Job(**json.loads(os.environ["ORIN_INSTALL"]))
    install.keep_networks(given, job / "root", job / "mnt")
    (kept,) = (job / "mnt" / install.CONNECTIONS).iterdir()
    assert kept.read_text() == "[wifi]\n" and kept.stat().st_mode & 0o777 == 0o600
    assert kept.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("wanted", "device"),
    [(None, "/dev/mmcblk0"), ("sd", "/dev/mmcblk1"), ("usb", "/dev/sdb"), ("/dev/sdb", "/dev/sdb")],
)
def test_any_disk_but_the_stick_itself(
    job: Path, monkeypatch: pytest.MonkeyPatch, wanted: str | None, device: str
) -> None:
    """A network of IPv6 alone will do, and a stick with the system on it needs none."""
    names = {"mmcblk0": 10**11, "mmcblk1": 10**11, "sda": 10**10, "sdb": 10**12}
    # A reader without a card, and a path to a disk that goes by another name.
    names |= {"sdc": 0, "nvme0c0n1": 10**12}
    root = board(job / "root", **names)
    monkeypatch.setenv("ROUTE", "-6")
    install.main(["--yes", *(["--disk", wanted] if wanted else [])], root=root)
    assert (root / "run/orin-installation").read_text().endswith(f"--disk\n{device}")


def test_what_is_installed_is_not_erased_by_who_asks_again(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a line that dropped, with the same `--yes`; `--erase` means it."""
    root = board(job / "root", nvme0n1=10**12)
    (job / "tools/systemctl").write_text(
        f'#!/bin/sh\ntest $1 = is-active && echo active || echo "$@" >>{job}/word\n'
    )
    install.main(["--yes"], root=root)
    assert "orin-minimal is installed" in capsys.readouterr().out
    assert not (job / "word").exists()
    install.main(["--yes", "--erase"], root=root)
    assert (job / "word").read_text() == "--quiet restart orin-installation.service\n"
    assert (root / "run/orin-installation").read_text().endswith("--erase")


def test_a_late_answer_ends_no_installation_of_another(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The serial console asks by itself, and ssh may have answered long before."""
    root = board(job / "root", nvme0n1=10**12)
    states = iter(["inactive", "active"])
    monkeypatch.setattr(install, "state", lambda: next(states))
    install.main(["--yes", "--erase"], root=root)
    assert (job / "word").read_text() == "systemctl --quiet start orin-installation.service\n"
    assert not (root / "run/orin-installation").exists()


@pytest.mark.parametrize("damage", [b"\xff", None])
def test_what_cannot_be_read_is_made_anew(job: Path, damage: bytes | None) -> None:
    """A file of noise, and one that is a folder: a power cut may spoil a file system."""
    root = board(job / "root", nvme0n1=10**12)
    labels = root / "dev/disk/by-partlabel"
    labels.mkdir(parents=True)
    for name in ("root", "boot"):
        (labels / f"disk-orin-{name}").symlink_to("/dev/nvme0n1p1")
    begun = root / "mnt/.orin-install"
    begun.parent.mkdir()
    begun.write_bytes(damage) if damage else begun.mkdir()
    given = install.Job(**json.loads(os.environ["ORIN_INSTALL"]))
    assert not install.mount_begun(given, install.disks(root)[0], root)


def test_a_step_that_fails_is_named_and_two_do_not_work_at_once(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = board(job / "root", nvme0n1=10**12)
    (job / "tools/systemctl").write_text("#!/bin/sh\nexit 3\n")
    assert "it failed; the same command goes on" in refusal(capsys, root, "--yes", code=3)
    (job / "tools/script").write_text("#!/bin/sh\nexit 3\n")
    line = refusal(capsys, root, "--work", code=1)
    assert "making file systems on /dev/nvme0n1 failed with 3" in line
    assert not (job / "word").exists()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[str]:
    """An empty disk of 1.2 GB: a loop device."""
    if os.geteuid() != 0:
        pytest.skip("loop devices need root: run pytest as root")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"{', '.join(missing)}: apt-get install gdisk parted dosfstools jq")
    image = tmp_path / "disk.img"
    with image.open("wb") as file:
        file.truncate(1200 << 20)
    command = ["losetup", "--find", "--partscan", "--show", str(image)]
    # Who looks at all disks holds them open, and sgdisk of another test then finds its own busy.
    with Path(tempfile.gettempdir(), "orin-loop-devices.lock").open("w") as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"no loop device here: {made.stderr.strip()}")
        yield made.stdout.strip()
        subprocess.run(["losetup", "--detach", made.stdout.strip()], check=True)


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
install.disks = lambda _: [install.Disk("nvme", "DISK", 1200 << 20, "loop")]
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


def test_power_that_goes_at_any_step_costs_a_rerun(tmp_path: Path, disk: str) -> None:
    """One disk, whose power goes at a step after the other, and while a program writes."""
    stick = Stick(tmp_path, disk)
    whole = stick.start()
    assert whole.wait(240) == 0, stick.journal()
    assert_installed(stick)
    steps = stick.names()
    made = steps.index("sync of make_disk 2") + 1
    assert "mkfs.ext4, in part 1" in steps[:made] and "sync of install 2" in steps[made:]
    # And while what was begun is found again. What is before a writer is behind another step.
    steps[made:made] = ["mount 1", "mount 2"]
    steps = [step for step in steps if not re.fullmatch(r"(sgdisk|mkfs\.\w+|first mount) \d", step)]
    (tmp_path / "copied").unlink()
    for step in steps:
        # As the unit is started; the first erases what was installed.
        erase = ["--erase"] if step == steps[0] else []
        started = stick.start("--work", "--disk", disk, *erase, stop=step)
        assert stick.told(started), f"{step}: {stick.journal()}"
        os.kill(int(first_inside(started)), signal.SIGKILL)
        started.wait()
    # Each path was copied once, and what the last cut left is whole.
    copied = (tmp_path / "copied").read_text().splitlines()
    assert copied == [str(n + 1) for n in range(PATHS)]
    assert_installed(stick)


def test_a_line_that_drops_at_any_step_stops_nothing(tmp_path: Path, disk: str) -> None:
    """SIGHUP to whoever watches: the unit goes on, and the next command shows how it ends."""
    stick = Stick(tmp_path, disk)
    steps = ["wipefs 1", "mkfs.ext4 1", "sync of make_disk 2", "copy of 2 1", "sync of install 2"]
    machine = stick.start(stop=steps[0])
    for step, following in zip(steps, [*steps[1:], ""], strict=True):
        assert stick.told(machine) and stick.told(machine, "watched"), f"{step}: {stick.journal()}"
        subprocess.run(
            ["pkill", "-HUP", "--full", f"python3 {tmp_path}/program.py --yes"], check=True
        )
        watcher = stick.watch(machine)
        stick.go_on(machine, following)
    # This one came before the end or after it.
    assert watcher.wait(240) == 0 and machine.wait(240) == 129, stick.journal()
    assert_installed(stick)
    assert stick.journal().count("making file systems") == 1
