"""A client of the execution side alone: page table, ring, pushbuffer and QMDs written by hand.

Everything is made of numbers from the class headers; nothing is shared with the simulator but its
page table and the port's dataclass.
"""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvgpusim.memory import DmaBuf, GpuAddressSpace, Mapping
from nvgpusim.options import Options
from nvgpusim.orin.gpu import Gpu
from nvgpusim.orin.gpu.programs import PROGRAMS, Program, _elf_sections
from nvgpusim.orin.gpu_api import ChannelPort, FaultReport

HERE = Path(__file__).resolve().parent
CUBIN, PTX = HERE / "kernels.cubin", HERE / "kernels.ptx"
EQUAL, EQUAL_PTX = HERE / "equal.cubin", HERE / "equal.ptx"
SHARED_WINDOW, LOCAL_WINDOW = 0xFE00000000, 0xFD00000000
STACK_TOP, SLM = 0xFFFDC0, 0x300
PER_TPC = -(-(-(-32 * SLM // 0x200) * 0x200 * 96) // 0x8000) * 0x8000
for _cubin, _ptx in ((CUBIN, PTX), (EQUAL, EQUAL_PTX)):
    PROGRAMS.register_pair(_cubin.read_bytes(), _ptx.read_bytes(), keep=False)
SECTIONS = {s.name: s for cubin in (EQUAL, CUBIN) for s in _elf_sections(cubin.read_bytes())}


def program(name: str) -> Program:
    """A kernel of kernels.cu or equal.ptx."""
    (found,) = (p for p in PROGRAMS.find_by_code(SECTIONS[f".text.{name}"].data) if p.name == name)
    return found


class Rig:
    """A GPU with one TSG and `channels` channels."""

    def __init__(self, channels: int = 1, entries: int = 64, **options: Any) -> None:
        self.vm = GpuAddressSpace("AS 0")
        self.gpu = Gpu(Options(**options), note=lambda text: None)
        self.next = 0x200000
        self.maps: dict[int, Mapping] = {}
        self.faults: list[FaultReport] = []
        self.events: list[int] = []
        self.rings: list[NDArray[np.uint64]] = []
        self.ports = [self.port(n, entries) for n in range(channels)]
        self.puts = [0] * channels
        self.signal = self.alloc(4096)
        self.local = self.alloc(PER_TPC * 8)

    def port(self, n: int, entries: int) -> ChannelPort:
        """A channel with both classes."""
        ring, userd = np.zeros(entries, np.uint64), np.zeros(4096, np.uint8)
        self.rings.append(ring)

        def fail(report: FaultReport) -> None:
            self.faults.append(report)
            for port in self.ports:
                port.alive = False

        port = ChannelPort(
            id=n, token=100 + n, tsg_id=0, runlist=0, veid=0, vm=self.vm, entries=entries,
            ring=ring.data.cast("B").toreadonly(), userd=userd.data, fail=fail,
            post_event=self.events.append, classes={0xC7C0, 0xC7B5},
            submit_line=f"client.py:{n}",
        )  # fmt: skip
        self.gpu.attach_channel(port)
        return port

    # memory

    def alloc(self, size: int, va: int = 0, read_only: bool = False) -> int:
        """Map a fresh buffer; returns its address."""
        buf = DmaBuf(size, f"buffer {len(self.maps)}", line=f"alloc {size:#x}")
        buf.array = np.zeros(buf.size, np.uint8)
        if not va:
            va, self.next = self.next, self.next + -(-buf.size // 0x200000) * 0x200000 + 0x200000
        mapping = Mapping(va, buf.size, buf, read_only=read_only)
        self.vm.add_mapping(mapping)
        self.maps[va] = mapping
        return va

    def at(self, va: int, count: int, dtype: Any = np.uint32) -> Any:
        """The CPU's view of a buffer."""
        mapping = self.vm.mapping_at(va)
        assert mapping is not None
        start = va - mapping.va
        size = np.dtype(dtype).itemsize * count
        return mapping.mapped_memory[start : start + size].view(dtype)

    def unmap(self, va: int) -> None:
        """Take a buffer away from the GPU."""
        self.vm.remove_mapping(self.maps.pop(va), "unmap of the test")

    # submission

    def submit(self, words: list[int], channel: int = 0, *, barriers: bool = True) -> int:
        """Write a pushbuffer, publish it, ring; returns the pushbuffer's address."""
        va = self.alloc(4 * len(words))
        self.at(va, len(words))[:] = words
        self.publish(va | len(words) << 42 | 1 << 41, channel, barriers=barriers)
        return va

    def publish(
        self, entry: int, channel: int = 0, *, barriers: bool = True, ring: bool = True
    ) -> None:
        """Publish a raw ring entry."""
        port = self.ports[channel]
        put = self.puts[channel]
        self.rings[channel][put] = entry
        if barriers:
            self.gpu.on_barrier()
        put = self.puts[channel] = (put + 1) % port.entries
        struct.pack_into("<I", port.userd, 0x8C, put)
        if barriers:
            self.gpu.on_barrier()
        if ring:
            self.gpu.ring_doorbell(port.token)

    def finish(self, timeout: float = 120.0) -> None:
        """Wait until the GPU is idle or a fault was reported."""
        end = time.monotonic() + timeout
        while not self.faults and not self.gpu.is_idle() and time.monotonic() < end:
            time.sleep(1e-3)
        if not self.faults:
            self.gpu.wait_until_idle(120.0)

    def done(self) -> None:
        """Finish without fault or finding."""
        self.finish()
        assert not self.faults, self.faults
        assert not self.gpu.notes, self.gpu.notes

    def fault(self) -> FaultReport:
        """Finish with exactly one fault."""
        self.finish()
        assert len(self.faults) == 1
        return self.faults[0]

    def close(self) -> None:
        """Stop the consumer."""
        self.gpu.stop_threads()

    # launches

    def load(self, name: str, va: int = 0) -> int:
        """Put a kernel's code into memory, the page after it mapped; returns the entry point."""
        text = SECTIONS[f".text.{name}"].data
        va = va or self.alloc(-(-len(text) // 4096) * 4096 + 4096)
        self.at(va, len(text), np.uint8)[:] = np.frombuffer(text, np.uint8)
        return va

    def bank0(self, params: bytes) -> bytes:
        """Constant bank 0 as tinygrad fills it."""
        head = struct.pack("<6I3Q", *[0] * 6, SHARED_WINDOW, LOCAL_WINDOW, STACK_TOP)
        return head.ljust(0x160, b"\0") + params

    def qmd(
        self,
        name: str,
        params: bytes,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (32, 1, 1),
        entry: int = 0,
        banks: dict[int, tuple[int, int]] | None = None,
        **fields: int,
    ) -> int:
        """Build bank 0 and a QMD for a kernel; returns the QMD's address."""
        entry = entry or self.load(name)
        found = program(name)
        bank = self.bank0(params)
        va = self.alloc(8192)
        self.at(va, len(bank), np.uint8)[:] = np.frombuffer(bank, np.uint8)
        shared = -(-(0x400 + found.shared) // 128) * 128
        cfg = 9
        values = {
            (583, 580): 3, (579, 576): 0, (133, 128): 0x3F, (134, 134): 1, (189, 189): 1,
            (369, 368): 1, (378, 378): 1, (382, 382): 1,
            (415, 384): grid[0], (431, 416): grid[1], (463, 448): grid[2],
            (607, 592): block[0], (623, 608): block[1], (639, 624): block[2],
            (1567, 1536): entry & 0xFFFFFFFF, (1584, 1568): entry >> 32,
            (1663, 1656): 0x87, (656, 648): found.registers, (767, 763): 1, (561, 544): shared,
            (567, 562): cfg, (662, 657): cfg, (574, 569): 0x1A,
            (1623, 1600): SLM, (640, 640): 1,
            (1055, 1024): va & 0xFFFFFFFF, (1072, 1056): va >> 32, (1074, 1074): 1,
            (1087, 1075): -(-len(bank) // 16),
        }  # fmt: skip
        for i, (address, size) in (banks or {}).items():
            values |= {
                (640 + i, 640 + i): 1, (1055 + 64 * i, 1024 + 64 * i): address & 0xFFFFFFFF,
                (1072 + 64 * i, 1056 + 64 * i): address >> 32,
                (1087 + 64 * i, 1075 + 64 * i): -(-size // 16),
            }  # fmt: skip
        bits = 0
        for (hi, lo), value in values.items():
            assert value < 1 << (hi - lo + 1)
            bits |= value << lo
        self.write_qmd(va + 4096, bits)
        for field, value in fields.items():
            self.poke(va + 4096, field, value)
        return va + 4096

    def write_qmd(self, va: int, bits: int) -> None:
        """Write all 2048 bits."""
        self.at(va, 256, np.uint8)[:] = np.frombuffer(bits.to_bytes(256, "little"), np.uint8)

    def poke(self, va: int, field: str, value: int) -> None:
        """Change bits `hi_lo` ("b583_580") of a QMD."""
        hi, lo = map(int, field[1:].split("_"))
        old = int.from_bytes(self.at(va, 256, np.uint8).tobytes(), "little")
        mask = ((1 << hi - lo + 1) - 1) << lo
        self.write_qmd(va, old & ~mask | value << lo)

    def release(self, va: int, payload: int, slot: int = 0, address: int | None = None) -> None:
        """Enable a release of a QMD on the signal page."""
        base, address = 768 + 128 * slot, self.signal if address is None else address
        self.poke(va, f"b{base + 31}_{base}", address & 0xFFFFFFFF)
        self.poke(va, f"b{base + 39}_{base + 32}", address >> 32)
        self.poke(va, f"b{base + 95}_{base + 64}", payload & 0xFFFFFFFF)
        self.poke(va, f"b{base + 55}_{base + 55}", 1)

    def depend(self, va: int, following: int) -> None:
        """Chain `following` behind QMD `va`."""
        self.poke(va, "b511_480", following >> 8)
        self.poke(va, "b512_512", 1)
        self.poke(va, "b515_513", 1)

    def setup(self, channel: int = 0) -> None:
        """Bind classes, set both windows and local memory."""
        self.submit(setup_words(self.local), channel)


def inc(sub: int, method: int, *data: int) -> list[int]:
    """INC header and data."""
    return [1 << 29 | len(data) << 16 | sub << 13 | method >> 2, *data]


def setup_words(local: int) -> list[int]:
    """tinygrad's first submission, with local memory."""
    return [
        *inc(1, 0, 0xC7C0), *inc(4, 0, 0xC7B5),
        *inc(1, 0x7B0, LOCAL_WINDOW >> 32, LOCAL_WINDOW & 0xFFFFFFFF),
        *inc(1, 0x2A0, SHARED_WINDOW >> 32, SHARED_WINDOW & 0xFFFFFFFF),
        *inc(1, 0x790, local >> 32, local & 0xFFFFFFFF), *inc(1, 0x2E4, 0, PER_TPC, 0xFF),
    ]  # fmt: skip


def launch(qmd: int, action: int = 9) -> list[int]:
    """SEND_PCAS_A and SEND_SIGNALING_PCAS2_B."""
    return [*inc(1, 0x2B4, qmd >> 8), *inc(1, 0x2C0, action)]


def semaphore(va: int, payload: int, execute: int) -> list[int]:
    """SEM_ADDR, SEM_PAYLOAD, SEM_EXECUTE."""
    return inc(0, 0x5C, va & 0xFFFFFFFF, va >> 32, payload & 0xFFFFFFFF, payload >> 32, execute)


WAIT, SIGNAL, WRITE32, WRITE64 = 0x01000003, 0x03100001, 0x00100001, 0x01100001
FRESH = inc(1, 0x1698, 0x1011)


def u64(*values: int) -> bytes:
    """Kernel parameters of 8 bytes."""
    return struct.pack(f"<{len(values)}Q", *values)


def u32(*values: int) -> bytes:
    """Kernel parameters of 4 bytes."""
    return struct.pack(f"<{len(values)}I", *values)
