"""Probe of the running nvgpu and nvmap, without tinygrad and without the simulator.

A client of its own, written from the numbers of the public headers (L4T uapi nvgpu.h, nvgpu-as.h,
nvgpu-ctrl.h, nvmap.h) so that driver, model and probe can be wrong only separately. Every call is
harmless: it asks, or it is refused, or what it makes is closed again. A request number carries the
size of its struct, and a number of another size is unknown to the driver (ENOTTY), which is how
sizes are checked.

Standard library only: `python3 abi_probe.py` prints one JSON object.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

CTRL, NVMAP = "/dev/nvgpu/igpu0/ctrl", "/dev/nvmap"
# sizeof(struct nvgpu_gpu_characteristics) by L4T release.
RELEASES = {312: "r35", 328: "r36", 336: "r38", 344: "r39"}
# Offset of each member in r36 and its struct format. r35 lacks 8 bytes before L2_cache_size's, and
# r38 and r39 have 8 more behind big_page_size's; `member_offset_shift` says so.
MEMBERS = {
    "arch": (0, "I"),
    "impl": (4, "I"),
    "rev": (8, "I"),
    "num_gpc": (12, "I"),
    "l2_cache_size": (24, "Q"),
    "num_tpc_per_gpc": (40, "I"),
    "big_page_size": (48, "I"),
    "flags": (64, "Q"),
    "compute_class": (80, "I"),
    "gpfifo_class": (84, "I"),
    "dma_copy_class": (92, "I"),
    "gpc_mask": (96, "I"),
    "sm_arch_sm_version": (100, "I"),
    "sm_arch_spa_version": (104, "I"),
    "sm_arch_warp_count": (108, "I"),
    "gpu_va_bit_count": (122, "B"),
    "max_freq": (200, "Q"),
    "max_veid_count_per_tsg": (292, "I"),
    "max_gpfifo_entries": (308, "I"),
    "compute_preemption_mode_flags": (212, "I"),
    "default_compute_preempt_mode": (220, "I"),
}
# End of the user addresses: below nvgpu's own 4 GiB and both shader windows of tinygrad's
# interface, and as an earlier effort had it.
VA_START, VA_END, OTHER_VA_END = 0x200000, 0xFC00000000, 0xFFFFE00000
WINDOWS = (0xFD00000000, 0xFF00000000)
PAGE = 4096
DIRECT_KIND_CTRL = 0x100
"""NVGPU_AS_MAP_BUFFER_FLAGS_DIRECT_KIND_CTRL: r35 maps only with it, later releases refuse it."""
READ, WRITE = 2, 1


def ioctl_number(letter: str, nr: int, size: int, direction: int = READ | WRITE) -> int:
    """_IOC of asm-generic/ioctl.h."""
    return direction << 30 | size << 16 | ord(letter) << 8 | nr


@dataclass(frozen=True)
class IoctlCall:
    """One ioctl: the device it is for, its number, its struct, and how it has to end.

    `fmt` and `values` are the argument in struct's words; `expect` is an errno's name or "ok".
    """

    device: str
    name: str
    letter: str
    nr: int
    fmt: str
    values: tuple[int, ...] = ()
    expect: str = "ok"
    direction: int = READ | WRITE

    @property
    def size(self) -> int:
        """Bytes of the struct."""
        return struct.calcsize("<" + self.fmt)

    def argument_bytes(self) -> bytearray:
        """Return the argument; all zeros where no values are given."""
        if not self.values:
            return bytearray(self.size)
        return bytearray(struct.pack("<" + self.fmt, *self.values))


# A descriptor that is surely none.
NO_FD = 0x7FFFFFFF
CALLS = (
    IoctlCall("ctrl", "GET_CHARACTERISTICS", "G", 5, "QQ"),
    IoctlCall("ctrl", "ALLOC_AS", "G", 8, "IiII3Q6I", expect="EINVAL"),
    IoctlCall("ctrl", "GET_TPC_MASKS", "G", 10, "IIQ"),
    IoctlCall("ctrl", "OPEN_CHANNEL", "G", 11, "i", (0x7FFF,), "EINVAL"),
    IoctlCall("ctrl", "NUM_VSMS", "G", 18, "II"),
    IoctlCall("ctrl", "GET_GPU_TIME", "G", 25, "QQ"),
    IoctlCall("ctrl", "GET_ENGINE_INFO", "G", 26, "IIQ"),
    IoctlCall("as", "BIND_CHANNEL", "A", 1, "I", (NO_FD,), "EINVAL"),
    IoctlCall("as", "FREE_SPACE", "A", 3, "QQI3I"),
    IoctlCall("as", "UNMAP_BUFFER", "A", 5, "Q"),
    IoctlCall("as", "ALLOC_SPACE", "A", 6, "QIIQ2I", (1, 3, 0, 0, 0, 0), "EINVAL"),
    IoctlCall("as", "MAP_BUFFER_EX", "A", 7, "IhhII3Q", (0, -1, 0, NO_FD, PAGE, 0, 0, 0), "EBADF"),
    IoctlCall("as", "GET_VA_REGIONS", "A", 8, "QII"),
    IoctlCall("tsg", "EVENT_ID_CTRL", "T", 7, "IIiI", expect="EINVAL"),
    IoctlCall("tsg", "SET_TIMESLICE", "T", 9, "II", expect="EINVAL", direction=WRITE),
    IoctlCall("tsg", "GET_TIMESLICE", "T", 10, "II", direction=READ),
    IoctlCall("tsg", "BIND_CHANNEL_EX", "T", 11, "iI4I", (NO_FD, *[0] * 5), "EINVAL"),
    IoctlCall("tsg", "READ_SINGLE_SM_ERROR_STATE", "T", 12, "IIQQ", (4096, 0, 0, 0), "EINVAL"),
    IoctlCall("tsg", "CREATE_SUBCONTEXT", "T", 18, "IiII", (9, 0, 0, 0), "EINVAL"),
    IoctlCall("channel", "WDT", "H", 119, "II", expect="EINVAL", direction=WRITE),
    IoctlCall("channel", "ALLOC_OBJ_CTX", "H", 108, "IIQ", expect="EINVAL"),
    IoctlCall("channel", "SET_ERROR_NOTIFIER", "H", 111, "QQII", expect="EINVAL"),
    IoctlCall("channel", "SETUP_BIND", "H", 128, "IIIiiI5Q9I4x", (3, *[0] * 19), "EINVAL"),
    IoctlCall("nvmap", "CREATE", "N", 0, "II", (PAGE, 0)),
    IoctlCall("nvmap", "ALLOC", "N", 3, "IIIIi", expect="EINVAL", direction=WRITE),
    IoctlCall("nvmap", "PARAM", "N", 8, "II2I", expect="ENOTTY"),
    IoctlCall("nvmap", "GET_FD", "N", 15, "iI", expect="EINVAL"),
    IoctlCall("nvmap", "GET_AVAILABLE_HEAPS", "N", 25, "Q", direction=READ),
)
# Differences between releases: r35 has no subcontexts to create, a shorter SETUP_BIND, and looks
# for DIRECT_KIND_CTRL before the descriptor.
BY_RELEASE: dict[str, dict[str, dict[str, Any] | None]] = {
    "r35": {
        "MAP_BUFFER_EX": {"expect": "EINVAL"},
        "CREATE_SUBCONTEXT": None,
        "SETUP_BIND": {"fmt": "IIIiiI2Q9I4x", "values": (3, *[0] * 16)},
    }
}


def errno_name(error: OSError) -> str:
    """Return EINVAL and the like."""
    return errno.errorcode.get(error.errno or 0, str(error.errno))


def try_ioctl(fd: int, number: int, argument: bytearray) -> str:
    """Make one ioctl; return "ok" or the errno's name."""
    try:
        fcntl.ioctl(fd, number, argument, True)
    except OSError as error:
        return errno_name(error)
    return "ok"


