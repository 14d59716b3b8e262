"""Answers of strangers' Orins, call by call, asked of the model (docs/reference/evidence.md)."""

from __future__ import annotations

import fcntl
import mmap
import os
import time

from tests.simulator.kernel import rawclient as rc
from tests.simulator.kernel.conftest import simulated
from tests.simulator.kernel.rawclient import Buffer, call, do_mmap, view

MAGIC = 0xDEADBEEF42
CACHEABLE_BY_CUDA = 0x8000003
"""CUDA's own flags of NVMAP_ALLOC at L4T r36.4.7: cacheable, tag 0x800."""


def wait_for(mem: memoryview, value: int) -> None:
    """Until the GPU has written `value` at the beginning of `mem`; raises AssertionError."""
    words, end = mem.cast("I"), time.monotonic() + 30
    while words[0] != value:
        assert time.monotonic() < end, f"{words[0]:#x}"
        time.sleep(0.001)


def buffer(nvmap: int, as_fd: int | None, size: int, flags: int) -> Buffer:
    """A dmabuf as both strangers make it: handle kept, CPU address of its own."""
    handle = rc.create(nvmap, size)
    rc.alloc(nvmap, handle, flags=flags)
    fd = rc.get_fd(nvmap, handle)
    va = rc.map_buffer(as_fd, fd) if as_fd is not None else 0
    return Buffer(size, va, do_mmap(fd, size, 0, mmap.MAP_SHARED), fd)


def test_submission_on_an_agx_orin() -> None:
    """test_gpu_submit.log of GiveThanksAlways/agx-orin-dev-kit, L4T r36.4.4, 2026-02-10."""
    with simulated(execute=True):
        nvmap, ctrl = os.open(rc.NVMAP, os.O_RDWR), os.open(rc.CTRL, os.O_RDWR)
        as_fd = rc.alloc_as(ctrl, 0x200000, 0xFFFFE00000)
        tsg = rc.open_tsg(ctrl)
        assert rc.create_subcontext(tsg, as_fd) == 1
        ring = buffer(nvmap, None, 8192, 0x09000001)
        userd = buffer(nvmap, None, 4096, 0x09000001)
        channel = rc.open_channel(ctrl)
        rc.as_bind(as_fd, channel)
        rc.tsg_bind(tsg, channel, 1)
        rc.wdt(channel)
        token = rc.setup_bind(channel, ring.fd, userd.fd, 1024)
        rc.alloc_obj(channel, 0xC7C0)
        doorbell = do_mmap(ctrl, 0x10000)
        signal = buffer(nvmap, as_fd, 4096, 0x09000002)
        push = buffer(nvmap, as_fd, 4096, 0x09000002)
        assert (token, signal.va, push.va) == (511, 0xFFFFA00000, 0xFFFFA01000)
        words = (0x20050017, 0xFFA00000, 0xFF, 0xADBEEF42, 0xDE, 0x03100001)
        for at, word in enumerate(words):
            push.mem.cast("I")[at] = word
        ring.mem.cast("Q")[0] = 0x00001AFFFFA01000
        userd.mem.cast("I")[0x8C // 4] = 1
        view(doorbell, 0x10000).cast("I")[0x90 // 4] = token
        wait_for(signal.mem, MAGIC & 0xFFFFFFFF)
        assert signal.mem.cast("Q")[0] == MAGIC and signal.mem.cast("Q")[1] > 0


def test_submission_on_an_orin_nano() -> None:
    """gpu-channel-helper.c of SLM-OS, whose values are a snoop of CUDA's at L4T r36.4.7."""
    with simulated(execute=True, board="nano8"):
        nvmap, ctrl = os.open(rc.NVMAP, os.O_RDWR), os.open(rc.CTRL, os.O_RDWR)
        out = call(ctrl, "G", 8, "IiII3Q6I", 0, 0, 0, 0, 0x4000000, 0x2000000000, 0, *[0] * 6)
        as_fd, tsg, channel = out[1], rc.open_tsg(ctrl), rc.open_channel(ctrl)
        rc.as_bind(as_fd, channel)
        veid = rc.create_subcontext(tsg, as_fd)
        rc.tsg_bind(tsg, channel, veid)
        call(channel, "H", 5, "I", nvmap, direction="w")
        rc.wdt(channel, 1 | 4, 0xFFFFFFFF)
        ring, userd, notifier = (buffer(nvmap, None, 4096, CACHEABLE_BY_CUDA) for _ in range(3))
        token = rc.setup_bind(channel, ring.fd, userd.fd, 512)
        rc.alloc_obj(channel, 0xC7C0)
        call(channel, "H", 122, "II", 0, 4, direction="w")
        call(channel, "H", 111, "QQII", 0, 4096, notifier.fd, 0)
        push = buffer(nvmap, as_fd, 65536, CACHEABLE_BY_CUDA)
        signal = buffer(nvmap, as_fd, 4096, CACHEABLE_BY_CUDA)
        fcntl.ioctl(tsg, rc.io("T", 3))
        low, high = signal.va & 0xFFFFFFFF, signal.va >> 32
        words = (
            0x20010017,
            low,
            0x20010018,
            high,
            0x20010019,
            0xCAFE,
            0x2001001A,
            0,
            0x2001001B,
            1,
        )
        for at, word in enumerate(words):
            push.mem.cast("I")[at] = word
        ring.mem.cast("I")[0] = push.va & 0xFFFFFFFC
        ring.mem.cast("I")[1] = push.va >> 32 | len(words) << 10
        userd.mem.cast("I")[35] = 1
        doorbell = do_mmap(ctrl, 4096)
        view(doorbell, 4096).cast("I")[0x90 // 4] = token
        wait_for(signal.mem, 0xCAFE)
        end = time.monotonic() + 30
        while userd.mem.cast("I")[34] != 1:
            assert time.monotonic() < end
            time.sleep(0.001)


def test_two_channels_on_an_agx_orin() -> None:
    """test_two_channels.log of agx-orin-dev-kit: compute and DMA in one TSG, on one VEID."""
    with simulated():
        nvmap, ctrl = os.open(rc.NVMAP, os.O_RDWR), os.open(rc.CTRL, os.O_RDWR)
        as_fd = rc.alloc_as(ctrl, 0x200000, 0xFFFFE00000)
        tsg = rc.open_tsg(ctrl)
        veid = rc.create_subcontext(tsg, as_fd)
        tokens, counters = [], []
        for number in (0xC7C0, 0xC7B5):
            ring, userd = buffer(nvmap, None, 8192, 0), buffer(nvmap, None, 4096, 0)
            channel = rc.open_channel(ctrl)
            rc.as_bind(as_fd, channel)
            rc.tsg_bind(tsg, channel, veid)
            rc.wdt(channel)
            tokens.append(rc.setup_bind(channel, ring.fd, userd.fd, 1024))
            rc.alloc_obj(channel, number)
            counters += [userd.mem.cast("I")[at] for at in (34, 35)]  # GPGet, GPPut
        do_mmap(ctrl, 0x10000)
        assert (veid, tokens, counters) == (1, [511, 510], [0, 0, 0, 0])
