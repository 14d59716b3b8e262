"""File descriptors, dispatch and lifetimes: what every device of the model shares.

A device fd is one end of a socket pair. The model keeps the other end and learns from its hang-up
that the last copy of the client's end is gone (closed, in this process and in its children), which
is when a kernel would call release(). A dmabuf fd is the memfd itself. Both are found again by
inode, so dup, fork, poll and CLOEXEC are the host kernel's own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import socket
import stat
from collections import Counter
from collections.abc import Callable
from fcntl import F_DUPFD_CLOEXEC, F_GETFL, fcntl
from os import close as _real_close
from typing import TypeVar

from ...locks import GcPausingLock
from ...memory import DmaBuf, client_call_text
from ...options import Options
from ..abi import abi_of_profile
from ..context_switch import WFI
from ..gpu_api import ChannelPort, Executor, FaultReport
from ..inject import Injector
from ..report import Journal
from ..rules import KernelError
from .channel import ChannelFile
from .client_memory import CpuMapping, CpuMappings, UserMemory
from .ctrl import CtrlFile
from .device_file import DeviceFile, Key
from .ga10b import GpuShape
from .nvmap import NvMapFile
from .nvmap_handles import NvMapHandles
from .tsg import TsgFile
from .usermode import UsermodePage

NODES = {
    "/dev/nvgpu/igpu0/ctrl": "ctrl",
    "/dev/nvgpu/igpu0/as": "as",
    "/dev/nvgpu/igpu0/tsg": "tsg",
    "/dev/nvgpu/igpu0/channel": "channel",
    "/dev/nvhost-ctrl-gpu": "ctrl",
    "/dev/nvhost-as-gpu": "as",
    "/dev/nvhost-tsg-gpu": "tsg",
    "/dev/nvhost-gpu": "channel",
    "/dev/nvmap": "nvmap",
}
"""Device nodes of the model, both naming schemes; debugger, profiler and scheduler are absent."""
F = TypeVar("F", bound=DeviceFile)


class Kernel:
    """One board: its devices, memory and GPU. All entry points may be called from any thread."""

    def __init__(self, options: Options, journal: Journal | None = None) -> None:
        self.options = options
        self.abi = abi_of_profile(options.profile)
        self.journal = journal or Journal()
        self.injector = Injector(options.inject, options.seed)
        self.lock, self.fault_lock = GcPausingLock(), GcPausingLock()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._soft, self._raised = soft, soft
        self._base = soft
        if hard == resource.RLIM_INFINITY or hard > soft:
            want = soft + 65536 if hard == resource.RLIM_INFINITY else min(hard, soft + 65536)
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (want, hard))
                self._raised = want
        if self._raised == soft:
            self._base = max(soft // 2, 64)
        self.user = UserMemory(self.make_memfd("nvgpusim-scratch"))
        self.files: dict[Key, DeviceFile] = {}
        self.dmabufs: dict[Key, DmaBuf] = {}
        self.peers: dict[int, DeviceFile] = {}
        self.hangups = self._make_hangup_epoll()
        self.executor: Executor | None = None
        self.make_executor: Callable[[Kernel], Executor] | None = None
        self.shape = GpuShape(options)
        self.nvmap = NvMapHandles(self)
        self.usermode = UsermodePage(self)
        self.spaces = 0
        self.channel_ids = list(range(512))
        self.tsg_ids = list(range(512))
        self.syncpoints = list(range(64))
        self.ports: dict[int, ChannelPort] = {}
        self.cpu_maps = CpuMappings()
        self.scheduler_locked = False
        self.default_modes = (WFI, WFI)
        self.before_kill: Callable[[], None] = lambda: None

    # descriptors

    def descriptor_limit(self) -> int:
        """The client's RLIMIT_NOFILE: what it set itself, or what it was before the model's."""
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return self._soft if soft == self._raised else soft

    def move_fd_high(self, fd: int) -> int:
        """Move one of the model's own fds out of the client's range."""
        try:
            moved = fcntl(fd, F_DUPFD_CLOEXEC, self._base)
        except OSError:
            return fd
        _real_close(fd)
        return moved

    def make_memfd(self, name: str) -> int:
        """A memfd in the model's own range of descriptors."""
        return self.move_fd_high(os.memfd_create(name, os.MFD_CLOEXEC))

    def _make_hangup_epoll(self) -> select.epoll:
        """An epoll of this process alone, on all peers."""
        made = select.epoll()
        moved = fcntl(made.fileno(), F_DUPFD_CLOEXEC, self._base)
        made.close()
        hangups = select.epoll.fromfd(moved)
        for peer in self.peers:
            hangups.register(peer, _HANGUP)
        return hangups

    def dup_for_client(self, fd: int) -> int:
        """The lowest free descriptor of the client's, a copy of `fd`; EMFILE when there is none."""
        try:
            new = os.dup(fd)
        except OSError as error:
            raise KernelError("fd.full") from error
        if new >= self.descriptor_limit():
            _real_close(new)
            raise KernelError("fd.full")
        self.journal.count_rule("fd.cloexec")
        return new

    def give_client_fd(self, file: DeviceFile) -> int:
        """Give the client an fd for `file`."""
        try:
            theirs, ours = socket.socketpair()
        except OSError as error:
            raise KernelError("fd.full") from error
        peer = self.move_fd_high(ours.detach())
        inner = self.move_fd_high(theirs.detach())
        try:
            fd = self.dup_for_client(inner)
        except KernelError:
            _real_close(peer)
            raise
        finally:
            _real_close(inner)
        file.peer = socket.socket(fileno=peer)
        status = os.fstat(fd)
        file.key = (status.st_dev, status.st_ino)
        self.files[file.key] = file
        self.peers[peer] = file
        self.hangups.register(peer, _HANGUP)
        return fd

    def find_device_or_dmabuf(self, fd: int) -> DeviceFile | DmaBuf | None:
        """The model's object behind a descriptor, None for a foreign or closed one."""
        if not 0 <= fd < 1 << 31:
            return None
        try:
            status = os.fstat(fd)
        except OSError:
            return None
        key = (status.st_dev, status.st_ino)
        if stat.S_ISSOCK(status.st_mode):
            return self.files.get(key)
        return self.dmabufs.get(key)

    def find_file_by_fd_and_kind(self, fd: int, kind: type[F]) -> F | None:
        """The open device of that kind behind `fd`, or None."""
        found = self.find_device_or_dmabuf(fd)
        return found if isinstance(found, kind) else None

    def require_dmabuf(self, fd: int, badfd: str, not_dmabuf: str) -> DmaBuf:
        """The dmabuf behind `fd`; raises KernelError with one of the two rules."""
        found = self.find_device_or_dmabuf(fd)
        if isinstance(found, DmaBuf):
            return found
        try:
            os.fstat(fd)
        except (OSError, OverflowError):
            raise KernelError(badfd, f"fd {fd}") from None
        raise KernelError(not_dmabuf, f"fd {fd}")

    def is_read_only_fd(self, fd: int) -> bool:
        """True if `fd` is open for reading only: the mode of a dmabuf."""
        return fcntl(fd, F_GETFL) & os.O_ACCMODE == os.O_RDONLY

    # system calls

    def release_closed_files(self) -> None:
        """Release every device whose last fd is gone."""
        with self.lock:
            for peer, _ in self.hangups.poll(0):
                file = self.peers.pop(peer, None)
                if file is None:
                    continue
                self.hangups.unregister(peer)
                del self.files[file.key]
                if file.peer is not None:
                    file.peer.close()
                file.release()
                self.journal.count_call("close", file.kind)

    def open(self, path: str) -> int:
        """open() of a node in NODES; raises OSError."""
        with self.lock, _KernelErrorsAsOsErrors(self, "open", f"open of {path}"):
            self.release_closed_files()
            self.injector.raise_if_due(f"OPEN_{NODES[path].upper()}")
            match NODES[path]:
                case "ctrl":
                    file: DeviceFile = CtrlFile(self)
                case "as":
                    raise KernelError("as.node")
                case "tsg":
                    file = TsgFile(self)
                case "channel":
                    file = ChannelFile(self, -1)
                case _:
                    file = NvMapFile(self)
            try:
                fd = self.give_client_fd(file)
            except KernelError:
                file.release()
                raise
            self.journal.count_call("open", file.kind)
            return fd

    def ioctl(self, fd: int, request: int, arg: int) -> int:
        """ioctl() on a device or dmabuf of the model; raises OSError."""
        request &= 0xFFFFFFFF
        name = self.abi.ioctl_name(request)
        with self.lock, _KernelErrorsAsOsErrors(self, "ioctl", name):
            self.release_closed_files()
            found = self.find_device_or_dmabuf(fd)
            if isinstance(found, DmaBuf):
                if request not in _DMA_BUF_SYNC:
                    raise KernelError("dmabuf.ioctl")
                return 0
            if found is None:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            known = self.abi.by_number.get(request)
            self.journal.count_call("ioctl", name)
            if known is not None:
                self.injector.raise_if_due(known.short_name)
            return found.ioctl(request, arg)

    def fd_to_map(
        self, fd: int, length: int, offset: int
    ) -> tuple[int, DeviceFile | DmaBuf] | None:
        """Descriptor to mmap in place of `fd` (None: not the model's); raises OSError.

        Follow it with :meth:`on_mapped` once the host kernel has mapped the returned fd.
        """
        with self.lock, _KernelErrorsAsOsErrors(self, "mmap", f"mmap of fd {fd}"):
            self.release_closed_files()
            found = self.find_device_or_dmabuf(fd)
            if found is None:
                return None
            self.injector.raise_if_due("MMAP")
            if isinstance(found, DeviceFile):
                return found.fd_for_mmap(length, offset), found
            if offset + length > found.size:
                raise KernelError("dmabuf.mmap-range", f"{offset + length:#x} > {found.size:#x}")
            if found.vpr:
                raise KernelError("dmabuf.vpr")
            if not found.is_allocated:
                self.journal.count_rule("dmabuf.sigbus")
            return fd, found

    def on_mapped(self, address: int, length: int, what: DeviceFile | DmaBuf) -> None:
        """The host kernel has mapped [address, address + length)."""
        with self.lock:
            end = address + -(-length // 4096) * 4096
            for old in self.on_unmapped(address, end - address):
                if isinstance(old, DmaBuf) and old is not what:
                    self.journal.add_note(
                        f"mmap at {address:#x} replaced the CPU mapping of {old!r}: "
                        f"{client_call_text()}"
                    )
            if isinstance(what, DmaBuf):
                what.add_reference("cpu")
            self.cpu_maps.add_mapping(CpuMapping(address, end, what))
            self.journal.count_rule("fd.fork")
            self.journal.count_call("mmap", what.kind if isinstance(what, DeviceFile) else "dmabuf")

    def on_unmapped(self, address: int, length: int) -> list[DeviceFile | DmaBuf]:
        """[address, address + length) is unmapped or replaced; returns what was there."""
        with self.lock:
            end = address + -(-length // 4096) * 4096
            self.nvmap.copy_vanishing_pages(address, end)
            gone, left = self.cpu_maps.clear_range(address, end)
            for entry in left:
                if isinstance(entry.what, DmaBuf):
                    entry.what.add_reference("cpu")
            for entry in gone:
                if isinstance(entry.what, DmaBuf):
                    entry.what.drop_reference("cpu")
                else:
                    self.usermode.on_page_unmapped(entry.what)
            return [entry.what for entry in gone]

    def refuse_dmabuf_msync(self, address: int) -> None:
        """msync() at `address`; raises OSError for a dmabuf's mapping."""
        with self.lock, _KernelErrorsAsOsErrors(self, "msync", f"msync of {address:#x}"):
            if self.cpu_maps.mapping_at(address) is not None:
                raise KernelError("dmabuf.msync")

    # execution side

    def kill_tsg_for_fault(self, port: ChannelPort, report: FaultReport) -> None:
        """A fatal error: kill the TSG, write the notifiers, keep the SM records. Any thread."""
        with self.fault_lock:
            if not port.alive:
                return
            # First the report: a client that reads its notifier asks at once what happened.
            self.journal.count_rule("kill.tsg")
            self.journal.add_fault(report, port)
            victims = [  # list(): the client's threads open and close meanwhile
                f
                for f in list(self.files.values())
                if isinstance(f, ChannelFile) and f.tsg is not None and f.tsg.id == port.tsg_id
            ]
            for channel in victims:
                if channel.tsg is not None:
                    channel.tsg.sm_errors.update(report.sm)
                channel.on_tsg_killed(report.code)
            port.alive = False
            for other in list(self.ports.values()):
                if other.tsg_id == port.tsg_id:
                    other.alive = False

    def oom_kill(self) -> None:
        """Linux ends the process for want of memory."""
        self.before_kill()
        os.kill(os.getpid(), signal.SIGKILL)

    def on_fork_child(self) -> None:
        """In a forked child: the model is a copy, the GPU and its channels are the parent's.

        Buffers are shared with the parent. What both would write, or listen to, is made anew.
        """
        with self.lock:
            self.executor, self.ports = None, {}
            for file in self.files.values():
                if isinstance(file, ChannelFile):
                    file.gone, file.port = True, None
            self.cpu_maps = CpuMappings()
            for buf in list(self.dmabufs.values()):
                buf.on_fork_child()
            self.hangups.close()
            self.hangups = self._make_hangup_epoll()
            _real_close(self.user.fd)
            self.user = UserMemory(self.make_memfd("nvgpusim-scratch"))
            self.usermode.on_fork_child()
            in_use = self.journal.in_use
            self.journal.on_fork_child()
            self.journal.count_buffer_bytes(in_use)

    def stop_threads(self) -> None:
        """Stop the threads."""
        self.usermode.stop_watching()
        if self.executor is not None:
            self.executor.stop_threads()

    def stop_and_close_fds(self) -> None:
        """Stop, and give back the model's own descriptors and the limit as it was."""
        self.stop_threads()
        with self.lock:
            for peer, file in self.peers.items():
                self.hangups.unregister(peer)
                if file.peer is not None:
                    file.peer.close()
            for handle in self.nvmap.handles.values():
                _real_close(handle.fd)
            for fd in (self.usermode.fd, self.user.fd):
                _real_close(fd)
            self.hangups.close()
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            if soft == self._raised != self._soft:
                resource.setrlimit(resource.RLIMIT_NOFILE, (self._soft, hard))

    def leak_lines(self) -> list[str]:
        """List all that is open, mapped or allocated, one line each. Call it with the lock held."""
        found: list[str] = []
        for kind, n in sorted(Counter(f.kind for f in self.files.values()).items()):
            lines = sorted({f.line for f in self.files.values() if f.kind == kind})
            found.append(f"{n} {kind} fd{'s' * (n > 1)} open, opened at {lines[0]}")
        handles = list(self.nvmap.handles.values())
        if handles:
            total = sum(h.buf.size for h in handles if h.buf.is_allocated)
            found.append(f"{len(handles)} nvmap handles ({total:#x} bytes): {handles[0].line}")
        held = self.nvmap.client_fds_by_buffer()
        if held:
            found.append(f"{len(held)} buffers with open dmabuf fds: {next(iter(held))!r}")
        vms = [getattr(f, "vm", None) for f in self.files.values()]
        spaces = {vm.number: vm for vm in vms if vm is not None}
        for vm in spaces.values():
            maps = [m for m in vm.pages.mappings() if not m.kernel]
            if maps:
                total = sum(m.size for m in maps)
                found.append(f"{len(maps)} GPU mappings ({total:#x} bytes): {maps[0].line}")
            if vm.areas:
                found.append(f"{len(vm.areas)} reserved VA areas: {vm.areas[0].line}")
        buffers = [m for m in self.cpu_maps if isinstance(m.what, DmaBuf)]
        if buffers:
            total = sum(m.end - m.start for m in buffers)
            found.append(f"{len(buffers)} CPU mappings ({total:#x} bytes) of {buffers[0].what!r}")
        return found

    def check_invariants(self) -> None:
        """The model's invariants; raises AssertionError naming the one that broke."""
        with self.lock:
            for file in self.files.values():
                file.check_invariants()
            self.nvmap.check_invariants()
            shown = self.cpu_maps.check_and_count_mappings()
            for buf in self.dmabufs.values():
                assert buf.refs["cpu"] == shown[buf], f"{buf!r}: {shown[buf]} CPU mappings"


class _KernelErrorsAsOsErrors:
    """In a with statement: turns KernelError into OSError, and counts both."""

    def __init__(self, kernel: Kernel, call: str, what: str) -> None:
        self.kernel, self.call, self.what = kernel, call, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, KernelError):
            return
        journal = self.kernel.journal
        journal.count_rule(error.rule)
        journal.add_refusal(self.call, self.what, error, client_call_text())
        raise OSError(error.errno, os.strerror(error.errno)) from error


_HANGUP = select.EPOLLHUP | select.EPOLLRDHUP
_DMA_BUF_SYNC = {0x40086200}
"""DMA_BUF_IOCTL_SYNC of linux/dma-buf.h."""