def run_ioctl(fd: int, letter: str, nr: int, fmt: str, *values: int) -> tuple[Any, ...]:
    """Make an ioctl that has to work; returns the struct afterwards. Raises OSError."""
    argument = bytearray(struct.pack("<" + fmt, *values))
    fcntl.ioctl(fd, ioctl_number(letter, nr, len(argument)), argument, True)
    return struct.unpack("<" + fmt, argument)


def allocate_address_space(ctrl: int, end: int) -> int:
    """ALLOC_AS with unified addresses and no big pages; returns the descriptor."""
    fd: int = run_ioctl(ctrl, "G", 8, "IiII3Q6I", 0, 0, 2, 0, VA_START, end, 0, *[0] * 6)[1]
    return fd


@contextlib.contextmanager
def closing_descriptors(*fds: int) -> Iterator[None]:
    """Close descriptors, whatever happens."""
    try:
        yield
    finally:
        for fd in reversed(fds):
            os.close(fd)


def gpu_characteristics(ctrl: int) -> dict[str, Any]:
    """Return the size of the driver's struct, the release that it tells, and its members."""
    size = run_ioctl(ctrl, "G", 5, "QQ", 0, 0)[0]
    release = RELEASES.get(size, "unknown")
    found: dict[str, Any] = {"size": size, "release": release}
    if release == "unknown":
        return found
    room = bytearray(1024)
    run_ioctl(ctrl, "G", 5, "QQ", len(room), bytearray_address(room))
    for name, (offset, fmt) in MEMBERS.items():
        (found[name],) = struct.unpack_from(
            "<" + fmt, room, offset + member_offset_shift(release, offset)
        )
    return found


def member_offset_shift(release: str, offset: int) -> int:
    """Return how far a member of r36 at `offset` lies elsewhere in another release."""
    if release == "r35" and offset >= 24:
        return -8
    if release in ("r38", "r39") and offset > 48:
        return 8
    return 0


def bytearray_address(room: bytearray) -> int:
    """Return where a buffer lies."""
    return ctypes.addressof((ctypes.c_char * len(room)).from_buffer(room))


