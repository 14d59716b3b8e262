"""Memory of a board ends: by ENOMEM in r38, by the OOM killer in r35 and r36."""

from __future__ import annotations

import errno
import signal
from pathlib import Path

import pytest

from nvgpusim.kernel.available import SYSTEM

from . import rawclient as rc
from .cases import R35Board
from .conftest import fork_status, simulated
from .rawclient import Board

NANO4 = 4 << 30


def available() -> int:
    """MemAvailable as the process reads it, in bytes."""
    text = Path("/proc/meminfo").read_text()
    return int(text.partition("MemAvailable:")[2].split()[0]) << 10


def test_meminfo_is_the_boards() -> None:
    with simulated(board="nano4"):
        board = Board()
        before = available()
        assert before <= NANO4 - SYSTEM
        rc.alloc(board.nvmap, rc.create(board.nvmap, 1 << 30))
        assert before - available() == 1 << 30


@pytest.mark.parametrize(("profile", "killed"), [("r35", True), ("r36", True), ("r38", False)])
def test_more_than_there_is(profile: str, killed: bool) -> None:
    with simulated(board="nano4", profile=profile):
        board = R35Board() if profile == "r35" else Board()
        rc.alloc(board.nvmap, rc.create(board.nvmap, 2 << 30))
        handle = rc.create(board.nvmap, (2 << 30) - (256 << 20))

        def ask() -> None:
            with pytest.raises(OSError) as raised:
                rc.alloc(board.nvmap, handle)
            assert raised.value.errno == errno.ENOMEM

        if killed:
            assert fork_status(lambda: rc.alloc(board.nvmap, handle)) == signal.SIGKILL
        else:
            ask()


def test_more_than_the_board_has_is_refused_by_all() -> None:
    for profile in ("r36", "r38"):
        with simulated(board="nano4", profile=profile):
            board = Board()
            with pytest.raises(OSError) as raised:
                rc.alloc(board.nvmap, rc.create(board.nvmap, NANO4 + 4096))
            assert raised.value.errno == errno.ENOMEM
