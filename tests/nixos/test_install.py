"""The installer makes a disk that the host starts from: on a loop device, by disko's own script."""

import importlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.nixos.recorded import disk_script, recorded

install = importlib.import_module("install")
PROGRAM = Path(str(install.__file__))
TOOLS = ("sgdisk", "partprobe", "mkfs.vfat", "mkfs.ext4", "jq", "losetup", "unshare")
KEYS = {"host": "orin-minimal", "name": "orin-1", "user": "orin", "labels": ["ESP", "nixos"]}


def board(root: Path, route: bool = True, **disks: int) -> Path:
    """A board of files: sizes in bytes by device name."""
    for name, size in disks.items():
        block = root / "sys/class/block" / name
        (block / "device").mkdir(parents=True)
        (block / "size").write_text(f"{size // 512}\n")
        (block / "device/model").write_text("Samsung SSD\n")
    (root / "proc/net").mkdir(parents=True)
    line = "eth0\t00000000\t0101A8C0\n" if route else ""
    (root / "proc/net/route").write_text("Iface\tDestination\tGateway\n" + line)
    return root


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A flake in a store that is read-only, and a disko that leaves word."""
    flake = tmp_path / "store"
    (flake / "nixos").mkdir(parents=True)
    (flake / "flake.nix").write_text("{ }\n")
    (flake / "flake.nix").chmod(0o444)
    (flake / "nixos").chmod(0o555)
    script = tmp_path / "script"
    script.write_text(f'#!/bin/sh\necho "$0 $@" >>{tmp_path}/word\n')
    script.chmod(0o755)
    disks = [
        {"name": "nvme", "device": "/dev/nvme0n1", "script": str(script)},
        {"name": "emmc", "device": "/dev/mmcblk0", "script": str(script)},
    ]
    monkeypatch.setenv("ORIN_INSTALL", json.dumps({**KEYS, "flake": str(flake), "disks": disks}))
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nixos-install").write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/word\n')
    (tools / "lsblk").write_text('#!/bin/sh\necho "{\\"blockdevices\\": [${TWIN:-}]}"\n')
    for each in tools.iterdir():
        each.chmod(0o755)
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
    nixos = root / "mnt/etc/nixos"
    assert (job / "word").read_text().splitlines() == [
        f"{job}/script --yes-wipe-all-disks",
        f"--root {root}/mnt --flake path:{nixos}#orin-minimal --no-root-passwd --no-channel-copy",
    ]
    # Its owner can edit it there.
    assert (nixos / "flake.nix").stat().st_mode & 0o200 and nixos.stat().st_mode & 0o200


def test_what_cannot_be_is_one_line_and_writes_nothing(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = board(job / "bare")
    line = refusal(capsys, bare, "--yes")
    assert "no disk nvme (/dev/nvme0n1), emmc (/dev/mmcblk0)" in line
    emmc = board(job / "emmc", mmcblk0=63_652_757_504)
    assert "this board has no disk nvme: plug in" in refusal(capsys, emmc, "--disk", "nvme")
    alone = board(job / "alone", route=False, nvme0n1=10**12)
    assert "there is no network" in refusal(capsys, alone, "--yes")
    monkeypatch.setattr("builtins.input", lambda _: "Y")
    assert "stopped: nothing was written" in refusal(capsys, emmc)
    twin = {"path": "/dev/mmcblk0p2", "label": "nixos", "pkname": "mmcblk0"}
    monkeypatch.setenv("TWIN", json.dumps(twin))
    both = board(job / "both", nvme0n1=10**12, mmcblk0=10**11)
    assert "/dev/mmcblk0p2 has the label nixos too" in refusal(capsys, both, "--yes")
    assert not (job / "word").exists()


def test_two_consoles_do_not_install_at_once(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = board(job / "root", nvme0n1=10**12)
    with install.alone(root):
        assert "another console is installing" in refusal(capsys, root, "--yes")
    assert not (job / "word").exists()
    install.main(["--yes", "--no-reboot"], root=root)
    assert (job / "word").exists()


def test_a_step_that_fails_is_named(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job / "script").write_text("#!/bin/sh\nexit 3\n")
    root = board(job / "root", nvme0n1=10**12)
    line = refusal(capsys, root, "--yes", code=1)
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
  ln -sfn "$part" "/dev/disk/by-partlabel/$(blkid -p -s PART_ENTRY_NAME -o value "$part")"
done
"""
#: Files of disko's own folder, which is there to forget what the disk held.
FORGET = '#!/bin/sh\nwipefs --all "$1"\n'
#: Many a kernel of a build machine has no vfat.
MOUNT = """#!/bin/sh
case "$*" in
*vfat*) mkdir "$2" && echo "$2" "$(blkid -o value -s TYPE -s LABEL "$1" | xargs)" >>WORD ;;
*) exec /usr/bin/mount "$@" ;;
esac
"""
INSPECT = """#!/bin/sh
findmnt --noheadings --output TARGET,LABEL,FSTYPE,OPTIONS /mnt | cut -d, -f1-2 >>WORD
ls /mnt/etc/nixos >>WORD
"""


def test_both_disks_are_made_the_same_way() -> None:
    nvme, emmc = (recorded()[disk_script(name)] for name in ("nvme", "emmc"))
    assert nvme.count("/dev/nvme0n1") > 5
    assert nvme.replace("nvme0n1", "mmcblk0").replace("nvme", "emmc") == emmc


def test_the_host_finds_its_file_systems_by_their_labels(tmp_path: Path, disk: str) -> None:
    """In a mount namespace, from the script that the flake evaluates to."""
    text = recorded()[disk_script("nvme")].replace("/dev/nvme0n1", disk)
    tools = tmp_path / "tools"
    tools.mkdir()
    files = {
        "script": "#!/usr/bin/env bash\n"
        + text.replace("/nix/store/disk-deactivate", str(tmp_path / "tools")),
        "tools/disk-deactivate": FORGET,
        "tools/udevadm": UDEV.replace("DISK", disk),
        "tools/mount": MOUNT.replace("WORD", str(tmp_path / "word")),
        "tools/nixos-install": INSPECT.replace("WORD", str(tmp_path / "word")),
    }
    for path, content in files.items():
        (tmp_path / path).write_text(content)
        (tmp_path / path).chmod(0o755)
    (tmp_path / "flake").mkdir()
    (tmp_path / "flake/flake.nix").write_text("{ }\n")
    disks = [{"name": "nvme", "device": disk, "script": str(tmp_path / "script")}]
    job = json.dumps({**KEYS, "flake": str(tmp_path / "flake"), "disks": disks})
    start = (
        "mount -t tmpfs none /mnt && mkdir -p /dev/disk && mount -t tmpfs none /dev/disk && exec"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{start} python3 "$0" --yes --no-reboot', str(PROGRAM)],
        env={**os.environ, "ORIN_INSTALL": job, "PATH": f"{tools}:{os.environ['PATH']}:/usr/sbin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "word").read_text().split() == [
        *("/mnt/boot", "ESP", "vfat"),
        *("/mnt", "nixos", "ext4", "rw,noatime"),
        "flake.nix",
    ]
