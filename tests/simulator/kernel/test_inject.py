"""Faults on demand, by count and by seed."""

from __future__ import annotations

import os
import time

import pytest
from tests.simulator.kernel import rawclient as rc
from tests.simulator.kernel.conftest import simulated
from tests.simulator.kernel.rawclient import Board
from tests.simulator.kernel.test_failures import until

from nvgpusim.errors import SimError
from nvgpusim.orin.inject import Injection


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected WHAT"),
        ("ENOMEM@", "expected WHAT"),
        ("EWRONG", "unknown fault 'EWRONG'"),
        ("ENOMEM@*:p=2", "p is 0..1"),
        ("ENOMEM@*:n=0", "at least 1"),
        ("ENOMEM@*:n=1.2.3", "not a number"),
        ("lost-doorbell@MMAP", "takes no @WHERE"),
        ("ENOMEM@GETFD", "no call is named GETFD"),
    ],
)
def test_bad_specifications(text: str, says: str) -> None:
    with pytest.raises(SimError, match=says.replace(".", r"\.")):
        Injection.parse(text)


def test_every_and_short_names() -> None:
    with simulated(inject=("EINTR@GET_TPC_MASKS:every=2", "EFAULT@GET_FD")):
        board_failed = []
        ctrl = os.open(rc.CTRL, os.O_RDWR)
        for _ in range(4):
            try:
                rc.call(ctrl, "G", 10, "IIQ", 0, 0, 0)
                board_failed.append(0)
            except InterruptedError:
                board_failed.append(1)
        assert board_failed == [0, 1, 0, 1]
        with pytest.raises(OSError, match="Bad address"):
            Board().dmabuf()


def _failures(seed: int) -> list[int]:
    with simulated(inject=("EBUSY@NUM_VSMS:p=0.3",), seed=seed):
        ctrl, failed = os.open(rc.CTRL, os.O_RDWR), []
        for i in range(100):
            try:
                rc.call(ctrl, "G", 18, "II", 0, 0)
            except OSError:
                failed.append(i)
        return failed


def test_probability_follows_the_seed() -> None:
    one = _failures(1)
    assert 10 < len(one) < 60 and one == _failures(1) != _failures(2)


def test_open_and_mmap_can_fail() -> None:
    with simulated(inject=("ENODEV@OPEN_CTRL", "EBUSY@MMAP:n=2")):
        with pytest.raises(OSError, match="No such device"):
            os.open(rc.CTRL, os.O_RDWR)
        board = Board()
        with pytest.raises(OSError, match="busy"):
            rc.do_mmap(board.dmabuf(), 4096)


@pytest.mark.parametrize(("spec", "code"), [("channel-error=13", 13), ("timeout", 8)])
def test_channel_errors_kill_the_tsg(spec: str, code: int) -> None:
    with simulated(inject=(f"{spec}:n=2",)) as kernel:
        channel = Board().channel()
        channel.submit(0x1000000, 1)
        assert until(lambda: kernel.usermode.rings == 1)
        assert channel.error() is None
        channel.submit(0x1000000, 1)
        assert until(lambda: channel.error() == code)
        assert rc.timedout(channel.fd) == 1


def test_an_unknown_token_is_ignored_and_noted() -> None:
    with simulated() as kernel:
        board = Board()
        channel = board.channel()
        channel.token = 77
        channel.submit(0x1000000, 1, bell=False)
        channel.userd.mem.cast("I")[0x8C // 4] = 0
        channel.ring_bell()
        assert until(lambda: kernel.journal.notes)
        assert "no channel's token" in kernel.journal.notes[0]
        assert kernel.executor.rings == []  # type: ignore[union-attr]


def test_two_rings_in_a_row_are_both_heard() -> None:
    with simulated() as kernel:
        board = Board()
        one, two = board.channel(), board.channel()
        both = {one.token, two.token}
        heard: list[int] = kernel.executor.rings  # type: ignore[union-attr]
        for _ in range(50):
            before = len(heard)
            for channel in (one, two):
                channel.submit(0x1000000, 1)
            assert until(lambda before=before: both <= set(heard[before:]))  # type: ignore[misc]
            for channel in (one, two):
                channel.userd.mem.cast("I")[0x88 // 4] = channel.put % channel.entries


def test_ptimer_runs_in_the_usermode_page() -> None:
    with simulated():
        board = Board()
        cells = rc.view(board.usermode, 0x10000).cast("I")
        first = cells[0x80 // 4] | cells[0x84 // 4] << 32
        assert until(lambda: cells[0x80 // 4] | cells[0x84 // 4] << 32 > first)
        shown = cells[0x80 // 4] | cells[0x84 // 4] << 32
        assert shown <= rc.call(board.ctrl, "G", 25, "QQ", 0, 0)[0] < shown + 10**10
        assert time.monotonic_ns() >= shown
