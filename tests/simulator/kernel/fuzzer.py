"""Random lives of a client: valid ioctls, mutated ones, closes and unmaps in any order.

A life is a string of 8-byte steps; each step seeds its own choices, so that hypothesis can shrink a
failing life by dropping steps.
"""

from __future__ import annotations

import ctypes
import os
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from tests.simulator.kernel.conftest import Recorder

from nvgpusim.memory import DmaBuf
from nvgpusim.options import PLACES, PROFILES, Options
from nvgpusim.orin.abi import Ioctl, ioc_nr, ioc_type
from nvgpusim.orin.call_trace import NEW_FDS
from nvgpusim.orin.gpu_api import FaultReport
from nvgpusim.orin.kernel import Kernel
from nvgpusim.orin.kernel.core import NODES
from nvgpusim.orin.rules import KernelError

STEP = 8
KINDS = {"G": "ctrl", "A": "as", "T": "tsg", "H": "channel", "N": "nvmap", "E": "event"}
SIZES = (1, 4096, 5000, 8192, 1 << 16, 3 << 20, 1 << 21, 1 << 29, 5 << 30, 1 << 36)
EDGES = (
    0,
    1,
    2,
    3,
    4,
    8,
    0xA,
    0x7F,
    0xFF,
    0x1000,
    0x8000_0000,
    0xFFFF_FFFF,
    1 << 40,
    (1 << 64) - 1,
)
CLASSES = (0xC7C0, 0xC7B5, 0xC6C0, 0xC797, 0xC76F)
POINTERS = ("addr", "clk_range_entries", "clk_info_entries", "record_mem", "maps")
COPIES = ("NVMAP_READ", "NVMAP_WRITE")
KEEP = 6
"""Open files of a kind before the oldest are closed: keeps a step's checks cheap."""


