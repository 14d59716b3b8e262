# ruff: noqa: E501 - tables of cases stay one case a line
"""Rings, pushbuffers, semaphores, copies: what is executed, and what is refused how."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.simulator.gpu.rig import SIGNAL, WAIT, WRITE32, WRITE64, Rig, inc, semaphore, setup_words


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(channels=2)
    yield made
    made.close()


def test_release_writes_payload_and_timestamp(rig: Rig) -> None:
    before = time.monotonic_ns()
    rig.submit([*semaphore(rig.signal, 1 << 40 | 7, SIGNAL), *inc(0, 0x20, 0)])
    rig.done()
    value, stamp = rig.at(rig.signal, 2, np.uint64)
    assert value == 1 << 40 | 7
    assert before <= int(stamp) <= time.monotonic_ns()
    assert rig.events == [2]
    assert struct.unpack_from("<I", rig.ports[0].userd, 0x88) == (1,)


@pytest.mark.parametrize(("execute", "size"), [(WRITE32, 4), (WRITE64, 8)])
def test_release_width(rig: Rig, execute: int, size: int) -> None:
    rig.at(rig.signal, 16, np.uint8)[:] = 0xEE
    rig.submit(semaphore(rig.signal + 8, 0x1122334455667788, execute))
    rig.done()
    got = rig.at(rig.signal, 16, np.uint8).tobytes()
    assert got == b"\xee" * 8 + bytes.fromhex("8877665544332211")[:size] + b"\xee" * (8 - size)


@pytest.mark.parametrize(
    ("operation", "memory", "payload", "passes"),
    [
        (0, 5, 5, True), (0, 6, 5, False), (2, 6, 5, True), (2, 4, 5, False),
        (3, 5, 5, True), (3, 4, 5, False), (3, 2, (1 << 64) - 3, True), (3, 1 << 63, 0, False),
        (4, 6, 2, True), (4, 4, 2, False), (5, 0, 0, True), (5, (1 << 64) - 1, 0, False),
        (5, 3, (1 << 64) - 4, False),
    ],
)  # fmt: skip
def test_acquire(rig: Rig, operation: int, memory: int, payload: int, passes: bool) -> None:
    rig.at(rig.signal, 1, np.uint64)[0] = memory
    words = semaphore(rig.signal, payload, 1 << 24 | operation)
    rig.submit([*words, *semaphore(rig.signal + 16, 1, SIGNAL)])
    rig.finish()
    assert (rig.at(rig.signal + 16, 1)[0] == 1) == passes


def test_acquire_lets_the_other_channel_run(rig: Rig) -> None:
    rig.submit([*semaphore(rig.signal, 1, WAIT), *semaphore(rig.signal + 32, 9, SIGNAL)], 0)
    rig.finish()
    assert rig.at(rig.signal + 32, 1)[0] == 0
    assert rig.gpu.is_idle(), "a channel that waits for nobody's store is idle"
    rig.submit(semaphore(rig.signal, 1, SIGNAL), 1)
    end = time.monotonic() + 120
    while rig.at(rig.signal + 32, 1)[0] == 0 and time.monotonic() < end:
        time.sleep(0.001)
    assert rig.at(rig.signal + 32, 1)[0] == 9
    rig.done()


def test_acquire_sees_the_cpu(rig: Rig) -> None:
    rig.submit([*semaphore(rig.signal, 3, WAIT), *semaphore(rig.signal + 16, 1, SIGNAL)])
    time.sleep(0.02)
    assert rig.at(rig.signal + 16, 1)[0] == 0
    rig.at(rig.signal, 1, np.uint64)[0] = 3
    end = time.monotonic() + 120
    while rig.at(rig.signal + 16, 1)[0] == 0 and time.monotonic() < end:
        time.sleep(0.001)
    assert rig.at(rig.signal + 16, 1)[0] == 1


def test_headers(rig: Rig) -> None:
    """NON_INC, ONE_INC, IMMD, NOP and END."""
    low, high = rig.signal & 0xFFFFFFFF, rig.signal >> 32
    words = [
        0, 3 << 29 | 2 << 16 | 0x5C >> 2, 0xBAD0, low, *inc(0, 0x60, high, 0, 0),
        4 << 29 | 42 << 16 | 0x64 >> 2, 5 << 29 | 1 << 16 | 0x6C >> 2, SIGNAL,
        7 << 29, 0xFFFFFFFF,
    ]  # fmt: skip
    rig.submit(words)
    rig.done()
    assert rig.at(rig.signal, 1)[0] == 42


def test_detached_channel_runs_nothing(rig: Rig) -> None:
    rig.gpu.detach_channel(0)
    rig.gpu.detach_channel(0)
    rig.submit(semaphore(rig.signal, 1, SIGNAL))
    rig.done()
    assert rig.at(rig.signal, 1)[0] == 0


def test_copy(rig: Rig) -> None:
    a, b = rig.alloc(8192), rig.alloc(8192)
    rig.at(a, 8192, np.uint8)[:] = np.arange(8192) % 251
    copy = [*inc(4, 0x400, *divmod(a + 3, 1 << 32), *divmod(b + 5, 1 << 32)), *inc(4, 0x418, 5001)]
    done = [*inc(4, 0x240, *divmod(rig.signal, 1 << 32), 77), *inc(4, 0x300, 0x14)]
    rig.submit([*setup_words(rig.local), *copy, *inc(4, 0x300, 0x182), *done])
    rig.done()
    got = rig.at(b, 8192, np.uint8)
    assert (got[5:5006] == rig.at(a, 8192, np.uint8)[3:5004]).all()
    assert not got[:5].any() and not got[5006:].any()
    assert rig.at(rig.signal, 2)[0] == 77 and rig.at(rig.signal, 2)[1] == 0
    assert rig.at(rig.signal, 2, np.uint64)[1] > 0
    assert rig.gpu.statistics()["bytes copied"] == 5001


@pytest.mark.parametrize("flush", [0, 1])
def test_copy_lines_and_word_semaphore(rig: Rig, flush: int) -> None:
    a, b = rig.alloc(4096), rig.alloc(4096)
    rig.at(a, 4096, np.uint8)[:] = np.arange(4096) % 251
    words = [
        *setup_words(rig.local),
        *inc(4, 0x400, *divmod(a, 1 << 32), *divmod(b, 1 << 32), 100, 64, 10, 5),
        *inc(4, 0x240, *divmod(rig.signal, 1 << 32), 5), *inc(4, 0x300, 0x182 | 1 << 9 | 1 << 3 | flush << 2),
    ]  # fmt: skip
    rig.submit(words)
    rig.finish()
    late = ["copy semaphore without FLUSH_ENABLE" in note for note in rig.gpu.notes]
    assert late == [True] * (1 - flush)
    for line in range(5):
        want = rig.at(a, 4096, np.uint8)[100 * line : 100 * line + 10]
        assert (rig.at(b, 4096, np.uint8)[64 * line : 64 * line + 10] == want).all()
    assert rig.at(rig.signal, 1)[0] == 5


def test_overlapping_copy_is_noted(rig: Rig) -> None:
    a = rig.alloc(4096)
    words = [*inc(4, 0x400, *divmod(a, 1 << 32), *divmod(a + 8, 1 << 32)), *inc(4, 0x418, 64)]
    rig.submit([*setup_words(rig.local), *words, *inc(4, 0x300, 0x182)])
    rig.finish()
    assert any("overlapping" in note for note in rig.gpu.notes)


BAD: list[tuple[str, list[int], int, str]] = [
    ("reserved opcode", [6 << 29], 32, "header opcode 6"),
    ("old form", [2 << 29 | 1 << 16, 0], 32, "header opcode 2"),
    ("data past the end", [1 << 29 | 300 << 16 | 0x5C >> 2, 0], 32, "run past the segment"),
    ("misaligned stamp", semaphore(0x200008, 0, SIGNAL), 32, "16-byte alignment"),
    ("misaligned 64", semaphore(0x200004, 0, WRITE64), 32, "8-byte alignment"),
    ("misaligned 32", semaphore(0x200002, 0, WRITE32), 32, "4-byte alignment"),
    ("reduction", semaphore(0x200000, 0, 6), 32, "SEM_EXECUTE"),
    ("unmapped semaphore", semaphore(0x7700000000, 0, SIGNAL), 31, "MMU fault: write"),
    ("host method", inc(0, 0x28, 0), 25, "host method 0x28"),
    ("wfi scope", inc(0, 0x78, 2), 32, "WFI with scope 2"),
    ("unbound", inc(1, 0x1698, 1), 25, "no SET_OBJECT"),
    ("class not allocated", inc(1, 0, 0xC6C0), 13, "not allocated"),
    ("class elsewhere", inc(2, 0, 0xC7C0), 13, "belongs on subchannel 1"),
    ("compute method", [*inc(1, 0, 0xC7C0), *inc(1, 0x140, 0)], 25, "compute method 0x140"),
    ("cache bits", [*inc(1, 0, 0xC7C0), *inc(1, 0x1698, 2)], 13, "INVALIDATE"),
    ("pcas action", [*inc(1, 0, 0xC7C0), *inc(1, 0x2C0, 6)], 13, "action 6"),
    ("copy method", [*inc(4, 0, 0xC7B5), *inc(4, 0x700, 0)], 25, "copy method 0x700"),
    ("copy flags", [*inc(4, 0, 0xC7B5), *inc(4, 0x300, 1 << 12)], 13, "LAUNCH_DMA"),
    ("copy layout", [*inc(4, 0, 0xC7B5), *inc(4, 0x300, 2)], 13, "pitch"),
    ("copy semaphore 3", [*inc(4, 0, 0xC7B5), *inc(4, 0x300, 0x18)], 13, "semaphore type 3"),
    ("copy semaphore", [*inc(4, 0, 0xC7B5), *inc(4, 0x244, 4), *inc(4, 0x300, 0x14)], 13, "aligned"),
    ("copy unmapped", [*inc(4, 0, 0xC7B5), *inc(4, 0x418, 64), *inc(4, 0x300, 0x182)], 31, "MMU"),
    ("unmapped QMD", [*inc(1, 0, 0xC7C0), *inc(1, 0x2B4, 0x77000000), *inc(1, 0x2C0, 9)], 31, "MMU"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "text"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_refused(rig: Rig, words: list[int], code: int, text: str) -> None:
    rig.submit([*words, *semaphore(rig.signal, 1, SIGNAL)])
    report = rig.fault()
    assert report.code == code
    assert text in report.title
    assert report.details["submitted by"] == "client.py:0"
    rig.submit(semaphore(rig.signal, 1, SIGNAL), 1)
    time.sleep(0.02)
    assert rig.at(rig.signal, 1)[0] == 0, "no channel of a dead TSG writes a semaphore"


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (1, "FETCH"), (1 << 40, "reserved"), (1 << 32, "opcode 1"), (3 << 32, "opcode 3"),
        (0xFFFFFFFFF0 | 100 << 42, "passes 2^40"),
    ],
)  # fmt: skip
def test_bad_entry(rig: Rig, entry: int, text: str) -> None:
    rig.publish(entry)
    report = rig.fault()
    assert report.code == 32
    assert text in report.title


def test_put_beyond_the_ring(rig: Rig) -> None:
    struct.pack_into("<I", rig.ports[0].userd, 0x8C, 64)
    rig.gpu.ring_doorbell(rig.ports[0].token)
    assert "beyond the ring" in rig.fault().title


def test_unmapped_pushbuffer(rig: Rig) -> None:
    rig.publish(0x7700000000 | 4 << 42)
    report = rig.fault()
    assert report.code == 31
    assert report.details["address"] == "0x7700000000"


def test_ring_base_beyond_40_bits() -> None:
    """F7: the register has 40 bits, the hardware reads elsewhere."""
    rig = Rig()
    rig.ports[0].gpfifo_va = 0x10000200000
    rig.submit(semaphore(rig.signal, 1, SIGNAL))
    rig.finish()
    report: Any = rig.faults[0] if rig.faults else None
    # 0x200000 is the first buffer of the rig: zeros, entries that do nothing
    assert report is None and rig.at(rig.signal, 1)[0] == 0
    rig.close()
    rig = Rig()
    rig.ports[0].gpfifo_va = 0x17000000000
    rig.submit(semaphore(rig.signal, 1, SIGNAL))
    assert "cut to 40 bits" in rig.fault().details["ring"]
    rig.close()


def test_drain_times_out(rig: Rig) -> None:
    rig.ports[0].enabled = True
    rig.gpu.delay = 5.0
    rig.submit(semaphore(rig.signal, 1, SIGNAL))
    rig.submit(semaphore(rig.signal, 1, SIGNAL))
    rig.submit(semaphore(rig.signal, 1, SIGNAL))
    with pytest.raises(TimeoutError, match="channel 0"):
        rig.gpu.wait_until_idle(0.05)


def test_closing_a_channel_stops_its_kernel_alone(rig: Rig) -> None:
    from tests.simulator.gpu.rig import launch, u32, u64

    rig.setup(0)
    rig.setup(1)
    out, pick = rig.alloc(4 * 64 * 4000), rig.alloc(4096)
    qmd = rig.qmd("k_local", u64(out, pick) + u32(600), (4000, 1, 1), (64, 1, 1))
    rig.submit(launch(qmd))
    end = time.monotonic() + 120
    while rig.gpu.current is None and time.monotonic() < end:
        time.sleep(1e-3)
    start = time.monotonic()
    rig.gpu.detach_channel(0)
    assert time.monotonic() - start < 60
    rig.submit(semaphore(rig.signal, 1, SIGNAL), 1)
    rig.done()
    assert rig.at(rig.signal, 1)[0] == 1
