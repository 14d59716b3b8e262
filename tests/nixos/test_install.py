"""The installer makes a disk that the host starts from, whatever interrupts it: on loop devices."""

import importlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.nixos.recorded import DISK, recorded

install = importlib.import_module("install")
PROGRAM = Path(str(install.__file__))
TOOLS = ("sgdisk", "partprobe", "mkfs.vfat", "mkfs.ext4", "jq", "losetup", "unshare", "setsid")
KEYS = {"host": "orin-minimal", "name": "orin-1", "user": "orin", "labels": ["ESP", "nixos"]}
#: Moments of a cut; ORIN_CUTS=20 takes five minutes and leaves no step of the installer out.
POINTS = int(os.environ.get("ORIN_CUTS", "6"))
CARRIED = "/nix/store/any-nixos-system"


def board(root: Path, route: str = "four", **disks: int) -> Path:
    """A board of files: sizes in bytes by device name; `route`: the kind of its default route."""
    for name, size in disks.items():
        block = root / "sys/class/block" / name
        (block / "device").mkdir(parents=True)
        (block / "size").write_text(f"{size // 512}\n")
        (block / "device/model").write_text("Samsung SSD\n")
        (block / "device/type").write_text("SD\n" if name == "mmcblk1" else "MMC\n")
    (root / "sys/class/block").mkdir(parents=True, exist_ok=True)
    (root / "proc/net").mkdir(parents=True)
    (root / "proc/self").mkdir()
    (root / "proc/self/mounts").write_text("/dev/sda1 /iso iso9660 ro 0 0\n")
    line = "eth0\t00000000\t0101A8C0\n" if route == "four" else ""
    (root / "proc/net/route").write_text("Iface\tDestination\tGateway\n" + line)
    # As Linux has it: a route of the loopback that leads nowhere, then the router's.
    nothing, none = "0" * 32, "00000000"
    router = "fe800000000000000000000000000001"
    six = f"{nothing} 00 {nothing} 00 {nothing} ffffffff 00000001 {none} 00200200       lo\n"
    if route == "six":
        six += f"{nothing} 00 {nothing} 00 {router} 00000400 00000001 {none} 00450003     eth0\n"
    (root / "proc/net/ipv6_route").write_text(six)
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
        "systemctl": 'case "$*" in *ExecMain*) echo 0 ;; *) echo dead ;; esac',
        "journalctl": "exec true",
        "systemd-run": f'echo "systemd-run $@" >>{word}',
        "umount": "exec true",
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
    started = (job / "word").read_text()
    assert "--work --disk /dev/nvme0n1 --no-reboot" in started
    wifi = root / "etc/NetworkManager/system-connections/attic.nmconnection"
    wifi.parent.mkdir(parents=True)
    wifi.write_text("[wifi-security]\npsk=correct-horse\n")
    install.main(["--work", "--disk", "/dev/nvme0n1", "--no-reboot"], root=root)
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


