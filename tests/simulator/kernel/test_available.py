"""Memory of a board ends: by ENOMEM in r38 and r39, by the OOM killer in r35 and r36."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
from tests.simulator.kernel import rawclient as rc
from tests.simulator.kernel.conftest import fork_status, simulated
from tests.simulator.kernel.rawclient import Board
from tests.simulator.kernel.rules.cases import R35Board

from nvgpusim.orin.kernel.board_memory import CMA


def available() -> int:
    """MemAvailable as the process reads it, in bytes."""
    text = Path("/proc/meminfo").read_text()
    return int(text.partition("MemAvailable:")[2].split()[0]) << 10


@pytest.mark.parametrize(("profile", "killed"), [("r35", True), ("r36", True), ("r39", False)])
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


def lines() -> dict[str, int]:
    """The sizes of /proc/meminfo, in bytes."""
    rows = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows}


def test_free_available_and_cma_are_three_numbers() -> None:
    with simulated(board="nano8"):
        found = lines()
        assert found["MemFree"] < found["MemAvailable"] // 4
        assert found["CmaFree"] == CMA
        rc.alloc((board := Board()).nvmap, rc.create(board.nvmap, 6 << 30))
        assert lines()["Cached"] == lines()["MemAvailable"] - CMA  # files gave way


@pytest.mark.parametrize("profile", ["r35", "r36"])
def test_since_october_2025_a_full_page_cache_refuses(profile: str, tmp_path: Path) -> None:
    """4 GiB are refused and 3 granted on 8 GB, as boards with r36.4.7 do."""
    with simulated(board="nano8", profile=profile, memory_end="refuse"):
        board = R35Board() if profile == "r35" else Board()
        handle = rc.create(board.nvmap, 4 << 30)
        with pytest.raises(OSError) as raised:
            rc.alloc(board.nvmap, handle)
        assert raised.value.errno == errno.ENOMEM
        rc.alloc(board.nvmap, rc.create(board.nvmap, 3 << 30))
        for _ in range(12):  # as much again in pieces
            rc.alloc(board.nvmap, rc.create(board.nvmap, 256 << 20))
        with pytest.raises(OSError):
            rc.alloc(board.nvmap, rc.create(board.nvmap, 3 << 30))
    with (
        simulated(board="nano8", profile=profile, memory_end="refuse"),
        (tmp_path / "model").open("w+b") as model,
    ):
        board = R35Board() if profile == "r35" else Board()
        handle = rc.create(board.nvmap, 5 << 30)
        with pytest.raises(OSError):
            rc.alloc(board.nvmap, handle)
        model.truncate(2 << 30)
        for _ in range(3):  # a file is given up once
            os.posix_fadvise(model.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with pytest.raises(OSError):
            rc.alloc(board.nvmap, handle)
        model.truncate(5 << 30)
        os.posix_fadvise(model.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        rc.alloc(board.nvmap, handle)


def test_cma_pages_are_not_nvmaps() -> None:
    with simulated(board="nano4", profile="r39"):
        board = Board()
        left = available() - CMA
        with pytest.raises(OSError):
            rc.alloc(board.nvmap, rc.create(board.nvmap, left))
        rc.alloc(board.nvmap, rc.create(board.nvmap, left - left // 900))
