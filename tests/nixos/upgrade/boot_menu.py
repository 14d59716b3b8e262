"""The boot menu that `upgrade.py arm` writes, under the real systemd-boot and a kernel: QEMU."""

import importlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

upgrade = importlib.import_module("upgrade")
FIRMWARE = Path("/usr/share/OVMF")
LOADER = Path("/usr/lib/systemd/boot/efi/systemd-bootx64.efi")
KERNELS = sorted(Path("/boot").glob("vmlinuz-*"))
TOOLS = ("qemu-system-x86_64", "mformat", "mcopy", "mdir", "cpio", "busybox")
SAYS = "ORIN-GOOD"
#: What the good system does; the other has no init, and its kernel panics.
INIT = f"#!/busybox sh\n/busybox echo {SAYS} >/dev/console\n/busybox poweroff -f\n"
MEBIBYTE = 1 << 20
#: Seconds. It ends by itself, after minutes of one processor: an hour is for a busy machine.
HOUR = 3600


def initrd(folder: Path, name: str, init: str | None) -> Path:
    """An initial file system with or without a program to start."""
    root = folder / f"{name}-root"
    (root / "dev").mkdir(parents=True)
    subprocess.run(["mknod", str(root / "dev/console"), "c", "5", "1"], check=True)
    if init is not None:
        shutil.copy(str(shutil.which("busybox")), root / "busybox")
        (root / "init").write_text(init)
        (root / "init").chmod(0o755)
    files = subprocess.run(["find", "."], cwd=root, capture_output=True, check=True).stdout
    made = subprocess.run(
        ["cpio", "--quiet", "-o", "-H", "newc"],
        cwd=root,
        input=files,
        capture_output=True,
        check=True,
    )
    path = folder / f"{name}.img"
    path.write_bytes(made.stdout)
    return path


def menu(folder: Path) -> Path:
    """The boot partition of a board whose newest system has not passed."""
    esp, notes = folder / "esp", folder / "root/var/lib/orin-upgrade"
    for path in (esp / "loader/entries", esp / "EFI/BOOT", esp / "EFI/nixos", notes):
        path.mkdir(parents=True)
    shutil.copy(LOADER, esp / "EFI/BOOT/BOOTX64.EFI")
    shutil.copy(KERNELS[-1], esp / "EFI/nixos/kernel.efi")
    for n, (name, init) in enumerate({"old": INIT, "new": None}.items(), 1):
        system = folder / "store" / name
        system.mkdir(parents=True)
        shutil.copy(initrd(folder, name, init), esp / f"EFI/nixos/{name}.efi")
        (esp / f"loader/entries/nixos-generation-{n}.conf").write_text(
            f"title NixOS\nsort-key nixos\nversion Generation {n}\nlinux /EFI/nixos/kernel.efi\n"
            f"initrd /EFI/nixos/{name}.efi\n"
            f"options init={system}/init console=ttyS0 panic=1 quiet\n"
        )
    (esp / "loader/loader.conf").write_text("timeout 0\ndefault nixos-generation-2.conf\n")
    (notes / "good").write_text(f"{folder}/store/old\n")
    arguments = ["arm", f"{folder}/store/new", "--esp", str(esp), "--root", f"{folder}/root"]
    assert upgrade.main(arguments) == 0
    return esp


@pytest.mark.timeout(HOUR + 60)
def test_a_kernel_that_panics_has_three_tries_and_then_the_good_one_starts(tmp_path: Path) -> None:
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(
            f"{', '.join(missing)}: apt-get install qemu-system-x86 mtools cpio busybox-static"
        )
    if not (LOADER.exists() and KERNELS and (FIRMWARE / "OVMF_CODE_4M.fd").exists()):
        pytest.skip("apt-get install systemd-boot-efi ovmf linux-image-cloud-amd64")
    if os.geteuid() != 0:
        pytest.skip("mknod needs root: run pytest as root")
    disk = tmp_path / "disk"
    with disk.open("wb") as file:
        file.truncate(96 * MEBIBYTE)
    image = ["-i", str(disk)]
    subprocess.run(["mformat", *image, "-F", "::"], check=True)
    subprocess.run(["mcopy", *image, "-s", *menu(tmp_path).iterdir(), "::"], check=True)
    shutil.copy(FIRMWARE / "OVMF_VARS_4M.fd", tmp_path / "vars")
    serial = tmp_path / "serial"
    flash = "if=pflash,format=raw,unit"
    command = [
        *("qemu-system-x86_64", "-machine", "q35,accel=tcg", "-cpu", "max", "-m", "512"),
        *("-display", "none", "-net", "none", "-serial", f"file:{serial}"),
        *("-drive", f"{flash}=0,readonly=on,file={FIRMWARE}/OVMF_CODE_4M.fd"),
        *("-drive", f"{flash}=1,file={tmp_path}/vars"),
        *("-drive", f"if=virtio,format=raw,file={disk}"),
    ]
    machine = subprocess.Popen(command)
    try:
        machine.wait(HOUR)
    finally:
        machine.kill()
        machine.wait()
        said = serial.read_text(errors="replace")
    assert SAYS in said, said[-2000:]
    assert said.count("Kernel panic") == upgrade.TRIES
    assert said.rindex("Kernel panic") < said.index(SAYS)
    listed = subprocess.run(
        ["mdir", "-b", *image, "::/loader/entries"], capture_output=True, text=True
    )
    assert f"orin-next+0-{upgrade.TRIES}.conf" in listed.stdout