@pytest.mark.parametrize(
    ("keyfile", "lines"),
    [
        ('ssid=Caf\u00e9\n[wifi-security]\nkey-mgmt=wpa-psk\npsk=a\\\\b;"c%\n', ['psk="a\\b;"c%"']),
        (
            "ssid=67;97;102;195;169;\n[wifi-security]\nkey-mgmt=sae\npsk=12345678\n",
            ["ieee80211w=2"],
        ),
        (
            f"ssid=Caf\u00e9\n[wifi-security]\nkey-mgmt=wpa-psk\npsk={'0a' * 32}\n",
            ["psk=" + "0a" * 32],
        ),
        ("ssid=Caf\u00e9\nhidden=true\n", ["key_mgmt=NONE", "scan_ssid=1"]),
    ],
)
def test_a_host_of_networkd_keeps_the_wifi(job: Path, keyfile: str, lines: list[str]) -> None:
    """In wpa_supplicant's words, for its eyes alone; a company's login is not kept."""
    given = {**json.loads(os.environ["ORIN_INSTALL"]), "supplicant": True}
    root = board(job / "root", nvme0n1=10**12)
    told = root / "etc/NetworkManager/system-connections"
    told.mkdir(parents=True)
    (told / "attic.nmconnection").write_text(f"[connection]\nid=attic\n[wifi]\n{keyfile}")
    (told / "work.nmconnection").write_text("[wifi]\nssid=w\n[wifi-security]\nkey-mgmt=wpa-eap\n")
    # Its password is asked for at each start.
    asked = "[wifi]\nssid=a\n[wifi-security]\nkey-mgmt=sae\npsk-flags=2\n"
    (told / "asked.nmconnection").write_text(asked)
    (told / "wire.nmconnection").write_text("[ethernet]\n")
    disk = install.choose(install.disks(root), None)
    install.install(install.Job(**given), disk, root)
    kept = root / "mnt/etc/wpa_supplicant/imperative.conf"
    text = kept.read_text()
    # "Caf\u00e9" in UTF-8.
    assert text.count("network={") == 1 and "  ssid=436166c3a9\n" in text
    assert all(f"  {line}\n" in text for line in lines), text
    assert kept.stat().st_mode & 0o777 == 0o600 and kept.parent.stat().st_mode & 0o777 == 0o700
    assert not (root / "mnt/etc/NetworkManager").exists()


