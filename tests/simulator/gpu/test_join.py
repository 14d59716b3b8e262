"""Both sides together: a raw client's ioctls, a doorbell in a real page, a kernel, its result."""

from __future__ import annotations

import ctypes
import ctypes.util
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.simulator.gpu.rig import (
    FRESH,
    PER_TPC,
    SIGNAL,
    Rig,
    inc,
    launch,
    semaphore,
    setup_words,
    u32,
    u64,
)
from tests.simulator.kernel.conftest import simulated
from tests.simulator.kernel.rawclient import Board, Channel

from nvgpusim.orin.kernel import usermode

COMPUTE, COPY = 0xC7C0, 0xC7B5


class Client(Rig):
    """The rig's QMDs in memory that nvmap gave, on a channel that nvgpu set up."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.queue: Channel = board.channel(classes=(COMPUTE, COPY))
        self.signal = self.alloc(4096)
        self.local = self.alloc(8 * PER_TPC)
        self.run(setup_words(self.local))

    def alloc(self, size: int, va: int = 0, read_only: bool = False) -> int:
        return self.board.buffer(size).va

    def at(self, va: int, count: int, dtype: Any = np.uint32) -> Any:
        size = np.dtype(dtype).itemsize * count
        return np.frombuffer((ctypes.c_uint8 * size).from_address(va), dtype)

    def run(self, words: list[int]) -> None:
        """Write a pushbuffer and ring the bell."""
        va = self.alloc(4 * len(words))
        self.at(va, len(words))[:] = words
        self.queue.submit(va, len(words))

    def wait(self, value: int) -> bool:
        """Poll the signal page."""
        end = time.monotonic() + 120
        while time.monotonic() < end and self.queue.error() is None:
            if self.at(self.signal, 1)[0] >= value:
                return True
            time.sleep(5e-4)
        return False


@pytest.fixture
def client() -> Iterator[Client]:
    with simulated(execute=True):
        board = Board()
        yield Client(board)
        board.close()


def test_kernel_copy_and_signal(client: Client) -> None:
    n = 3000
    a, b, out, copy = (client.alloc(4 * n) for _ in range(4))
    client.at(a, n, np.float32)[:] = np.arange(n)
    client.at(b, n, np.float32)[:] = 0.5
    qmd = client.qmd("k_add", u64(out, a, b) + u32(n), (12, 1, 1), (256, 1, 1))
    words = [*FRESH, *launch(qmd), *inc(0, 0x78, 0)]
    words += [*inc(4, 0x400, *divmod(out, 1 << 32), *divmod(copy, 1 << 32)), *inc(4, 0x418, 4 * n)]
    client.run([*words, *inc(4, 0x300, 0x182), *semaphore(client.signal, 1, SIGNAL)])
    assert client.wait(1)
    assert (
        client.at(copy, n, np.float32) == np.arange(n, dtype=np.float32) + np.float32(0.5)
    ).all()
    assert client.queue.error() is None
    assert client.queue.gpget() == 2


def test_fault_reaches_the_notifier(client: Client) -> None:
    qmd = client.qmd("k_vector", u64(client.signal, client.signal + 4))
    client.run([*launch(qmd), *semaphore(client.signal, 1, SIGNAL)])
    assert not client.wait(1)
    assert client.queue.error() == 13
    assert client.at(client.signal, 1)[0] == 0


def test_mmu_fault_reaches_the_notifier(client: Client) -> None:
    qmd = client.qmd("k_bump", u64(0x7700000000))
    client.run([*launch(qmd), *semaphore(client.signal, 1, SIGNAL)])
    assert not client.wait(1)
    assert client.queue.error() == 31


@pytest.mark.parametrize("seed", range(2))
def test_late_and_placed_anywhere(seed: int) -> None:
    with simulated(execute=True, delay=3.0, place="random", poison=True, seed=seed):
        board = Board()
        client = Client(board)
        out = client.alloc(256)
        for n in range(1, 6):
            qmd = client.qmd("k_bump", u64(out))
            client.run([*FRESH, *launch(qmd), *semaphore(client.signal, n, SIGNAL)])
        assert client.wait(5)
        assert (client.at(out, 32) == 31).all()
        board.close()


def test_a_doorbell_is_not_judged_by_stores_after_the_next_barrier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that orders its stores is never blamed, however late its bells are heard."""
    monkeypatch.setattr(usermode, "SHORTEST", 0.2)
    monkeypatch.setattr(usermode, "LONGEST", 0.2)
    name = ctypes.util.find_library("atomic")
    assert name, "libatomic comes with gcc"
    with simulated(execute=True, order=True) as kernel:
        board = Board()
        queue, signal = board.channel(), board.buffer(4096)
        fence = ctypes.CDLL(name).atomic_thread_fence
        for n in range(1, 4):
            words = semaphore(signal.va, n, SIGNAL)
            pushbuffer = board.buffer(4 * len(words))
            pushbuffer.mem[: 4 * len(words)] = np.array(words, np.uint32).tobytes()
            queue.ring.mem.cast("Q")[n - 1] = pushbuffer.va | len(words) << 42 | 1 << 41
            fence(5)
            queue.userd.mem.cast("I")[0x8C // 4] = n
            time.sleep(0.3)  # the watcher looks between GPPut and its barrier
            fence(5)
            queue.ring_bell()
        end = time.monotonic() + 60
        while signal.mem.cast("I")[0] < 3 and time.monotonic() < end:
            time.sleep(1e-3)
        assert signal.mem.cast("I")[0] == 3 and kernel.journal.notes == []
        board.close()
