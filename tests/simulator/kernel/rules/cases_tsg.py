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


@case("subctx.type")
def _(kernel: Kernel, board: Board) -> None:
    rc.create_subcontext(board.tsg, board.as_fd, 2)


@case("subctx.as")
def _(kernel: Kernel, board: Board) -> None:
    rc.create_subcontext(board.tsg, board.ctrl)


@case("subctx.none-left")
def _(kernel: Kernel, board: Board) -> None:
    assert rc.create_subcontext(board.tsg, board.as_fd, 0) == 0
    rc.create_subcontext(board.tsg, board.as_fd, 0)


@case("subctx.fallback")
def _(kernel: Kernel, board: Board) -> None:
    got = [rc.create_subcontext(board.tsg, board.as_fd) for _ in range(63)]
    assert got == [*range(2, 64), 0]
    fails(28, rc.create_subcontext, board.tsg, board.as_fd)


@case("subctx.delete")
def _(kernel: Kernel, board: Board) -> None:
    veid = rc.create_subcontext(board.tsg, board.as_fd)
    call(board.tsg, "T", 19, "II", veid, 0, direction="w")
    bound(board)
    fails(22, call, board.tsg, "T", 19, "II", 64, 0, direction="w")
    call(board.tsg, "T", 19, "II", board.veid, 0, direction="w")


@case("subctx.delete-free")
def _(kernel: Kernel, board: Board) -> None:
    call(board.tsg, "T", 19, "II", 7, 0, direction="w")
    fails(22, call, board.tsg, "T", 19, "II", 64, 0, direction="w")


@case("bind.fd")
def _(kernel: Kernel, board: Board) -> None:
    fails(22, call, board.tsg, "T", 1, "i", board.ctrl, direction="w")
    rc.tsg_bind(board.tsg, board.as_fd, 1)


@case("bind.veid")
def _(kernel: Kernel, board: Board) -> None:
    channel = rc.open_channel(board.ctrl)
    rc.as_bind(board.as_fd, channel)
    rc.tsg_bind(board.tsg, channel, 64)


@case("bind.locked")
def _(kernel: Kernel, board: Board) -> None:
    kernel.scheduler_locked = True
    fails(1, call, board.tsg, "T", 9, "II", 1000, 0, direction="w")
    fails(1, call, board.tsg, "T", 8, "II", 0, 0, direction="w")
    rc.tsg_bind(board.tsg, rc.open_channel(board.ctrl), 1)


@case("bind.vm")
def _(kernel: Kernel, board: Board) -> None:
    channel = rc.open_channel(board.ctrl)
    fails(22, rc.tsg_bind, board.tsg, channel, board.veid)
    rc.as_bind(rc.alloc_as(board.ctrl), channel)
    fails(22, rc.tsg_bind, board.tsg, channel, 5)
    rc.tsg_bind(board.tsg, channel, board.veid)


@case("bind.no-sync")
def _(kernel: Kernel, board: Board) -> None:
    rc.tsg_bind(board.tsg, rc.open_channel(board.ctrl), 0)
    late = rc.open_channel(board.ctrl)
    rc.as_bind(board.as_fd, late)
    rc.tsg_bind(board.tsg, late, 0)


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


@case("bind.twice")
def _(kernel: Kernel, board: Board) -> None:
    rc.tsg_bind(board.tsg, bound(board), board.veid)


@case("bind.runlist")
def _(kernel: Kernel, board: Board) -> None:
    bound(board)
    copy = rc.open_channel(board.ctrl, 1)
    rc.as_bind(board.as_fd, copy)
    rc.tsg_bind(board.tsg, copy, board.veid)


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


@case("unbind.not-member")
def _(kernel: Kernel, board: Board) -> None:
    call(board.tsg, "T", 2, "i", rc.open_channel(board.ctrl), direction="w")


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


@case("timeslice.range")
def _(kernel: Kernel, board: Board) -> None:
    assert call(board.tsg, "T", 10, "II", 0, 0, direction="r")[0] == 1024
    for good in (1000, 50000):
        call(board.tsg, "T", 9, "II", good, 0, direction="w")
    assert call(board.tsg, "T", 10, "II", 0, 0, direction="r")[0] == 50000
    fails(22, call, board.tsg, "T", 9, "II", 999, 0, direction="w")
    call(board.tsg, "T", 9, "II", 50001, 0, direction="w")


@case("interleave.level")
def _(kernel: Kernel, board: Board) -> None:
    for level in range(3):
        call(board.tsg, "T", 8, "II", level, 0, direction="w")
    call(board.tsg, "T", 8, "II", 3, 0, direction="w")


def _event(board: Board, event: int, cmd: int = 1) -> int:
    return call(board.tsg, "T", 7, "IIiI", cmd, event, 0, 0)[2]


@case("event.cmd")
def _(kernel: Kernel, board: Board) -> None:
    _event(board, 2, 0)


@case("event.again", profile="r35")
def _(kernel: Kernel, board: Board) -> None:
    _event(board, 1)
    _event(board, 2)
    _event(board, 1)


@case("event.id")
def _(kernel: Kernel, board: Board) -> None:
    _event(board, 6)


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


@case("sm.id")
def _(kernel: Kernel, board: Board) -> None:
    call(board.tsg, "T", 12, "IIQQ", 16, 0, 0, 0)
