"""Record what a program asks of the real nvgpu and nvmap: standard library only.

On a board: `python3 nvgpu-recorder.pyz -o trace.jsonl -- script.py args`. Calls go through to the
kernel unchanged; the trace is what `nvgpusim replay` reads.
"""

from __future__ import annotations

import ctypes
import errno
import os
import runpy
import sys
import zipfile
from pathlib import Path
from typing import Any

from .call_trace import NEW_FDS, IoctlCapture, TraceWriter
from .syscall_seam import SyscallBackend, SyscallSeam

_PREFIXES = ("/dev/nvgpu/", "/dev/nvhost-", "/dev/nvmap", "/dmabuf", "anon_inode:nv")
_PROFILES = {312: "r35", 328: "r36", 336: "r38", 344: "r39"}
"""Size of nvgpu_gpu_characteristics by driver generation."""


class RecordingBackend(SyscallBackend):
    """Lets the kernel answer and writes down what it said."""

    def __init__(self, writer: TraceWriter) -> None:
        self.writer = writer
        self.fds: set[int] = set()
        self._open, self._libc = os.open, ctypes.CDLL(None, use_errno=True)
        self._ioctl = self._libc.ioctl
        self._ioctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)

    def owns_path(self, path: str) -> bool:
        """Device nodes of the GPU and of nvmap."""
        return path.startswith(_PREFIXES[:3])

    def _is_gpu_fd(self, fd: int) -> bool:
        if fd in self.fds:
            return True
        try:
            return os.readlink(f"/proc/self/fd/{fd}").startswith(_PREFIXES)
        except OSError:
            return False

    def open(self, path: str, flags: int) -> int:
        """The kernel's open."""
        try:
            fd = self._open(path, flags | os.O_CLOEXEC)
        except OSError as error:
            self.writer.write_event("open", path=path, errno=error.errno)
            raise
        self.fds.add(fd)
        self.writer.write_event("open", path=path, fd=fd, errno=0)
        return fd

    def on_closed(self, fd: int) -> None:
        """A descriptor of the GPU's is gone."""
        if fd in self.fds:
            self.fds.discard(fd)
            self.writer.write_event("close", fd=fd)

    def ioctl(self, fd: int, request: int, arg: int, size: int) -> Any:
        """The kernel's ioctl, with what went in and came out."""
        if not self._is_gpu_fd(fd):
            return NotImplemented
        capture = IoctlCapture(request, arg)
        ctypes.set_errno(0)
        result = int(self._ioctl(fd, capture.request, arg))
        number = ctypes.get_errno() if result < 0 else 0
        event = capture.event_after_call(fd, result, number)
        self.writer.write_event("ioctl", **event)
        if number:
            raise OSError(number, os.strerror(number))
        made = NEW_FDS.get((chr(request >> 8 & 0xFF), request & 0xFF))
        if made is not None:
            self.fds.add(int.from_bytes(bytes.fromhex(event["out"])[made : made + 4], "little"))
        return result

    def fd_to_map(self, fd: int, length: int, offset: int) -> Any:
        """Let the kernel map; `mapped` writes it down."""
        return (fd, (fd, offset)) if self._is_gpu_fd(fd) else NotImplemented

    def on_mapped(self, address: int, length: int, token: Any) -> None:
        """The kernel has mapped."""
        if token is not None:
            fd, offset = token
            values = {"fd": fd, "length": length, "offset": offset}
            self.writer.write_event("mmap", address=address, errno=0, **values)

    def on_unmapping(self, address: int, length: int) -> None:
        """Every munmap: the reader knows which were the GPU's."""
        self.writer.write_event("munmap", address=address, length=length)


def driver_profile(ctrl: str = "/dev/nvgpu/igpu0/ctrl") -> str:
    """The generation of the running driver, by the size of its characteristics."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fd = os.open(ctrl, os.O_RDWR)
    except OSError:
        return "unknown"
    try:
        args = (ctypes.c_uint64 * 2)()
        libc.ioctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)
        libc.ioctl(fd, 0xC0104705, ctypes.addressof(args))
        return _PROFILES.get(args[0], "unknown")
    finally:
        os.close(fd)


def record_program(output: str, argv: list[str]) -> None:
    """Run a script (or -m module) of this interpreter with its calls written to `output`."""
    writer = TraceWriter(output, "board", driver_profile())
    seam = SyscallSeam(RecordingBackend(writer))
    seam.install()
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path.insert(0, str(Path(argv[0]).resolve().parent))
            runpy.run_path(argv[0], run_name="__main__")
    finally:
        seam.remove()
        writer.close()


def main(argv: list[str] | None = None) -> int:
    """`nvgpu-recorder.pyz -o TRACE -- script.py args`."""
    args = list(sys.argv[1:] if argv is None else argv)
    usage = "expected -o TRACE -- script.py [args] or -o TRACE -- -m module [args]"
    if len(args) < 4 or args[0] != "-o" or args[2] != "--" or (args[3] == "-m" and len(args) < 5):
        sys.stderr.write(f"nvgpu-recorder: error: {usage}\n")
        return 2
    output, command = args[1], args[3:]
    if command[0].startswith("python"):
        del command[0]
    if not command or (command[0] != "-m" and not Path(command[0]).is_file()):
        name = command[0] if command else "nothing"
        sys.stderr.write(f"nvgpu-recorder: error: {name} is not a script; {usage}\n")
        return 2
    try:
        record_program(output, command)
    except OSError as error:
        if error.filename != output:
            raise
        sys.stderr.write(
            f"nvgpu-recorder: error: {output}: {os.strerror(error.errno or errno.EIO)}\n"
        )
        return 2
    return 0


def write_zipapp(target: Path) -> None:
    """Pack the recorder into one file; raises OSError."""
    here = Path(__file__).parent
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("nvgpu_recorder/__init__.py", "")
        for name in ("recorder.py", "syscall_seam.py", "call_trace.py"):
            archive.write(here / name, f"nvgpu_recorder/{name}")
        archive.writestr(
            "__main__.py",
            "import sys\n\nfrom nvgpu_recorder.recorder import main\n\nsys.exit(main())\n",
        )
