"""The hardware's failures: each provoked, and done right. (F5, F6, F7, F9 are in test_launch.py
and test_channel.py.)"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.simulator.gpu.rig import (
    FRESH,
    PER_TPC,
    SECTIONS,
    SIGNAL,
    WAIT,
    Rig,
    inc,
    launch,
    semaphore,
    u32,
    u64,
)


def _made(**options: Any) -> Rig:
    rig = Rig(channels=1, **options)
    rig.setup()
    rig.finish()
    return rig


def _wait_for(rig: Rig, at: int, value: int, seconds: float = 120.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if rig.at(at, 1)[0] >= value:
            return True
        time.sleep(5e-4)
    return False


# F1: a QMD is reused before the GPU has read it


def _hundred_times(rig: Rig, embedded: bool) -> tuple[int, list[str]]:
    """One bound queue submitted again with a new signal value, as test_exec_2_kernels_100_times."""
    out = rig.alloc(256)
    first, second = rig.qmd("k_bump", u64(out)), rig.qmd("k_bump", u64(out))
    rig.depend(first, second)
    if embedded:
        rig.release(second, 0)
    early, plain = 0, rig.gpu.add_to_counter

    def count(name: str, by: int = 1) -> None:
        nonlocal early
        plain(name, by)
        if name == "releases":
            early += int(rig.gpu.counts["launches"]) < 2 * rig.at(rig.signal, 1)[0]

    rig.gpu.add_to_counter = count  # type: ignore[method-assign]
    for n in range(1, 13):
        rig.ports[0].enabled = False  # two are submitted before the GPU looks at one
        if embedded:  # the value lives in the shared QMD
            rig.at(second, 64)[832 // 32] = n
            words = [*semaphore(rig.signal, n - 1, WAIT), *launch(first)]
        else:
            words = [
                *semaphore(rig.signal, n - 1, WAIT),
                *launch(first),
                *semaphore(rig.signal, n, SIGNAL),
            ]
        rig.submit(words)
        if n % 2 == 0:
            rig.ports[0].enabled = True
            assert _wait_for(rig, rig.signal, n)
            rig.finish()
    return early, rig.gpu.notes


def test_f1_release_in_a_reused_qmd() -> None:
    rig = _made(delay=8, seed=3)
    early, notes = _hundred_times(rig, embedded=True)
    rig.close()
    assert early > 0, "some wait passed before its kernels had run"
    assert any("QMD" in n and "RELEASE0_PAYLOAD_LOWER" in n and "client.py:0" in n for n in notes)


def test_f1_release_from_the_pushbuffer() -> None:
    rig = _made(delay=8, seed=3)
    early, notes = _hundred_times(rig, embedded=False)
    rig.close()
    assert early == 0
    assert not notes


# F2: a QMD is rewritten right after its own release


def _rewrite_after_release(rig: Rig, embedded: bool) -> tuple[int, list[str]]:
    out = rig.alloc(4096)
    qmd = rig.qmd("k_set", u64(out) + u32(1, 32))
    other = rig.qmd("k_set", u64(out + 1024) + u32(2, 32))
    rewritten = False

    def held() -> Iterator[str]:
        """The GPU lags between the release and the rewrite."""
        while rig.at(rig.signal, 1)[0] == 1 and not rewritten:
            yield "lag"

    rig.gpu.channels[0].adversary_delay_steps = held  # type: ignore[assignment, method-assign]
    if embedded:
        rig.release(qmd, 1)
        rig.submit(launch(qmd))
    else:
        rig.submit([*launch(qmd), *semaphore(rig.signal, 1, SIGNAL)])
    assert _wait_for(rig, rig.signal, 1)
    rig.at(qmd, 64)[:] = rig.at(other, 64)
    rewritten = True
    rig.finish()
    rig.submit([*launch(qmd), *semaphore(rig.signal, 2, SIGNAL)])
    assert _wait_for(rig, rig.signal, 2)
    rig.finish()
    return int(rig.at(out + 1024, 1)[0]), rig.gpu.notes


def test_f2_rewritten_after_its_own_release() -> None:
    rig = _made(delay=20, seed=1, write_back=True)
    value, notes = _rewrite_after_release(rig, embedded=True)
    rig.close()
    assert value == 0, "the new QMD was lost"
    assert any("wrote its copy back" in n for n in notes)


def test_f2_release_after_idle() -> None:
    rig = _made(delay=20, seed=1, write_back=True)
    value, notes = _rewrite_after_release(rig, embedded=False)
    rig.close()
    assert value == 2
    assert not notes


# F4: rings that wrap over unread work


@pytest.mark.parametrize("fenced", [False, True])
def test_f4_arguments_overwritten(fenced: bool) -> None:
    """The kernargs slot of a launch is reused; right: only after its signal."""
    rig = _made(delay=15, seed=5)
    out = rig.alloc(4096)
    qmd = rig.qmd("k_set", u64(out) + u32(1, 32))
    if not fenced:
        rig.ports[0].enabled = False
    rig.submit([*launch(qmd), *semaphore(rig.signal, 1, SIGNAL)])
    if fenced:
        assert _wait_for(rig, rig.signal, 1)
    rig.at(qmd - 4096 + 0x160, 1, np.uint64)[0] = out + 1024
    rig.at(qmd - 4096 + 0x168, 1)[0] = 2
    rig.ports[0].enabled = True
    rig.submit([*launch(qmd), *semaphore(rig.signal, 2, SIGNAL)])
    assert _wait_for(rig, rig.signal, 2)
    rig.finish()
    rig.close()
    assert rig.at(out, 1)[0] == (1 if fenced else 0)
    assert rig.at(out + 1024, 1)[0] == 2
    assert any("kernel arguments of QMD" in n for n in rig.gpu.notes) == (not fenced)


@pytest.mark.parametrize(("at", "found"), [(0x16F, True), (0x18, True), (0x170, False)])
def test_f4_only_what_the_kernel_can_read(at: int, found: bool) -> None:
    """A bank that claims 16 times its size reaches into the slots of later launches."""
    rig = _made()
    out = rig.alloc(4096)
    qmd = rig.qmd("k_set", u64(out) + u32(1, 32), b1087_1075=0x170)
    rig.ports[0].enabled = False
    rig.submit(launch(qmd))
    rig.at(qmd - 4096 + at, 1, np.uint8)[0] ^= 0x80
    rig.ports[0].enabled = True
    rig.finish()
    rig.close()
    changed = [n for n in rig.gpu.notes if "kernel arguments of QMD" in n]
    assert len(rig.gpu.notes) == len(changed) == found
    assert not found or f"bank 0 differs at byte {at:#x}" in changed[0]


@pytest.mark.parametrize(("prefetch", "value"), [(False, 77), (True, 1)])
def test_f4_pushbuffer_overwritten(prefetch: bool, value: int) -> None:
    """Prefetching hides the bug, the finding is there all the same."""
    rig = _made(prefetch=prefetch)
    rig.ports[0].enabled = False
    at = rig.submit(semaphore(rig.signal, 1, SIGNAL))
    rig.at(at, 6)[3] = 77
    rig.ports[0].enabled = True
    rig.finish()
    rig.close()
    assert rig.at(rig.signal, 1)[0] == value
    assert any("pushbuffer of entry 1 changed" in n and "dword 3" in n for n in rig.gpu.notes)


# F8: local memory replaced in flight


def _local(rig: Rig) -> tuple[int, int, np.ndarray[tuple[int], np.dtype[np.uint32]]]:
    out, pick = rig.alloc(64 * 4 * 200), rig.alloc(4096)
    rig.at(pick, 600)[:] = np.random.default_rng(2).integers(0, 1 << 32, 600, dtype=np.uint32)
    qmd = rig.qmd("k_local", u64(out, pick) + u32(500), (200, 1, 1), (64, 1, 1))
    rig.submit([*launch(qmd), *semaphore(rig.signal, 1, SIGNAL)])
    assert _wait_for(rig, rig.signal, 1)
    return qmd, out, rig.at(out, 64 * 200).copy()


def test_f8_backing_reused_by_the_cpu() -> None:
    """The CPU got the old buffer from a cache and fills it."""
    rig = _made()
    qmd, out, right = _local(rig)
    for n in range(2, 12):  # a busy machine may let the kernel end before the CPU gets to it
        rig.at(out, 64 * 200)[:] = 0
        rig.submit([*launch(qmd), *semaphore(rig.signal, n, SIGNAL)])
        while rig.gpu.current is None and rig.at(rig.signal, 1)[0] < n:
            time.sleep(1e-4)
        end = time.monotonic() + 120
        while rig.at(rig.signal, 1)[0] < n and time.monotonic() < end:
            rig.at(rig.local, 0x40000)[:] = 0x5555
        rig.finish()
        if wrong := bool((rig.at(out, 64 * 200) != right).any()):
            break
    rig.close()
    assert wrong


def test_f8_replaced_while_a_kernel_runs() -> None:
    rig = _made(delay=30, seed=4)
    qmd, _, _ = _local(rig)
    new = rig.alloc(8 * PER_TPC)
    change = inc(1, 0x790, new >> 32, new & 0xFFFFFFFF)
    rig.submit([*launch(qmd), *change, *semaphore(rig.signal, 2, SIGNAL)])
    assert _wait_for(rig, rig.signal, 2)
    rig.finish()
    assert any("local memory of channel 0 is replaced" in n for n in rig.gpu.notes)
    rig.close()


def test_f8_replaced_after_idle() -> None:
    rig = _made(delay=30, seed=4)
    qmd, out, right = _local(rig)
    new = rig.alloc(8 * PER_TPC)
    change = inc(1, 0x790, new >> 32, new & 0xFFFFFFFF)
    rig.at(out, 64 * 200)[:] = 0
    rig.submit(
        [*launch(qmd), *inc(0, 0x78, 0), *change, *launch(qmd), *semaphore(rig.signal, 2, SIGNAL)]
    )
    assert _wait_for(rig, rig.signal, 2)
    rig.finish()
    assert not rig.gpu.notes
    assert (rig.at(out, 64 * 200) == right).all()
    rig.close()


# F11: stale caches


def _code_reused(invalidate: bool) -> Rig:
    rig = _made()
    out = rig.alloc(256)
    entry = rig.alloc(8192)
    rig.load("k_set", entry)
    rig.submit(launch(rig.qmd("k_set", u64(out) + u32(5, 32), entry=entry)))
    rig.done()
    assert rig.at(out, 1)[0] == 5
    rig.at(entry, 8192, np.uint8)[:] = 0
    rig.load("k_bump", entry)
    qmd = rig.qmd("k_bump", u64(out) + u32(6, 32), entry=entry)
    rig.submit([*(FRESH if invalidate else []), *launch(qmd)])
    rig.finish()
    rig.close()
    assert rig.at(out, 1)[0] == (11 if invalidate else 6)
    return rig


def test_f11_stale_instructions() -> None:
    assert any(
        "stale instruction cache" in n and "k_set" in n for n in _code_reused(False).gpu.notes
    )


def test_f11_invalidated_instructions() -> None:
    assert not _code_reused(True).gpu.notes


@pytest.mark.parametrize("how", ["nothing", "method", "bank", "qmd"])
def test_f11_constants(how: str) -> None:
    rig = _made()
    out = rig.alloc(256)
    qmd = rig.qmd("k_set", u64(out) + u32(5, 32))
    rig.poke(qmd, "b1074_1074", 0)
    rig.submit([*FRESH, *launch(qmd)])
    rig.done()
    rig.at(qmd - 4096 + 0x168, 1)[0] = 6
    if how == "bank":
        rig.poke(qmd, "b1074_1074", 1)
    elif how == "qmd":
        rig.poke(qmd, "b191_191", 1)
    rig.submit([*(FRESH if how == "method" else []), *launch(qmd)])
    rig.finish()
    rig.close()
    assert rig.at(out, 1)[0] == (5 if how == "nothing" else 6)
    assert any("stale constant cache" in n for n in rig.gpu.notes) == (how == "nothing")


# F12: missing write ordering


def _submit_with(rig: Rig, barriers: tuple[bool, bool], fence: Callable[[], object]) -> None:
    """A submission with a barrier (or none) before GPPut and before the doorbell."""
    words = semaphore(rig.signal, rig.puts[0] + 1, SIGNAL)
    at = rig.alloc(4 * len(words))
    rig.at(at, len(words))[:] = words
    port, put = rig.ports[0], rig.puts[0]
    rig.rings[0][put] = at | len(words) << 42 | 1 << 41
    if barriers[0]:
        fence()
    rig.puts[0] = put = (put + 1) % port.entries
    struct.pack_into("<I", port.userd, 0x8C, put)
    if barriers[1]:
        fence()
    rig.gpu.ring_doorbell(port.token)


def test_f12_both_barriers() -> None:
    rig = Rig(order=True)
    for _ in range(5):
        _submit_with(rig, (True, True), rig.gpu.on_barrier)
    rig.done()
    rig.close()
    assert rig.at(rig.signal, 1)[0] == 5


def test_f12_no_barrier_before_put() -> None:
    """tinygrad's own order: a reordered GPPut exposes the slot's old content."""
    rig = Rig(order=True)
    _submit_with(rig, (True, True), rig.gpu.on_barrier)
    rig.done()
    _submit_with(rig, (False, True), rig.gpu.on_barrier)
    rig.finish()
    rig.close()
    assert rig.at(rig.signal, 1)[0] == 1, "the old entry (a NOP) was executed instead"
    assert any("no barrier between entry 1 and GPPut" in n for n in rig.gpu.notes)


def test_f12_no_barrier_before_the_doorbell() -> None:
    rig = Rig(order=True)
    _submit_with(rig, (True, False), rig.gpu.on_barrier)
    rig.finish()
    assert rig.at(rig.signal, 1)[0] == 0, "the doorbell found the old GPPut"
    assert any("no barrier between GPPut and doorbell" in n for n in rig.gpu.notes)
    _submit_with(rig, (True, True), rig.gpu.on_barrier)
    rig.finish()
    rig.close()
    assert rig.at(rig.signal, 1)[0] == 2, "the next doorbell brings both"


def test_every_seed_gives_the_same_results() -> None:
    """Adversarial schedules change when things happen, not what a right client computes."""
    assert SECTIONS[".text.k_add"].data
    for seed in range(4):
        rig = _made(delay=3, seed=seed)
        out = rig.alloc(256)
        rig.at(out, 32)[:] = 0
        for n in range(1, 6):
            qmd = rig.qmd("k_bump", u64(out))
            words = [*semaphore(rig.signal, n - 1, WAIT), *FRESH, *launch(qmd)]
            rig.submit([*words, *semaphore(rig.signal, n, SIGNAL)])
        assert _wait_for(rig, rig.signal, 5)
        rig.done()
        rig.close()
        assert (rig.at(out, 32) == 31).all()


def _last_of_three(seed: int, embedded: bool) -> int:
    """Three launches to one place with nothing between; the number of the one that stays."""
    rig = _made(delay=3, seed=seed)
    out = rig.alloc(256)
    for n in range(1, 4):
        qmd = rig.qmd("k_set", u64(out) + u32(n, 32))
        if embedded:
            rig.release(qmd, n, address=rig.signal + 16 * n)
            rig.submit(launch(qmd))
        else:
            rig.submit([*launch(qmd), *semaphore(rig.signal, n, SIGNAL)])
    rig.done()
    rig.close()
    return int(rig.at(out, 1)[0])


def test_launches_that_no_acquire_orders() -> None:
    """A release that waits for idle orders a channel's launches by itself; a QMD's does not."""
    assert {_last_of_three(seed, embedded=False) for seed in range(6)} == {3}
    assert any(_last_of_three(seed, embedded=True) != 3 for seed in range(40))
