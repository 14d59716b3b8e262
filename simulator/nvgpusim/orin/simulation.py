"""The simulator in a process: a kernel behind the seam, from start-up to the report at exit."""

from __future__ import annotations

import atexit
import gc
import json
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .. import locks
from ..allocated_pieces import ALLOCATED_PIECES
from ..memory import DmaBuf
from ..options import Options
from .call_trace import IoctlCapture, TraceWriter
from .gpu import programs
from .gpu_api import Executor
from .kernel import Kernel
from .kernel.board_memory import MEMINFO, meminfo_text
from .kernel.core import NODES
from .kernel.tsg import EventFile
from .report import Journal, collect_report
from .syscall_seam import SyscallBackend, SyscallSeam

DIRECTORIES = {
    "/dev/nvgpu": ["igpu0"],
    "/dev/nvgpu/igpu0": sorted(p.rpartition("/")[2] for p in NODES if "igpu0" in p),
}


class ModelBackend(SyscallBackend):
    """Answers the seam from a model kernel; `writer` gets every event."""

    imposes = True

    def __init__(self, kernel: Kernel, writer: TraceWriter | None = None) -> None:
        self.kernel, self.writer = kernel, writer

    def _write_event(self, op: str, **values: Any) -> None:
        if self.writer is not None:
            self.writer.write_event(op, **values)

    def owns_path(self, path: str) -> bool:
        """A node of the model."""
        return path in NODES or path == MEMINFO

    def listdir(self, path: str) -> list[str] | None:
        """The v2 directory."""
        return DIRECTORIES.get(path)

    def open(self, path: str, flags: int) -> int:
        """open() of a node, or of the board's /proc/meminfo."""
        if path == MEMINFO:
            return memfd_of_text(meminfo_text(self.kernel))
        try:
            fd = self.kernel.open(path)
        except OSError as error:
            self._write_event("open", path=path, errno=error.errno)
            raise
        self._write_event("open", path=path, fd=fd, errno=0)
        return fd

    def on_page_cache_given_up(self, piece: tuple[int, int, int], size: int) -> None:
        """The page cache has so much less; a piece that is given up again is gone already."""
        self.kernel.journal.given_up[piece] = size

    def before_close(self, fd: int) -> Any:
        """Remember what a descriptor was."""
        return self.kernel.find_device_or_dmabuf(fd), fd

    def after_close(self, token: Any) -> None:
        """Release what has no descriptor any more."""
        found, fd = token
        if found is None:
            return
        with self.kernel.lock:
            if isinstance(found, DmaBuf):
                self.kernel.nvmap.on_fd_closed(found)
            else:
                self.kernel.release_closed_files()
        self._write_event("close", fd=fd)

    def ioctl(self, fd: int, request: int, arg: int, size: int) -> Any:
        """ioctl on a device or dmabuf of the model."""
        if self.kernel.find_device_or_dmabuf(fd) is None:
            return NotImplemented
        if self.writer is None:
            return self.kernel.ioctl(fd, request, arg)
        capture, result, number = IoctlCapture(request, arg), -1, 0
        try:
            result = self.kernel.ioctl(fd, request, arg)
            return result
        except OSError as error:
            number = error.errno or 0
            raise
        finally:
            self._write_event("ioctl", **capture.event_after_call(fd, result, number))

    def fd_to_map(self, fd: int, length: int, offset: int) -> Any:
        """mmap of the doorbell page or of a dmabuf."""
        try:
            got = self.kernel.fd_to_map(fd, length, offset)
        except OSError as error:
            self._write_event("mmap", fd=fd, length=length, offset=offset, errno=error.errno)
            raise
        return NotImplemented if got is None else (got[0], (got[1], fd, offset))

    def maps_shared(self, token: Any) -> bool:
        """nvmap does (nvmap_dmabuf.c:456); nvgpu's doorbell does not (ioctl_ctrl.c:2861)."""
        return isinstance(token[0], DmaBuf)

    def on_mapped(self, address: int, length: int, token: Any) -> None:
        """The host kernel has mapped."""
        if token is None:
            self.kernel.on_unmapped(address, length)
            return
        found, fd, offset = token
        self.kernel.on_mapped(address, length, found)
        self._write_event("mmap", fd=fd, length=length, offset=offset, address=address, errno=0)

    def on_unmapping(self, address: int, length: int) -> None:
        """A range goes away."""
        if self.kernel.on_unmapped(address, length):
            self._write_event("munmap", address=address, length=length)

    def on_msync(self, address: int) -> None:
        """Refused on dmabufs."""
        self.kernel.refuse_dmabuf_msync(address)

    def on_barrier(self) -> None:
        """A barrier orders the stores before it for the GPU."""
        if self.kernel.executor is not None:
            if self.kernel.options.order:
                self.kernel.usermode.poll_doorbell()
            self.kernel.executor.on_barrier()

    def on_polled(self, fds: list[int]) -> None:
        """An event shows once."""
        for fd in fds:
            file = self.kernel.find_file_by_fd_and_kind(fd, EventFile)
            if file is not None and file.posted:
                file.posted = False
                self.kernel.journal.count_rule("event.poll")
                take_posted_event(fd)

    def on_exit(self) -> None:
        """The report, before the process ends without atexit."""
        Simulation.write_report_and_stop()