class Life:
    """One client of one fresh board."""

    def __init__(self, first: int) -> None:
        rng = random.Random(first)
        self.kernel = Kernel(
            Options(
                profile=rng.choice(PROFILES),
                place=rng.choice(PLACES),
                board=rng.choice(("agx64", "nano4")),
                seed=first,
                poison=rng.random() < 0.3,
                inject=("ENOMEM@*:p=0.02", "EINTR@*:p=0.02") if rng.random() < 0.3 else (),
            )
        )
        self.kernel.make_executor, self.kernel.before_kill = Recorder, _spared
        self.ioctls = _ioctls(self.kernel)
        self.fds: dict[str, list[int]] = {kind: [] for kind in (*KINDS.values(), "dmabuf")}
        self.handles: list[int] = []
        self.vas: list[int] = [0x10000000]
        self.cpu = 0x7000_0000_0000
        self.maps: list[tuple[int, int]] = []
        self.space = (ctypes.c_ubyte * 4096)()

    def step(self, rng: random.Random) -> None:
        """One random act, then every invariant."""
        act = rng.random()
        if act < 0.06:
            self._open(rng.choice(sorted(NODES)))
        elif act < 0.12:
            self._close(rng)
        elif act < 0.15:
            self._fault(rng)
        elif act < 0.20:
            self._mmap(rng)
        else:
            self._ioctl(rng)
        self.kernel.check_invariants()
        for kind, fds in self.fds.items():
            while len(fds) > KEEP:
                self._close_fd(kind, fds[0])

    def end(self) -> None:
        """Close everything: the model must be empty afterwards."""
        for start, size in self.maps:
            self.kernel.on_unmapped(start, size)
        for kind in ("channel", "event", "tsg", "as", "dmabuf", "nvmap", "ctrl"):
            for fd in list(self.fds[kind]):
                self._close_fd(kind, fd)
        self.kernel.check_invariants()
        assert not self.kernel.files and not self.kernel.nvmap.handles
        shims = list(self.kernel.dmabufs.values())
        assert not shims, shims
        assert self.kernel.journal.in_use == 0
        assert sorted(self.kernel.channel_ids) == list(range(512))
        assert sorted(self.kernel.tsg_ids) == list(range(512))
        assert len(self.kernel.syncpoints) == 64
        assert not self.kernel.leak_lines()
        self.kernel.stop_and_close_fds()

    def _open(self, path: str) -> None:
        with expected():
            self.fds[NODES[path]].append(self.kernel.open(path))

    def _close_fd(self, kind: str, fd: int) -> None:
        found = self.kernel.find_device_or_dmabuf(fd)
        os.close(fd)
        self.fds[kind].remove(fd)
        self.kernel.release_closed_files()
        if isinstance(found, DmaBuf):
            self.kernel.nvmap.on_fd_closed(found)

    def _close(self, rng: random.Random) -> None:
        kinds = [k for k, fds in self.fds.items() if fds]
        if kinds:
            kind = rng.choice(kinds)
            self._close_fd(kind, rng.choice(self.fds[kind]))

    def _fault(self, rng: random.Random) -> None:
        ports = list(self.kernel.ports.values())
        if ports:
            port = rng.choice(ports)
            if rng.random() < 0.5:
                port.fail(FaultReport(rng.choice((13, 25, 31, 32)), "fuzzed"))
            else:
                port.userd[0x8C] = rng.randrange(256)
                port.post_event(rng.randrange(6))

    def _mmap(self, rng: random.Random) -> None:
        if self.maps and rng.random() < 0.5:
            start, size = self.maps.pop(rng.randrange(len(self.maps)))
            cut = rng.choice((0, 4096))
            self.kernel.on_unmapped(start + cut, size)
            if cut:
                self.maps.append((start, cut))
            return
        kind = rng.choice(("dmabuf", "dmabuf", "ctrl", "as", "nvmap"))
        if not self.fds[kind]:
            return
        size, offset = rng.choice((4096, 8192, 65536)), rng.choice((0, 0, 0, 4096))
        with expected():
            got = self.kernel.fd_to_map(rng.choice(self.fds[kind]), size, offset)
            if got is not None:
                start = self.cpu - rng.choice((0, 0, 4096))
                self.kernel.on_mapped(start, size, got[1])
                self.maps = [m for m in self.maps if m[0] + m[1] <= start or start + size <= m[0]]
                self.maps.append((start, size))
                self.cpu += 1 << 20

    def _ioctl(self, rng: random.Random) -> None:
        known = rng.choice(self.ioctls)
        letter, request = ioc_type(known.number), known.number
        pool = self.fds[KINDS[letter]]
        if not pool:
            if letter != "E":
                self._make(letter)
            return
        fd = rng.choice(pool)
        size = request >> 16 & 0x3FFF
        raw = bytearray(self._fill(known, rng))
        wild = rng.random()
        if wild < 0.03:
            fd = rng.choice([f for fds in self.fds.values() for f in fds] + [0, -1, 9999])
        elif wild < 0.06:
            request ^= 1 << rng.randrange(32)
            size = request >> 16 & 0x3FFF
            raw = raw[:size].ljust(size, b"\xa5")
        elif wild < 0.12 and raw:
            for at in _pick(rng, self._loose(known, len(raw))):
                raw[at] ^= 1 << rng.randrange(8)
        if letter == "H" and ioc_nr(request) == 102 and len(raw) >= 8:
            raw[4:8] = struct.pack("<I", 1)  # milliseconds; 0 would wait for ever
        space = (ctypes.c_ubyte * max(size, 1)).from_buffer(raw or bytearray(1))
        bad = rng.random() < 0.01
        arg = 0x10 if bad else ctypes.addressof(space)
        if not size:
            arg = rng.choice([*self.handles, 0, 5])
            if self.kernel.find_device_or_dmabuf(arg) is not None:
                return
        with expected():
            result = self.kernel.ioctl(fd, request, arg)
            assert result >= 0
            if result == 0 and not bad:
                self._collect(request, raw)

    def _loose(self, known: Ioctl, size: int) -> list[int]:
        """Bytes that may be flipped: a wrong pointer would have our own memory written."""
        if known.arg is None or known.short_name in COPIES:
            return [min(8, size - 1)]
        fields = self.kernel.abi.structs[known.arg].fields
        fixed = [f for name, f in fields.items() if name.endswith(POINTERS)]
        return [i for i in range(size) if not any(f.offset <= i < f.offset + f.size for f in fixed)]

    def _make(self, letter: str) -> None:
        """A file of the kind that has none."""
        if letter == "G":
            self._open("/dev/nvgpu/igpu0/ctrl")
        elif letter == "N":
            self._open("/dev/nvmap")
        else:
            self._open(f"/dev/nvgpu/igpu0/{KINDS[letter]}")

    def _fill(self, known: Ioctl, rng: random.Random) -> bytes:
        """A struct with mostly plausible members."""
        size = known.number >> 16 & 0x3FFF
        if known.arg is None:
            fd = rng.choice(self.fds["channel"] or [0])
            return struct.pack("<i", fd)[:size].ljust(size, b"\0")
        record = self.kernel.abi.make_struct(known.arg)
        for name, place in record.struct.fields.items():
            if place.size > 8:
                continue
            value = self._member(known.short_name, name, rng)
            if value is not None:
                record[name] = value
        return bytes(record.raw)

    def _member(self, ioctl: str, name: str, rng: random.Random) -> int | None:
        if name.endswith(POINTERS):
            return ctypes.addressof(self.space)
        if ioctl in COPIES and name != "handle":
            return {"count": rng.randrange(4), "elem_size": rng.choice((1, 4, 64))}.get(
                name, rng.choice((0, 1, 64, 128))
            )
        if rng.random() < 0.03:
            return rng.choice(EDGES)
        if name.startswith(("reserved", "padding", "pad")):
            return None
        if "dmabuf_fd" in name or name == "mem" or (name == "fd" and "FROM_FD" in ioctl):
            return rng.choice(self.fds["dmabuf"] or [0])
        if name == "as_fd":
            return rng.choice(self.fds["as"] or [0])
        if name == "channel_fd":
            return -1 if ioctl == "OPEN_CHANNEL" else rng.choice(self.fds["channel"] or [0])
        if name in ("handle", "handle64") and ioctl.startswith("NVMAP"):
            return None if "CREATE" in ioctl else rng.choice(self.handles or [0])
        if name in ("size", "size64") and ("CREATE" in ioctl or "FROM_VA" in ioctl):
            return rng.choice(SIZES) if (name == "size64") == ("64" in ioctl) else None
        fixed: dict[str, tuple[int, ...]] = {
            "va_range_start": (1 << 21, 1 << 26),
            "va_range_end": (0xFC00000000, 1 << 37, 0xFFFFE00000, 3 << 21),
            "heap_mask": (1 << 30, 1 << 30, 1 << 28),
            "align": (0, 4096, 1 << 21),
            "numa_nid": (0, -1),
            "num_gpfifo_entries": (2, 512, 1024, 1 << 16),
            "wdt_status": (1, 1, 1, 2),
            "class_num": CLASSES,
            "subcontext_id": (0, 1, 2, 3),
            "page_size": (4096,),
            "pages": (1, 16, 512, 1 << 20),
            "compr_kind": (-1,),
            "type": (0, 1),
            "cmd": (1,),
            "event_id": (0, 2),
            "num_maps": (0, 1, 3),
            "num_unmaps": (0, 1, 3),
            "count": (0, 1, 4),
            "elem_size": (1, 4, 64),
        }
        if name in fixed:
            return rng.choice(fixed[name])
        if ioctl == "CHANNEL_SETUP_BIND" and name == "flags":
            return 0xA
        if ioctl == "AS_MAP_BUFFER_EX":
            return {"flags": rng.choice((0, 0, 0, 1, 4)), "offset": self._va(rng)}.get(name)
        if ioctl.startswith("AS_") and name in ("offset", "o_a.offset"):
            return self._va(rng)
        if name == "flags":
            return rng.choice((0, 0, 1, 2))
        if name.endswith("size"):
            return rng.choice((0, 24, 4096))
        return None

    def _va(self, rng: random.Random) -> int:
        if rng.random() < 0.4:
            return 0
        return rng.choice(self.vas) + rng.choice((0, 0, 4096, 1 << 21))

    def _collect(self, request: int, raw: bytearray) -> None:
        """Learn what the ioctl made."""
        letter, nr = ioc_type(request), ioc_nr(request)
        made = NEW_FDS.get((letter, nr))
        if made is not None and len(raw) >= made + 4:
            fd = struct.unpack_from("<i", raw, made)[0]
            found = self.kernel.find_device_or_dmabuf(fd)
            assert found is not None
            kind = "dmabuf" if isinstance(found, DmaBuf) else found.kind
            self.fds[kind].append(fd)
        elif letter == "N" and nr in (0, 16, 22, 1):
            at = {0: 4, 16: 4, 22: 16, 1: 0}[nr]
            self.handles = [*self.handles, struct.unpack_from("<I", raw, at)[0]][-20:]
        elif letter == "A" and nr in (6, 7):
            at = 16 if nr == 6 else 32
            self.vas = [*self.vas, struct.unpack_from("<Q", raw, at)[0]][-20:]


