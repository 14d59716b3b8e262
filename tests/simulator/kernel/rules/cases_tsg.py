"""Rule cases: Time slice groups."""

from __future__ import annotations

import fcntl
import os
import select

from tests.simulator.kernel import rawclient as rc
from tests.simulator.kernel.rawclient import Board, call
from tests.simulator.kernel.rules.cases import bound, case, fails, file_of

from nvgpusim.orin.gpu_api import EVENT_BLOCKING_SYNC
from nvgpusim.orin.kernel import Kernel


@case("subctx.fallback")
def _(kernel: Kernel, board: Board) -> None:
    got = [rc.create_subcontext(board.tsg, board.as_fd) for _ in range(63)]
    assert got == [*range(2, 64), 0]
    fails(28, rc.create_subcontext, board.tsg, board.as_fd)


@case("subctx.delete-free")
def _(kernel: Kernel, board: Board) -> None:
    call(board.tsg, "T", 19, "II", 7, 0, direction="w")
    fails(22, call, board.tsg, "T", 19, "II", 64, 0, direction="w")


@case("bind.locked")
def _(kernel: Kernel, board: Board) -> None:
    kernel.scheduler_locked = True
    fails(1, call, board.tsg, "T", 9, "II", 1000, 0, direction="w")
    fails(1, call, board.tsg, "T", 8, "II", 0, 0, direction="w")
    rc.tsg_bind(board.tsg, rc.open_channel(board.ctrl), 1)


@case("bind.subctx-vm")
def _(kernel: Kernel, board: Board) -> None:
    rc.tsg_bind(board.tsg, rc.open_channel(board.ctrl), 2)
    assert rc.create_subcontext(board.tsg, board.as_fd) == 2
    late = rc.open_channel(board.ctrl)
    rc.as_bind(board.as_fd, late)
    rc.tsg_bind(board.tsg, late, 2)


@case("bind.full")
def _(kernel: Kernel, board: Board) -> None:
    for _ in range(128):
        bound(board)
    bound(board)


@case("bind.sync")
def _(kernel: Kernel, board: Board) -> None:
    channel = rc.open_channel(board.ctrl)
    rc.as_bind(board.as_fd, channel)
    call(board.tsg, "T", 1, "i", channel, direction="w")
    assert file_of(kernel, channel).veid == 0
    os.close(channel)
    again = rc.open_channel(board.ctrl)  # the last channel of VEID 0 gave it back
    rc.as_bind(rc.alloc_as(board.ctrl), again)
    rc.tsg_bind(board.tsg, again, 0)


@case("unbind.busy")
def _(kernel: Kernel, board: Board) -> None:
    channel = board.channel()
    channel.submit(0x1000000, 1, bell=False)
    call(board.tsg, "T", 2, "i", channel.fd, direction="w")


@case("unbind.unserviceable")
def _(kernel: Kernel, board: Board) -> None:
    assert rc.timedout(rc.open_channel(board.ctrl)) == 1
    channel = board.channel()
    assert rc.timedout(channel.fd) == 0
    call(board.tsg, "T", 2, "i", channel.fd, direction="w")
    assert rc.timedout(channel.fd) == 1
    rc.tsg_bind(board.tsg, channel.fd, board.veid)
    assert rc.timedout(channel.fd) == 0


def _event(board: Board, event: int, cmd: int = 1) -> int:
    return call(board.tsg, "T", 7, "IIiI", cmd, event, 0, 0)[2]


@case("event.poll")
def _(kernel: Kernel, board: Board) -> None:
    event, other = _event(board, EVENT_BLOCKING_SYNC), _event(board, 0)
    channel = board.channel()
    poller = select.poll()
    poller.register(event, select.POLLIN | select.POLLPRI)
    poller.register(other, select.POLLIN | select.POLLPRI)
    assert poller.poll(0) == []
    for _ in range(2):
        kernel.ports[channel.token].post_event(EVENT_BLOCKING_SYNC)
        kernel.ports[channel.token].post_event(EVENT_BLOCKING_SYNC)
        assert poller.poll(0) == [(event, select.POLLIN | select.POLLPRI)]
        assert poller.poll(0) == []
    fails(25, fcntl.ioctl, event, rc.io("E", 1))
    os.close(event)
    os.close(other)


case("sm.id")(lambda _, board: call(board.tsg, "T", 12, "IIQQ", 16, 0, 0, 0))
