"""The wrappers by which a program reaches the kernel, each caught, and foreign calls untouched."""

from __future__ import annotations

import array
import builtins
import ctypes
import fcntl
import mmap
import os
import pathlib
import select
import struct
import termios
from typing import Any

import pytest
from tests.simulator.kernel import rawclient as rc
from tests.simulator.kernel.conftest import simulated
from tests.simulator.kernel.process.test_cli import sim
from tests.simulator.kernel.rawclient import Board

from nvgpusim.orin.kernel import Kernel
from nvgpusim.orin.kernel.core import NODES

PYTHONS_OWN = fcntl.ioctl


@pytest.mark.parametrize("node", sorted(NODES))
def test_every_node_opens_but_the_one_that_wants_big_pages(kernel: Kernel, node: str) -> None:
    assert os.path.exists(node) and pathlib.Path(node).is_char_device()
    assert os.access(node, os.R_OK | os.W_OK) and not os.access(node, os.X_OK)
    if NODES[node] == "as":
        with pytest.raises(OSError, match="Invalid argument"):
            os.open(node, os.O_RDWR)
        return
    fd = os.open(node, os.O_RDWR)
    os.close(fd)
    with open(node, "rb+", buffering=0) as file:
        assert kernel.find_device_or_dmabuf(file.fileno()) is not None
    kernel.release_closed_files()
    assert kernel.files == {}


def test_directories(kernel: Kernel) -> None:
    assert os.listdir("/dev/nvgpu") == ["igpu0"]
    assert os.listdir("/dev/nvgpu/igpu0/") == ["as", "channel", "ctrl", "tsg"]
    assert os.path.isdir("/dev/nvgpu/igpu0") and not os.path.exists("/dev/nvgpu/igpu1")
    assert "null" in os.listdir("/dev")


def test_a_table_answers_what_has_no_handler(kernel: Kernel) -> None:
    ctrl = os.open(rc.CTRL, os.O_RDWR)
    assert rc.call(ctrl, "G", 1, "I", 0, direction="r") == (0x10000,)
    assert rc.call(ctrl, "G", 2, "10I", *[0] * 10, direction="r")[0] == 32
    with pytest.raises(OSError, match="Inappropriate ioctl"):
        rc.call(ctrl, "G", 28, "IHHQ", 0, 0, 0, 0)
    assert kernel.journal.rules["dispatch.not-modelled"] == 1


def test_dup_keeps_the_device(kernel: Kernel) -> None:
    fd = os.open(rc.CTRL, os.O_RDWR)
    twin = os.dup(fd)
    os.close(fd)
    assert rc.call(twin, "G", 18, "II", 0, 0)[0] == 16
    other = fcntl.fcntl(twin, fcntl.F_DUPFD_CLOEXEC, 60)
    last = os.open("/dev/null", os.O_RDONLY)
    os.dup2(other, last)
    os.close(twin)
    os.close(other)
    assert rc.call(last, "G", 18, "II", 0, 0)[0] == 16
    os.close(last)
    assert kernel.files == {}


def test_close_of_a_closed_fd(kernel: Kernel) -> None:
    fd = os.open(rc.CTRL, os.O_RDWR)
    os.close(fd)
    with pytest.raises(OSError, match="Bad file"):
        os.close(fd)
    with pytest.raises(OSError, match="Bad file"):
        rc.call(fd, "G", 18, "II", 0, 0)


def test_c_calls_are_caught(kernel: Kernel) -> None:
    libc = rc.libc()
    fd = libc.open(rc.CTRL.encode(), os.O_RDWR)
    args = (ctypes.c_uint * 2)()
    request = ctypes.c_ulong(rc.iowr("G", 18, 8))
    assert libc.ioctl(fd, request, ctypes.byref(args)) == 0 and args[0] == 16
    assert libc.ioctl(fd, request, ctypes.c_void_p(ctypes.addressof(args))) == 0
    assert libc.ioctl(fd, request, args) == 0
    assert libc.ioctl(fd, request, None) == -1 and ctypes.get_errno() == 14
    assert libc.close(fd) == 0
    assert kernel.files == {}
    assert libc.open(b"/dev/nvgpu/igpu0/dbg", os.O_RDWR) == -1
    null = libc.open(b"/dev/null", os.O_RDWR)
    assert null >= 0 and libc.close(null) == 0


def test_c_errors_set_errno(kernel: Kernel) -> None:
    fd = os.open(rc.NVMAP, os.O_RDWR)
    libc = rc.libc()
    libc.mmap.restype = ctypes.c_void_p
    got = libc.mmap(None, ctypes.c_size_t(4096), 3, 1, fd, ctypes.c_long(0))
    assert got == 2**64 - 1 and ctypes.get_errno() == 1
    assert libc.ioctl(fd, ctypes.c_ulong(0x4E6C), None) == -1 and ctypes.get_errno() == 25


