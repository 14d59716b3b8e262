"""The register of rule cases, and what they share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from tests.simulator.kernel import rawclient as rc
from tests.simulator.kernel.rawclient import Board, Channel, call

from nvgpusim.orin.gpu_api import FaultReport
from nvgpusim.orin.kernel import Kernel
from nvgpusim.orin.kernel.channel import ChannelFile
from nvgpusim.orin.rules import RULES

Case = Callable[[Kernel, Board], object]
CASES: dict[str, tuple[Case, dict[str, Any]]] = {}


def case(rule: str, **options: Any) -> Callable[[Case], Case]:
    """Register what breaks (or shows) `rule`."""

    def add(function: Case) -> Case:
        assert rule not in CASES, rule
        CASES[rule] = (function, options)
        return function

    return add


class R35Board(Board):
    """A board as r35's header describes it: 8-byte OPEN_TSG, no subcontext ioctl."""

    def __post_init__(self) -> None:
        self.ctrl = os.open(rc.CTRL, os.O_RDWR)
        self.nvmap = os.open(rc.NVMAP, os.O_RDWR)
        self.as_fd = rc.alloc_as(self.ctrl)
        self.tsg = call(self.ctrl, "G", 9, "II", 0, 0)[0]
        self.veid = 1
        self.usermode = rc.do_mmap(self.ctrl, 0x10000)


def fails(number: int, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """`function` fails with `number`."""
    with pytest.raises(OSError) as raised:
        function(*args, **kwargs)
    assert raised.value.errno == number


def refused(rule: str, kernel: Kernel, function: Callable[..., object], *args: Any) -> None:
    """`function` fails by `rule`, not by another one with the same errno."""
    fails(RULES[rule].errno, function, *args)
    assert kernel.journal.refusals[-1]["rule"] == rule


def bound(board: Board) -> int:
    """A channel in the AS and the TSG, watchdog off."""
    fd = rc.open_channel(board.ctrl)
    rc.as_bind(board.as_fd, fd)
    rc.tsg_bind(board.tsg, fd, board.veid)
    rc.wdt(fd)
    return fd


def allocated(board: Board, size: int = 4096, **more: int) -> int:
    """A handle with pages."""
    handle = rc.create(board.nvmap, size)
    rc.alloc(board.nvmap, handle, **more)
    return handle


def file_of(kernel: Kernel, fd: int) -> ChannelFile:
    """The model's channel behind a descriptor."""
    found = kernel.find_device_or_dmabuf(fd)
    assert isinstance(found, ChannelFile)
    return found


def kill(kernel: Kernel, channel: Channel, report: FaultReport) -> None:
    """Act as the execution side on a fatal error."""
    kernel.ports[channel.token].fail(report)


BAD = 0x10
"""An address that nobody maps."""