def multiprocessor_count(ctrl: int) -> int:
    """Return twice the TPCs that GET_TPC_MASKS shows: an SM 8.7 part has two SMs a TPC."""
    room = bytearray(64)
    size = run_ioctl(ctrl, "G", 10, "IIQ", len(room), 0, bytearray_address(room))[0]
    masks = struct.unpack_from(f"<{min(size, len(room)) // 4}I", room)
    return sum(2 * int(mask).bit_count() for mask in masks)


def try_all_calls(fds: dict[str, int], release: str) -> list[dict[str, Any]]:
    """Make every call of the table with its size and with another; return how each ended."""
    said = []
    for usual in CALLS:
        other = BY_RELEASE.get(release, {}).get(usual.name, {})
        if other is None:
            continue
        made = replace(usual, **other)
        right = ioctl_number(made.letter, made.nr, made.size, made.direction)
        wrong = ioctl_number(made.letter, made.nr, made.size - 4 or 8, made.direction)
        answer = try_ioctl(fds[made.device], right, made.argument_bytes())
        other_size = try_ioctl(fds[made.device], wrong, bytearray(64))
        said.append(
            {
                "device": made.device,
                "name": made.name,
                "number": f"{right:#010x}",
                "size": made.size,
                "answer": answer,
                "expected": made.expect,
                "other_size": other_size,
                "as_expected": answer == made.expect and other_size in ("ENOTTY", "EINVAL"),
            }
        )
    return said


def allocate_dmabuf(nvmap: int, size: int) -> int:
    """CREATE, ALLOC in IOVMM memory, GET_FD, FREE; returns the dmabuf's descriptor."""
    handle = run_ioctl(nvmap, "N", 0, "II", size, 0)[1]
    argument = bytearray(struct.pack("<IIIIi", handle, 1 << 30, 0x09000002, PAGE, 0))
    fcntl.ioctl(nvmap, ioctl_number("N", 3, 20, WRITE), argument, True)
    fd: int = run_ioctl(nvmap, "N", 15, "iI", 0, handle)[0]
    signed = handle - (1 << 32) if handle >= 1 << 31 else handle
    fcntl.ioctl(nvmap, ioctl_number("N", 4, 0, 0), signed)
    return fd


def probe_address_space(ctrl: int, nvmap: int, release: str) -> dict[str, Any]:
    """Answer the question of the address space: which ends work, and where buffers are put.

    The kernel's own region follows the user's end; both shader windows have to lie behind that.
    """
    found: dict[str, Any] = {}
    flags = DIRECT_KIND_CTRL if release == "r35" else 0
    for name, end in (("va_end", VA_END), ("other_va_end", OTHER_VA_END)):
        try:
            placed = probe_buffer_placement(ctrl, nvmap, end, flags)
        except OSError as error:
            placed = {"works": False, "errno": errno_name(error)}
        found[name] = {"end": f"{end:#x}", **placed}
    return found


def probe_buffer_placement(ctrl: int, nvmap: int, end: int, flags: int) -> dict[str, Any]:
    """Make an address space up to `end`, map buffers with `flags`, and say where they are."""
    as_fd = allocate_address_space(ctrl, end)
    with closing_descriptors(as_fd):
        regions = bytearray(24)
        run_ioctl(as_fd, "A", 8, "QII", bytearray_address(regions), len(regions), 0)
        start, page, _, pages = struct.unpack("<QIIQ", regions)
        addresses = []
        for size in (PAGE, 1 << 20, 16 << 20):
            fd = allocate_dmabuf(nvmap, size)
            with closing_descriptors(fd):
                out = run_ioctl(as_fd, "A", 7, "IhhII3Q", flags, -1, 0, fd, PAGE, 0, 0, 0)
                addresses.append((out[7], size))
        low, high = WINDOWS
        return {
            "works": True,
            "region_start": f"{start:#x}",
            "region_end": f"{start + page * pages:#x}",
            "buffers": [f"{address:#x}" for address, _ in addresses],
            "in_windows": any(a < high and a + size > low for a, size in addresses),
            "inside": all(a >= VA_START and a + size <= end for a, size in addresses),
        }


def main() -> None:
    """Print what was found; raises OSError where the nodes do not open."""
    ctrl, nvmap = os.open(CTRL, os.O_RDWR), os.open(NVMAP, os.O_RDWR)
    with closing_descriptors(ctrl, nvmap):
        found = gpu_characteristics(ctrl)
        release = found["release"]
        opened = "IIQQ" if release != "r35" else "II"
        tsg = run_ioctl(ctrl, "G", 9, opened, *[0] * len(opened))[0]
        channel, as_fd = run_ioctl(ctrl, "G", 11, "i", -1)[0], allocate_address_space(ctrl, VA_END)
        fds = {"ctrl": ctrl, "nvmap": nvmap, "tsg": tsg, "channel": channel, "as": as_fd}
        with closing_descriptors(as_fd, tsg, channel):
            calls = try_all_calls(fds, release)
        result = {
            "characteristics": {**found, "sms": multiprocessor_count(ctrl)},
            "calls": calls,
            "unexpected": [entry["name"] for entry in calls if not entry["as_expected"]],
            "windows": probe_address_space(ctrl, nvmap, release),
        }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