def test_python_mmap_of_a_dmabuf(kernel: Kernel) -> None:
    board = Board()
    buffer = board.buffer(8192, keep_fd=True)
    pages = mmap.mmap(buffer.fd, 8192)
    pages[0:4] = b"seam"
    assert bytes(buffer.mem[:4]) == b"seam" and isinstance(pages, mmap.mmap)
    with pytest.raises(OSError, match="Invalid"):
        pages.flush()
    with pytest.raises(OSError, match="Invalid"):
        mmap.mmap(buffer.fd, 12288)
    pages.close()
    mmap.mmap(buffer.fd, 4096)
    with mmap.mmap(-1, 4096) as anonymous:
        anonymous[0] = 1
        anonymous.flush()
    board.close()
    assert kernel.leak_lines() == []


def test_a_private_mapping_is_shared_by_nvmap_and_loses_a_doorbell(kernel: Kernel) -> None:
    board = Board()
    fd = board.dmabuf()
    one, other = (rc.do_mmap(fd, 4096, flags=how) for how in (mmap.MAP_PRIVATE, mmap.MAP_SHARED))
    rc.view(one, 4096)[0] = 7
    assert rc.view(other, 4096)[0] == 7
    token, ctrl = board.channel().token, os.open(rc.CTRL, os.O_RDWR)
    for how, heard in ((mmap.MAP_PRIVATE, 0), (mmap.MAP_SHARED, 1)):
        doorbell = rc.do_mmap(ctrl, 0x10000, flags=how)
        rc.view(doorbell, 0x10000).cast("I")[0x90 // 4] = token
        kernel.usermode.poll_doorbell()
        assert kernel.usermode.rings == heard
        rc.do_munmap(doorbell, 0x10000)


def test_foreign_fds_pass_through(kernel: Kernel, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    path.write_text("12345")
    with open(path) as file:
        assert fcntl.ioctl(file, termios.FIONREAD, b"\0\0\0\0") == struct.pack("i", 5)
        waiting = array.array("i", [0])
        assert fcntl.ioctl(file.fileno(), termios.FIONREAD, waiting) == 0 and waiting[0] == 5
        with mmap.mmap(file.fileno(), 5, prot=mmap.PROT_READ) as pages:
            assert pages[:] == b"12345"
    with pytest.raises(FileNotFoundError):
        os.stat(tmp_path / "absent")
    assert os.path.exists(str(path).encode()) and not os.path.exists(b"/dev/absent")


def test_immutable_arguments_come_back(kernel: Kernel) -> None:
    fd = os.open(rc.CTRL, os.O_RDWR)
    out = fcntl.ioctl(fd, rc.iowr("G", 18, 8), bytes(8))
    assert out == struct.pack("<II", 16, 0)
    kept = bytearray(8)
    assert fcntl.ioctl(fd, rc.iowr("G", 18, 8), kept, False) == out and kept == bytes(8)


@pytest.mark.parametrize(
    "arguments",
    [
        (0x4E04, 1 << 31), (0x4E04, -(1 << 31) - 1), (0x4E04, 1 << 70), (0x4E04, 1.5),
        (0x4E04, None), (1.5, 0), ("x", 0), (0xC0084E01, b"x" * 1025),
    ],
)  # fmt: skip
def test_arguments_that_python_refuses(kernel: Kernel, arguments: tuple[Any, ...]) -> None:
    fd, null = os.open(rc.NVMAP, os.O_RDWR), os.open("/dev/null", os.O_RDWR)
    raised = []
    for ioctl, place in ((fcntl.ioctl, fd), (PYTHONS_OWN, null)):
        with pytest.raises((OverflowError, TypeError, ValueError)) as caught:
            ioctl(place, *arguments)
        raised.append((caught.type, str(caught.value)))
    os.close(null)
    assert raised[0] == raised[1]


@pytest.mark.parametrize("request_number", [0x4E04 | 1 << 32, 0x4E04, 0x4E04 - (1 << 32)])
def test_arguments_that_python_takes(kernel: Kernel, request_number: int) -> None:
    """Requests by their low 32 bits, arguments as C ints, whatever has __index__ or fileno()."""

    class Number:
        def __index__(self) -> int:
            return -1

    with open(rc.NVMAP, "r+b", buffering=0) as node:
        arguments: tuple[Any, ...] = (Number(), -1, -(1 << 31), (1 << 31) - 1, True)
        for argument in arguments:
            assert fcntl.ioctl(node, request_number, argument) == 0
        with pytest.raises(TypeError, match="fileno"):
            fcntl.ioctl("x", request_number)  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="negative"):
            fcntl.ioctl(-1, request_number)
    assert kernel.journal.counts["ioctl NVMAP_FREE"] == 5


def test_short_buffer_lets_the_kernel_read_garbage(kernel: Kernel) -> None:
    fd = os.open(rc.CTRL, os.O_RDWR)
    with pytest.raises(OSError, match="Invalid"):
        fcntl.ioctl(fd, rc.iowr("G", 9, 24), bytearray(8))
    assert kernel.journal.refusals[-1]["rule"] == "tsg.share"


def test_leaks_are_named(kernel: Kernel) -> None:
    board = Board()
    handle = rc.create(board.nvmap, 4096)
    rc.alloc(board.nvmap, handle)
    fd = rc.get_fd(board.nvmap, handle)
    rc.map_buffer(board.as_fd, fd)
    rc.alloc_space(board.as_fd, 16, 0x10000000)
    rc.do_mmap(fd, 4096)
    text = "\n".join(kernel.leak_lines())
    for what in ("1 ctrl fd", "nvmap handles", "dmabuf fds", "GPU mappings", "VA areas", "CPU map"):
        assert what in text, text


def test_select_drains_events(kernel: Kernel) -> None:
    board = Board()
    event = rc.call(board.tsg, "T", 7, "IIiI", 1, 2, 0, 0)[2]
    channel = board.channel()
    kernel.ports[channel.token].post_event(2)
    assert select.select([event], [], [], 0)[0] == [event]
    assert select.select([event], [], [], 0)[0] == []


def test_the_seam_comes_out_again() -> None:
    before = (os.open, os.close, fcntl.ioctl, builtins.open, mmap.mmap, select.poll, os.stat)
    with simulated():
        assert os.open is not before[0]
    after = (os.open, os.close, fcntl.ioctl, builtins.open, mmap.mmap, select.poll, os.stat)
    assert after == before and not os.path.exists(rc.CTRL)
    assert type(ctypes.CDLL(None).mmap).__name__ == "_FuncPtr"


def test_barriers_reach_the_backend(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    from nvgpusim.orin.simulation import Simulation

    assert Simulation.current is not None
    seen: list[int] = []
    monkeypatch.setattr(Simulation.current.seam.backend, "on_barrier", lambda: seen.append(1))
    try:
        library = ctypes.CDLL("libatomic.so.1")
    except OSError:
        pytest.skip("libatomic is not installed")
    library.atomic_thread_fence(5)
    assert seen == [1]


TINYGRAD = """
import mmap, os, sys
sys.path.insert(0, {here!r})
import rawclient as rc
from tinygrad.runtime.support.hcq import FileIOInterface, MMIOInterface

ctrl, nvmap = (FileIOInterface(n, os.O_RDWR | os.O_CLOEXEC) for n in (rc.CTRL, rc.NVMAP))
page = ctrl.mmap(0, 0x10000, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, 0)
raw = bytearray(8)
assert ctrl.ioctl(rc.iowr("G", 18, 8), raw) == 0 and raw[0] == 16
handle = rc.create(nvmap.fd, 8192)
rc.alloc(nvmap.fd, handle)
buffer = FileIOInterface(fd=rc.get_fd(nvmap.fd, handle))
space = rc.alloc_as(ctrl.fd)
va = rc.map_buffer(space, buffer.fd)
at = buffer.mmap(va, 8192, 3, mmap.MAP_SHARED | 0x10, 0)
MMIOInterface(at, 8192)[0:4] = b"tiny"
assert at == va and bytes(rc.view(va, 4)) == b"tiny" and FileIOInterface.exists(rc.CTRL)
try:
    ctrl.mmap(0, 0x10000, 3, mmap.MAP_SHARED, 0)
except OSError as error:
    print(error)
FileIOInterface.munmap(at, 8192)
FileIOInterface.munmap(page, 0x10000)
rc.unmap_buffer(space, va)
rc.free(nvmap.fd, handle)
os.close(space)
del buffer, nvmap, ctrl
"""


def test_tinygrads_wrappers(tmp_path: pathlib.Path) -> None:
    """tinygrad's own file and mmap classes, unedited, on the model."""
    pytest.importorskip("tinygrad")
    path = tmp_path / "client.py"
    path.write_text(TINYGRAD.format(here=str(pathlib.Path(__file__).parents[1])))
    run = sim("--strict", "--", str(path), env={"XDG_CACHE_HOME": str(tmp_path)})
    assert run.returncode == 0, run.stderr
    assert "Device or resource busy" in run.stdout and "leaks  none" in run.stderr
