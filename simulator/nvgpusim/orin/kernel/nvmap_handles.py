"""nvmap's handles: the board's table of them, and the memory that they name."""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field
from os import close as real_close
from typing import TYPE_CHECKING

from ...memory import PAGE, DmaBuf, client_call_text
from ..rules import KernelError

if TYPE_CHECKING:
    from .core import Kernel

FIRST_HANDLE = 0x7FFFFFFF


@dataclass(eq=False)
class Handle:
    """One nvmap handle: `fd` is the model's own memfd while the id can still be used.

    A read-only handle is a second one for the same memory; its fds are open for reading only.
    """

    id: int
    buf: DmaBuf
    fd: int
    align: int = PAGE
    heap: int = 0
    flags: int = 0
    users: int = 0
    read_only: bool = False
    line: str = field(default_factory=client_call_text)


class NvMapHandles:
    """The handles of the whole board."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.handles: dict[int, Handle] = {}
        self.by_buf: dict[int, Handle] = {}
        self.by_buf_ro: dict[int, Handle] = {}
        self._cursor = FIRST_HANDLE
        self._pins: list[tuple[int, int, DmaBuf]] = []
        self._longest = 0

    def create_handle(self, size: int) -> Handle:
        """A new handle without pages."""
        number = self._next_id()
        buf = DmaBuf(
            size,
            f"handle {number:#x}",
            line=client_call_text(),
            poison=self.kernel.options.poison,
            on_free=self._on_buffer_freed,
        )
        try:
            fd = self.kernel.make_memfd(f"nvmap-{number:#x}")
        except OSError as error:
            raise KernelError("alloc.ram", "the host is out of descriptors") from error
        handle = Handle(number, buf, fd)
        self.handles[number] = self.by_buf[id(buf)] = handle
        status = os.fstat(fd)
        buf.key = status.st_dev, status.st_ino
        self.kernel.dmabufs[buf.key] = buf
        if number > FIRST_HANDLE:
            self.kernel.journal.count_rule("create.high")
        return handle

    def _next_id(self) -> int:
        number = self._cursor
        self._cursor = number + 1 if number < 0xFFFFFFFF else 1
        return number

    def ensure_handle(self, buf: DmaBuf, fd: int, read_only: bool) -> Handle:
        """The handle of a buffer that `fd` shows, made usable; read-only ones made when needed."""
        handle = (self.by_buf_ro if read_only else self.by_buf).get(id(buf))
        if handle is None:
            twin = self.by_buf[id(buf)]
            handle = Handle(self._next_id(), buf, -1, twin.align, twin.heap, twin.flags)
            handle.read_only = True
            self.by_buf_ro[id(buf)] = handle
        if not handle.users:
            mode = os.O_RDONLY if read_only else os.O_RDWR
            handle.fd = self.kernel.move_fd_high(
                os.open(f"/proc/self/fd/{fd}", mode | os.O_CLOEXEC)
            )
            self.handles[handle.id] = handle
            buf.add_reference("handle")
        return handle

    def ram_bytes_left(self) -> int:
        """RAM that is not in buffers."""
        return self.kernel.options.ram_bytes - self.kernel.journal.in_use

    def on_last_user_gone(self, handle: Handle) -> None:
        """The last client gave the handle up."""
        self.handles.pop(handle.id, None)
        if handle.fd >= 0:
            real_close(handle.fd)
            handle.fd = -1
        handle.buf.drop_reference("handle")

    def back_with_client_pages(self, buf: DmaBuf, address: int) -> None:
        """Let `buf` be the client's pages at `address`."""
        buf.use_client_pages(address)
        insort(self._pins, (address, id(buf), buf))
        self._longest = max(self._longest, buf.size)

    def copy_vanishing_pages(self, address: int, end: int) -> None:
        """The client's pages [address, end) go: buffers made of them keep their content."""
        first = bisect_left(self._pins, (address - self._longest,))
        last = bisect_left(self._pins, (end,))
        for pin in self._pins[first:last]:
            start, _, buf = pin
            if address < start + buf.size:
                buf.detach_from_client_pages()
                self._pins.remove(pin)

    def on_fd_closed(self, buf: DmaBuf) -> None:
        """An fd of `buf` was closed: drop the fd reference when it was the last."""
        if buf.refs["fd"] and buf not in self.client_fds_by_buffer():
            buf.drop_reference("fd")

    def client_fds_by_buffer(self) -> dict[DmaBuf, list[int]]:
        """Buffers with descriptors of the client's."""
        own = {handle.fd for handle in self.handles.values()}
        found: dict[DmaBuf, list[int]] = {}
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd not in own and isinstance(buf := self.kernel.find_device_or_dmabuf(fd), DmaBuf):
                found.setdefault(buf, []).append(fd)
        return found

    def _on_buffer_freed(self, buf: DmaBuf) -> None:
        if buf.is_allocated and not buf.foreign:
            self.kernel.journal.count_buffer_bytes(-buf.size)
        self.kernel.journal.count_rule("dmabuf.lifetime")
        self.by_buf.pop(id(buf), None)
        self.by_buf_ro.pop(id(buf), None)
        if buf.pinned is not None:
            self._pins.remove((buf.pinned, id(buf), buf))
        del self.kernel.dmabufs[buf.key]

    def check_invariants(self) -> None:
        """Every handle has a holder and every allocated buffer is accounted for."""
        total = 0
        named = Counter(handle.buf for handle in self.handles.values())
        for handle in self.handles.values():
            assert handle.users > 0, f"{handle.id:#x}"
            assert handle.buf.refs["handle"] == named[handle.buf], f"{handle.id:#x}"
            assert not handle.buf.freed
        for buf in set(self.kernel.dmabufs.values()):
            assert buf.refs and not buf.freed, f"{buf!r} lives without a holder"
            if buf.is_allocated and not buf.foreign:
                total += buf.size
        assert total == self.kernel.journal.in_use, f"{total} != {self.kernel.journal.in_use}"