def _spared() -> None:
    """The OOM killer comes: the request fails instead, and the life goes on."""
    raise KernelError("alloc.ram")


def _pick(rng: random.Random, choices: list[int]) -> list[int]:
    return [rng.choice(choices)] if choices else []


def _ioctls(kernel: Kernel) -> list[Ioctl]:
    """The ioctls worth calling, the common ones more often."""
    tables = kernel.abi
    common = [
        i
        for i in tables.ioctls.values()
        if i.short_name
        in (
            *("ALLOC_AS", "OPEN_TSG", "OPEN_CHANNEL", "NVMAP_CREATE_64", "NVMAP_ALLOC"),
            *("NVMAP_GET_FD", "NVMAP_FREE", "AS_MAP_BUFFER_EX", "AS_UNMAP_BUFFER"),
            *("AS_BIND_CHANNEL", "TSG_BIND_CHANNEL_EX", "CHANNEL_WDT", "CHANNEL_SETUP_BIND"),
            *("AS_ALLOC_SPACE", "AS_FREE_SPACE", "TSG_CREATE_SUBCONTEXT", "TSG_UNBIND_CHANNEL"),
        )
    ]
    return [*tables.ioctls.values(), *common * 6]


@contextmanager
def expected() -> Iterator[None]:
    """The kernel may refuse; anything else but OSError is a bug."""
    try:
        yield
    except OSError as error:
        assert error.errno and error.errno > 0


def live(data: bytes) -> int:
    """Run a life; returns the steps taken."""
    life = Life(int.from_bytes(data[:STEP], "little"))
    steps = 0
    try:
        for at in range(0, len(data) - STEP + 1, STEP):
            life.step(random.Random(data[at : at + STEP]))
            steps += 1
    finally:
        life.end()
    return steps