def test_what_cannot_be_is_one_line_and_writes_nothing(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = board(job / "bare", sda=10**10)
    assert "this board has no disk: there is none" in refusal(capsys, bare, "--yes")
    emmc = board(job / "emmc", mmcblk0=63_652_757_504, mmcblk1=10**11)
    line = refusal(capsys, emmc, "--disk", "nvme")
    assert "no disk nvme: there is emmc (/dev/mmcblk0), sd (/dev/mmcblk1)" in line
    alone = board(job / "alone", route="", nvme0n1=10**12)
    assert "there is no network" in refusal(capsys, alone, "--yes")
    monkeypatch.setattr("builtins.input", lambda _: "Y")
    assert "stopped: nothing was written" in refusal(capsys, emmc)
    twin = {"path": "/dev/mmcblk0p2", "label": "nixos", "pkname": "mmcblk0"}
    monkeypatch.setenv("TWIN", json.dumps(twin))
    both = board(job / "both", nvme0n1=10**12, mmcblk0=10**11)
    assert "/dev/mmcblk0p2 has the label nixos too" in refusal(capsys, both, "--yes")
    assert not (job / "word").exists()


@pytest.mark.parametrize(
    ("wanted", "device"),
    [(None, "/dev/mmcblk0"), ("sd", "/dev/mmcblk1"), ("usb", "/dev/sdb"), ("/dev/sdb", "/dev/sdb")],
)
def test_any_disk_but_the_stick_itself(job: Path, wanted: str | None, device: str) -> None:
    """A network of IPv6 alone will do, and a stick with the system on it needs none."""
    names = {"mmcblk0": 10**11, "mmcblk1": 10**11, "sda": 10**10, "sdb": 10**12}
    root = board(job / "root", route="six", **names)
    install.main(["--yes", *(["--disk", wanted] if wanted else [])], root=root)
    assert f"--disk {device}" in (job / "word").read_text()


def test_a_step_that_fails_is_named_and_two_do_not_work_at_once(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = board(job / "root", nvme0n1=10**12)
    with install.alone(root):
        assert "runs already" in refusal(capsys, root, "--work")
    (job / "tools/script").write_text("#!/bin/sh\nexit 3\n")
    line = refusal(capsys, root, "--work", code=1)
    assert "making file systems on /dev/nvme0n1 failed with 3" in line
    assert not (job / "word").exists()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[str]:
    """An empty disk of 3 GB: a loop device."""
    if os.geteuid() != 0:
        pytest.skip("loop devices need root: run pytest as root")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"{', '.join(missing)}: apt-get install gdisk parted dosfstools jq")
    image = tmp_path / "disk.img"
    with image.open("wb") as file:
        file.truncate(3 << 30)
    command = ["losetup", "--find", "--partscan", "--show", str(image)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no loop device here: {made.stderr.strip()}")
    yield made.stdout.strip()
    subprocess.run(["losetup", "--detach", made.stdout.strip()], check=True)


#: As udev does on a board: a link by name for each partition.
UDEV = """#!/bin/sh
mkdir -p /dev/disk/by-partlabel
for part in DISKp*; do
  name=$(blkid -p -s PART_ENTRY_NAME -o value "$part") || continue
  ln -sfn "$part" "/dev/disk/by-partlabel/$name"
done
"""
#: File of disko's own folder, which is there to forget what the disk held.
FORGET = '#!/bin/sh\nwipefs --all "$(readlink -f "$1")"p* "$(readlink -f "$1")" || true\n'
#: Many a kernel of a build machine has no vfat: its partition is a folder that outlives a mount.
MOUNT = """#!/bin/sh
case "$*" in
*disk-orin-boot*)
  set -- $(blkid -o value -s TYPE -s LABEL /dev/disk/by-partlabel/disk-orin-boot)
  test "$*" = "ESP vfat" || test "$*" = "vfat ESP" || exit 1
  mkdir -p /mnt/boot FOLDER/esp && exec /usr/bin/mount --bind FOLDER/esp /mnt/boot ;;
*) exec /usr/bin/mount "$@" ;;
esac
"""
#: Copies a system in twenty steps, each whole or not there, as nixos-install copies a store.
COPY = """#!/bin/sh
set -e
mkdir -p /mnt/nix/store
for n in $(seq 20); do
  test ! -e /mnt/nix/store/$n || continue
  echo "path $n" >/mnt/nix/store/$n.new
  mv /mnt/nix/store/$n.new /mnt/nix/store/$n
  echo "$n" >>FOLDER/copied
  sleep 0.05
done
echo "$@" >/mnt/boot/entry
"""
#: systemd, as far as the installer asks: a unit is a process that no terminal ends.
RUN = """#!/bin/sh
while case "$1" in --*) true ;; *) false ;; esac; do shift; done
setsid "$@" >>FOLDER/journal 2>&1 </dev/null &
echo $! >FOLDER/unit
"""
CTL = """#!/bin/sh
state() {
  pid=$(cat FOLDER/unit 2>/dev/null)
  grep -q '^State:.[^Z]' "/proc/$pid/status" 2>/dev/null && echo running || echo exited
}
case "$*" in *SubState*) state ;; *ExecMain*) grep -q 'done. ssh' FOLDER/journal; echo $? ;; esac
"""


class Stick:
    """The installer on its stick, in a mount namespace of its own, for one disk."""

    def __init__(self, folder: Path, disk: str) -> None:
        self.folder, self.disk = folder, disk
        files = {
            "script": "#!/usr/bin/env bash\n"
            + recorded()[DISK].replace("/nix/store/disk-deactivate", str(folder / "tools")),
            "tools/disk-deactivate": FORGET,
            "tools/udevadm": UDEV,
            "tools/mount": MOUNT,
            "tools/nixos-install": COPY,
            "tools/systemd-run": RUN,
            "tools/systemctl": CTL,
            "tools/journalctl": "#!/bin/sh\nexec sleep 1000\n",
            "flake/flake.nix": "{ }\n",
            "root/proc/self/mounts": "",
            "root/proc/net/route": "",
        }
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            text = text.replace("DISK", disk).replace("FOLDER", str(folder))
            (folder / path).write_text(text)
            (folder / path).chmod(0o755)
        self.job = {**KEYS, "flake": str(folder / "flake"), "script": str(folder / "script")}
        self.job["system"] = CARRIED

    def start(self) -> subprocess.Popen[bytes]:
        """Boot the stick, its `/mnt` empty, and run the command that also goes on."""
        prepare = (
            "mount --make-rprivate / && mount -t tmpfs none /mnt && mkdir -p /dev/disk && "
            'mount -t tmpfs none /dev/disk && udevadm && { python3 "$@"; code=$?; '
            # Whoever watches may go; the machine is on for as long as the unit works.
            "while systemctl SubState | grep -q running; do sleep 0.1; done; exit $code; }"
        )
        # The unit runs the same program, which knows the disk.
        code = (
            f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r}); import install\n"
            f"install.disks = lambda _: [install.Disk('nvme', {self.disk!r}, 3 << 30, 'loop')]\n"
            "install.__file__ = __file__; install.main()\n"
        )
        program = self.folder / "program.py"
        program.write_text(code)
        environment = {
            **os.environ,
            "ORIN_INSTALL": json.dumps(self.job),
            "PATH": f"{self.folder}/tools:{os.environ['PATH']}:/usr/sbin",
        }
        arguments = [str(program), "--yes", "--no-reboot"]
        return subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c",
             prepare, "sh", *arguments],
            env=environment,
            stdout=(self.folder / "log").open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def empty(self) -> None:
        """A disk that nothing is on, and no word of what was."""
        parts = [path for n in (1, 2) if (path := Path(f"{self.disk}p{n}")).exists()]
        subprocess.run(["wipefs", "--all", "--quiet", *parts, self.disk], check=True)
        for name in ("copied", "journal", "log", "unit"):
            (self.folder / name).unlink(missing_ok=True)

    def journal(self) -> str:
        """Words of the unit, and of those who watched it."""
        logs = [self.folder / name for name in ("journal", "log")]
        return "".join(path.read_text() for path in logs if path.exists())


