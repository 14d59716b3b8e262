"""The usermode page that ctrl's mmap shows: doorbell at 0x90, PTIMER at 0x80 and 0x84.

A thread watches the doorbell cell. Reading it and putting the idle value back happens between two
checks of the interpreter's eval loop, so a store by a Python client cannot fall in between. Two
stores before a look leave only the second in the cell: the first ring is recovered by looking at
GPPut of every channel, as the host does when it reloads one.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from os import close as real_close
from typing import TYPE_CHECKING

from ...locks import GcPausingLock, pause_gc, resume_gc
from ...memory import main_thread_line, map_shared_pages
from ..gpu_api import FaultReport
from .device_file import DeviceFile

if TYPE_CHECKING:
    from .core import Kernel

SIZE = 0x10000
"""USERMODE_MMIO_SIZE."""
DOORBELL, TIME_LOW, TIME_HIGH = 0x90 // 4, 0x80 // 4, 0x84 // 4
GP_PUT = 0x8C // 4
"""USERD_GP_PUT_OFFSET."""
LATE, SHORTEST, LONGEST = 0.02, 2e-5, 1e-3
"""A ring is heard late by this share of the quiet before it; seconds between looks."""
IDLE = 0xFFFFFFFF
"""In the cell while nobody rings: no token has bits 15:12 set."""


class UsermodePage:
    """The page and its watcher; the thread starts with the first mapping."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.fd = kernel.make_memfd("nvgpusim-usermode")
        os.ftruncate(self.fd, SIZE)
        self.cells = map_shared_pages(self.fd, SIZE).data.cast("B").cast("I")
        self.cells[DOORBELL] = IDLE
        self._seen: dict[int, int] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._hearing = GcPausingLock()
        self.mapped_by: set[int] = set()
        self.rings = 0

    def start_watching(self) -> None:
        """Start watching."""
        if self._thread is None:
            sys.setswitchinterval(min(sys.getswitchinterval(), 2e-4))
            self._thread = threading.Thread(target=self._watch_doorbell, name="nvgpusim-doorbell")
            self._thread.daemon = True
            self._thread.start()

    def stop_watching(self) -> None:
        """Stop watching and wait for the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(1.0)
            self._thread = None

    def on_fork_child(self) -> None:
        """In a child: the page is the parent's; make one of its own, without a watcher so far."""
        real_close(self.fd)
        self.__dict__ = UsermodePage(self.kernel).__dict__

    def on_page_unmapped(self, file: DeviceFile) -> None:
        """A mapping of the page by `file` is gone."""
        self.mapped_by.discard(id(file))

    def forget_channel(self, channel_id: int) -> None:
        """The channel was closed."""
        self._seen.pop(channel_id, None)

    def _watch_doorbell(self) -> None:
        last = time.monotonic()
        while not self._stop.is_set():
            pause_gc()  # the client's finalizers run on its own threads
            try:
                if self.poll_doorbell():
                    last = time.monotonic()
                wait = min(max((time.monotonic() - last) * LATE, SHORTEST), LONGEST)
            finally:
                resume_gc()
            time.sleep(wait)

    def poll_doorbell(self) -> bool:
        """Look at the cell, as the watcher does; whether it was rung.

        A client's barrier looks too, and waits for a look that is under way: a ring is never heard
        after the stores that follow the barrier.
        """
        cells = self.cells
        with self._hearing:
            token, cells[DOORBELL] = cells[DOORBELL], IDLE
            now = time.monotonic_ns()
            cells[TIME_HIGH], cells[TIME_LOW] = now >> 32, now & 0xFFFFFFFF
            if token != IDLE:
                self.on_doorbell(token)
        return token != IDLE

    def on_doorbell(self, token: int) -> None:
        """A store of `token` was seen."""
        kernel = self.kernel
        self.rings += 1
        kernel.journal.count_call("doorbell", "ring")
        line = main_thread_line()
        ports = list(kernel.ports.values())
        rung = next((p for p in ports if p.token == token), None)
        if rung is None:
            kernel.journal.add_note(f"doorbell {token:#x} is no channel's token: ignored; {line}")
        injected = kernel.injector.next_doorbell_fault()
        if rung is not None and injected is not None:
            what, code = injected
            self._seen[rung.id] = rung.userd.cast("I")[GP_PUT]
            if what != "lost-doorbell":
                kernel.kill_tsg_for_fault(
                    rung, FaultReport(code, f"injected {what}", {"option": "--inject"})
                )
            return
        gpu = kernel.executor
        for port in ports:
            put = port.userd.cast("I")[GP_PUT]
            if port is rung or put != self._seen.get(port.id, 0):
                self._seen[port.id] = put
                port.submit_line = line
                if gpu is not None:
                    gpu.ring_doorbell(port.token)
