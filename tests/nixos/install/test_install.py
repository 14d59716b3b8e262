"""The installer makes a disk that the host starts from, whatever interrupts it: on loop devices."""

import fcntl
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.nixos.install.stick import KEYS, PATHS, Stick, assert_installed, first_inside

install = importlib.import_module("install")
TOOLS = ("sgdisk", "partprobe", "mkfs.vfat", "mkfs.ext4", "jq", "losetup", "unshare", "setsid")


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
    disk = install.choose_disk(install.installable_disks(root), None)
    install.install(install.InstallJob(**given), disk, root)
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
    given = install.InstallJob(**json.loads(os.environ["ORIN_INSTALL"]))
    install.copy_networks(given, job / "root", job / "mnt")
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
    monkeypatch.setattr(install, "unit_state", lambda: next(states))
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
    given = install.InstallJob(**json.loads(os.environ["ORIN_INSTALL"]))
    assert not install.try_mount_unfinished(given, install.installable_disks(root)[0], root)


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


def test_power_that_goes_at_any_step_costs_a_rerun(tmp_path: Path, disk: str) -> None:
    """One disk, whose power goes at a step after the other, and while a program writes."""
    stick = Stick(tmp_path, disk)
    whole = stick.start()
    assert whole.wait(240) == 0, stick.journal()
    assert_installed(stick)
    steps = stick.names()
    made = steps.index("sync of erase_and_mount 2") + 1
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
    steps = ["wipefs 1", "mkfs.ext4 1", "sync of erase_and_mount 2", "copy of 2 1"]
    steps.append("sync of install 2")
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