def took(stick: Stick) -> float:
    """Seconds that an installation takes that nothing interrupts."""
    begun = time.monotonic()
    assert stick.start().wait(240) == 0, stick.journal()
    return time.monotonic() - begun


def assert_installed(stick: Stick) -> None:
    """A host is on the disk: its labels, its flake, all of its store, its boot entry."""
    inspect = (
        f"mount {stick.disk}p2 /mnt && findmnt --noheadings --output LABEL,FSTYPE /mnt && "
        "ls /mnt/etc/nixos && ls /mnt/nix/store | wc -l && ls -A /mnt | grep -c orin-install; true"
    )
    command = ["unshare", "--mount", "sh", "-c", inspect]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert said.split() == ["nixos", "ext4", "flake.nix", "20", "0"], stick.journal()
    entry = (stick.folder / "esp/entry").read_text()
    assert entry == f"--root /mnt --system {CARRIED} --no-root-passwd --no-channel-copy\n"


def test_the_host_finds_its_file_systems_by_their_labels(tmp_path: Path, disk: str) -> None:
    stick = Stick(tmp_path, disk)
    assert stick.start().wait(240) == 0, stick.journal()
    assert_installed(stick)


def test_power_that_goes_at_any_point_costs_a_rerun(tmp_path: Path, disk: str) -> None:
    """Each time a little later: the disk is made until it is whole, what was copied stays."""
    stick = Stick(tmp_path, disk)
    whole = took(stick)
    for point in range(POINTS):
        stick.empty()
        cut = stick.start()
        time.sleep(whole * (point + 0.5) / POINTS)
        cut.kill()
        cut.wait()
        log = tmp_path / "copied"
        before = log.read_text().splitlines() if log.exists() else []
        again = stick.start()
        assert again.wait(240) == 0, stick.journal()
        assert_installed(stick)
        copied = (tmp_path / "copied").read_text().splitlines()
        assert copied[: len(before)] == before and len(copied) - len(set(copied)) <= 1, copied


def test_a_line_that_drops_at_any_point_stops_nothing(tmp_path: Path, disk: str) -> None:
    """SIGHUP to whoever watches: the unit goes on, and the next command shows how it ends."""
    stick = Stick(tmp_path, disk)
    whole, dropped = took(stick), 0
    for point in range(POINTS):
        stick.empty()
        started = stick.start()
        end = time.monotonic() + 60
        while not (tmp_path / "unit").exists() and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(whole * point / POINTS)
        watcher = f"python3 {tmp_path}/program.py --yes"
        subprocess.run(["pkill", "-HUP", "--full", watcher])
        # One that was about to end is not dropped.
        code = started.wait(240)
        assert code in (0, 129), stick.journal()
        dropped += code == 129
        assert_installed(stick)
        assert stick.journal().count("making file systems") == 1
    assert dropped > 0