def memfd_of_text(text: str) -> int:
    """A descriptor at the beginning of a text."""
    fd = os.memfd_create("text", os.MFD_CLOEXEC)
    os.write(fd, text.encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def take_posted_event(fd: int) -> None:
    """Take the out-of-band byte of an event, and its place in the queue, out of the socket."""
    with socket.socket(fileno=os.dup(fd)) as copy:
        copy.setblocking(False)
        for flags in (socket.MSG_OOB, 0):
            with suppress(OSError):
                copy.recv(1, flags)


class Simulation:
    """The simulator of this process."""

    current: Simulation | None = None

    def __init__(self, options: Options, directory: str | None = None) -> None:
        self.options, self.directory = options, directory
        self.kernel = Kernel(options, Journal(sys.stderr))
        self.kernel.make_executor, self.kernel.before_kill = (
            make_gpu_for_kernel,
            Simulation.write_report_and_stop,
        )
        writer = (
            TraceWriter(self._claim_trace_path(), "nvgpusim", options.profile)
            if options.record
            else None
        )
        self.seam = SyscallSeam(ModelBackend(self.kernel, writer))
        self._pid = os.getpid()
        self._done = False

    def _claim_trace_path(self) -> str:
        """The trace's name; a second process of the run gets its pid appended."""
        path = self.options.record
        if self.directory is None:
            return path
        with suppress(FileExistsError):
            os.close(os.open(f"{self.directory}/recorded", os.O_CREAT | os.O_EXCL))
            return path
        return f"{path}.{os.getpid()}"

    def start(self) -> None:
        """Install the seam; the report is written at exit."""
        if self.directory is not None:
            with open(f"{self.directory}/started.{self._pid}", "w"):
                pass
        self.seam.install()
        for name, hook in locks.gc_replacements_for_client().items():
            self.seam.replace_attribute(gc, name, hook)
        ALLOCATED_PIECES.keeps_writes = "init" in self.options.watched_checks
        programs.install_hooks()
        Simulation.current = self
        atexit.register(Simulation.write_report_and_stop)

    def on_fork_child(self) -> None:
        """In a forked child: a report of its own."""
        self._pid, self._done = os.getpid(), False
        self.kernel.on_fork_child()

    @classmethod
    def write_report_and_stop(cls) -> None:
        """Write the report of this process, once, and stop the model."""
        self = cls.current
        if self is None or self._done:
            return
        self._done = True
        report = collect_report(self.kernel)
        self.kernel.stop_threads()
        used = any(k.startswith(("open ", "ioctl ")) for k in report["counts"])
        if self.directory is not None and (used or not report["child"]):
            path = f"{self.directory}/{self._pid}.json"
            with suppress(OSError), open(path, "w", encoding="utf-8") as out:
                json.dump(report | {"used": used}, out)

    def uninstall(self) -> None:
        """Take the seam out again (for tests)."""
        self.seam.remove()
        self.kernel.stop_and_close_fds()
        ALLOCATED_PIECES.keeps_writes = True
        Simulation.current = None


def _make_fork_hook(then: Callable[[Simulation], None]) -> Callable[[], None]:
    return lambda: then(Simulation.current) if Simulation.current is not None else None


os.register_at_fork(
    # no call is under way in the child's copy
    before=_make_fork_hook(lambda s: s.kernel.lock.acquire()),
    after_in_parent=_make_fork_hook(lambda s: s.kernel.lock.release()),
    after_in_child=_make_fork_hook(Simulation.on_fork_child),
)


def make_gpu_for_kernel(kernel: Kernel) -> Executor:
    """The execution side for a kernel."""
    from .gpu import Gpu

    return Gpu(kernel.options, note=kernel.journal.add_note)


def start_from_environment() -> None:
    """Called by the sitecustomize of a simulated process: start if the environment says so."""
    text = os.environ.get("NVGPUSIM_OPTIONS")
    if text and Simulation.current is None:
        Simulation(Options.from_json(text), os.environ.get("NVGPUSIM_DIR")).start()
