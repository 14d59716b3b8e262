"""Events are posted by the GPU's thread, whatever the client does with their descriptors."""

from __future__ import annotations

import os
import socket

from tests.simulator.kernel.rawclient import Board, call

from nvgpusim.orin.kernel import Kernel
from nvgpusim.orin.kernel.tsg import EventFile

BLOCKING_SYNC = 2


def test_an_event_closed_while_it_is_posted(kernel: Kernel) -> None:
    board = Board()
    fd = call(board.tsg, "T", 7, "IIiI", 1, BLOCKING_SYNC, 0, 0)[2]
    event = kernel.find_device_or_dmabuf(fd)
    assert isinstance(event, EventFile)
    peer, event.peer = event.peer, socket.socket()
    event.peer.close()  # what a sweep does between the thread's look and its post
    event.tsg.post_event(BLOCKING_SYNC)
    assert event.posted
    event.peer = peer
    os.close(fd)
    kernel.release_closed_files()
    assert event.tsg.events == []
