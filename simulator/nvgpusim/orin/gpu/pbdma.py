"""A channel's host side: GPFIFO entries, pushbuffer headers, and who gets each method."""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING

import numpy as np

from ...memory import MmuFault
from ..gpu_api import ChannelPort
from .compute import COMPUTE_CLASS, ComputeMethods
from .copy_engine import COPY_CLASS, CopyMethods
from .doorbell_snapshots import PublishedEntry, copy_published_entry
from .faults import class_fault, illegal_method_fault, mmu_fault, pbdma_fault
from .host_methods import HostMethods
from .steps import DONE, Steps, Work

if TYPE_CHECKING:
    from .scheduler import Gpu

GP_GET, GP_PUT = 0x88, 0x8C
MASK40 = (1 << 40) - 1
INC, NON_INC, IMMD, ONE_INC, END = 1, 3, 4, 5, 7
COMPUTE_SUBCHANNEL, COPY_SUBCHANNEL = 1, 4


class Channel:
    """One channel: where its ring stands, its methods' state, what it waits for."""

    def __init__(self, gpu: Gpu, port: ChannelPort) -> None:
        self.gpu, self.port, self.vm = gpu, port, port.vm
        self.get = 0
        self.steps: Steps | None = None
        self.waiting = ""
        self.alive = True
        self.blocked = self.stop = False
        self.current: PublishedEntry | None = None
        self.inflight: list[Steps] = []
        self.published: dict[int, PublishedEntry] = {}
        self.known_put = 0
        self.bound: dict[int, int] = {}
        self.host = HostMethods(self)
        self.compute = ComputeMethods(self)
        self.copy = CopyMethods(self)
        self.entry = 0
        self.place = 0, 0, 0
        self.line = port.line
        self.userd = np.frombuffer(port.userd, np.uint32)

    # ring

    @property
    def visible_gpput(self) -> int:
        """GPPut as host read it at the last doorbell (and as it may see it under --order)."""
        put = self.gpu.order.stale_gpput(self)
        return self.known_put if put is None else put

    @property
    def ring_end_va(self) -> int:
        """First GPU address after the ring."""
        return self.port.gpfifo_va + 8 * self.port.entries

    def ring_entry(self, index: int) -> int:
        """The 8 bytes of ring entry `index`."""
        if self.ring_end_va > 1 << 40:
            base = self.port.gpfifo_va & MASK40  # the register has 40 bits
            try:
                data = bytes(self.vm.view_bytes(base + 8 * index, 8, "fetch", past=True))
            except MmuFault as e:
                raise mmu_fault(
                    e, ring=f"GPFIFO base {self.port.gpfifo_va:#x} cut to 40 bits"
                ) from e
            return int(struct.unpack("<Q", data)[0])
        stale = self.gpu.order.take_stale_entry(self, index)
        if stale is not None:
            return stale
        return int(struct.unpack_from("<Q", self.port.ring, 8 * index)[0])

    def on_doorbell(self) -> None:
        """A doorbell rang: note what was published, to compare with what will be consumed."""
        put = int(self.userd[GP_PUT // 4])
        if put >= self.port.entries:
            self.known_put = put
            return
        index = self.known_put
        while index != put:
            if index in self.published:
                before = self.published[index].entry
                now = struct.unpack_from("<Q", self.port.ring, 8 * index)[0]
                if before != now:
                    self.gpu.note_finding(
                        f"ring overrun: entry {index} of channel {self.port.id} was overwritten "
                        f"before it was read; {self.port.submit_line}"
                    )
            self.published[index] = copy_published_entry(self.port, self.gpu.allocated, index)
            index = (index + 1) % self.port.entries
        self.known_put = put

    def has_work(self) -> bool:
        """True if something is fetched, running or published."""
        return self.steps is not None or bool(self.inflight) or self.visible_gpput != self.get

    def fault_details(self) -> dict[str, str]:
        """Submitter of the work being executed."""
        found = {"channel": str(self.port.id), "ring entry": str(self.entry)}
        if self.line:
            found["submitted by"] = self.line
        return found

    def consume_entries(self) -> Steps:
        """Consume entries until the ring is empty."""
        while self.visible_gpput != self.get:
            if self.visible_gpput >= self.port.entries:
                raise pbdma_fault(
                    f"GPPut {self.visible_gpput} is beyond the ring's {self.port.entries} entries"
                )
            self.entry = self.get
            self.current = published = self.published.pop(self.get, None)
            self.line = published.line if published else self.port.submit_line
            yield from self.adversary_delay_steps()
            entry = self.ring_entry(self.get)
            if published is not None and published.entry != entry:
                self.gpu.note_finding(
                    f"entry {self.get} of channel {self.port.id} changed after its doorbell: "
                    f"{published.entry:#x} -> {entry:#x}; {self.line}"
                )
                elsewhere = self.gpu.order.on or self.ring_end_va > 1 << 40
                entry = published.entry if self.gpu.options.prefetch and not elsewhere else entry
            self.gpu.add_to_counter("entries")
            yield from self.execute_entry(entry, published)
            self.get = (self.get + 1) % self.port.entries
            self.userd[GP_GET // 4] = self.get
            yield "more"

    def adversary_delay_steps(self) -> Work:
        """The adversary's delay at this point."""
        return self._delay_steps() if self.gpu.delay else DONE

    def _delay_steps(self) -> Steps:
        until = self.gpu.random_delay_end()
        while until and time.monotonic() < until:
            yield "lag"

    # entries and headers

    def execute_entry(self, entry: int, published: PublishedEntry | None) -> Steps:
        """Decode a GPFIFO entry and execute its pushbuffer segment."""
        if entry & 3 or entry >> 40 & 1:
            raise pbdma_fault(f"GPFIFO entry {entry:#018x} has FETCH or reserved bits set")
        length = entry >> 42 & 0x1FFFFF
        if length == 0:
            opcode = entry >> 32 & 0xFF
            if opcode:
                raise pbdma_fault(f"GPFIFO control entry with opcode {opcode}")
            return
        address = entry & MASK40 & ~3
        if address + 4 * length > MASK40:
            raise pbdma_fault(f"segment {address:#x} + {length} dwords passes 2^40")
        try:
            data = bytes(self.vm.view_bytes(address, 4 * length, "fetch", past=True))
        except MmuFault as e:
            raise mmu_fault(e) from e
        if published is not None and published.data != data and published.data is not None:
            at = (
                next(i for i in range(len(data)) if data[i : i + 1] != published.data[i : i + 1])
                & ~3
            )
            self.gpu.note_finding(
                f"pushbuffer of entry {self.get} changed after its doorbell at dword {at // 4} "
                f"({address + at:#x}); {self.line}"
            )
            data = published.data if self.gpu.options.prefetch else data
        yield from self.execute_methods(struct.unpack(f"<{length}I", data), address)

    def execute_methods(self, words: tuple[int, ...], address: int) -> Steps:
        """Execute the methods of a segment."""
        at, end = 0, len(words)
        while at < end:
            header = words[at]
            opcode, count = header >> 29, header >> 16 & 0x1FFF
            sub, method = header >> 13 & 7, (header & 0xFFF) << 2
            self.place = at, address, header
            at += 1
            if opcode == END:
                return
            if opcode == IMMD:
                yield from self.dispatch_method(sub, method, count)
                continue
            if header == 0:
                continue
            if opcode not in (INC, NON_INC, ONE_INC):
                raise pbdma_fault(f"header opcode {opcode} at {self.header_text()}")
            if at + count > end:
                raise pbdma_fault(
                    f"{count} data dwords run past the segment at {self.header_text()}"
                )
            for n in range(count):
                step = n if opcode == INC else 0 if opcode == NON_INC else min(n, 1)
                work = self.dispatch_method(sub, method + 4 * step, words[at + n])
                if work is not DONE:
                    yield from work
            at += count

    def header_text(self) -> str:
        """The header that is being executed."""
        at, address, header = self.place
        return f"dword {at} of the segment at {address:#x} (header {header:#010x})"

    def dispatch_method(self, sub: int, method: int, value: int) -> Work:
        """One method with its data."""
        self.gpu.counts["methods"] += 1
        if method == 0:
            self.set_object(sub, value)
        elif method < 0x100:
            return self.host.execute_method(method, value)
        elif sub not in self.bound:
            raise illegal_method_fault(
                f"{method:#x} on subchannel {sub}, which no SET_OBJECT has bound"
            )
        elif self.bound[sub] == COMPUTE_CLASS:
            return self.compute.execute_method(method, value)
        else:
            return self.copy.execute_method(method, value)
        return DONE

    def set_object(self, sub: int, value: int) -> None:
        """Bind a class to a subchannel."""
        number = value & 0xFFFF
        if value >> 16 or number not in self.port.classes:
            raise class_fault(
                f"SET_OBJECT {value:#x} on subchannel {sub}: not allocated on this channel "
                f"(ALLOC_OBJ_CTX gave {[hex(c) for c in sorted(self.port.classes)]})"
            )
        expected = {COMPUTE_CLASS: COMPUTE_SUBCHANNEL, COPY_CLASS: COPY_SUBCHANNEL}.get(number)
        if expected is None:
            raise class_fault(f"class {number:#x} is not modelled")
        if sub != expected:
            raise class_fault(f"class {number:#x} belongs on subchannel {expected}, not {sub}")
        self.bound[sub] = number

    # engines

    def steps_until_idle(self) -> Steps:
        """Wait until no grid of this channel runs (WFI)."""
        self.waiting = "the engine to go idle"
        while self.inflight:
            yield "blocked"
        self.waiting = ""
