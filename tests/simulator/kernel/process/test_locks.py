"""Garbage of the client: its finalizers never run inside the model, nor on the model's threads."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.simulator.kernel import rawclient as rc
from tests.simulator.kernel.process.test_cli import KERNEL, sim
from tests.simulator.kernel.rawclient import Board

from nvgpusim.locks import (
    GcPausingLock,
    WakeBell,
    gc_replacements_for_client,
    pause_gc,
    resume_gc,
)
from nvgpusim.orin.kernel import Kernel


class Garbage:
    """A cycle that closes descriptors when the collector finds it, and notes below what."""

    def __init__(self, fds: list[int], stacks: list[set[str]]) -> None:
        self.fds, self.stacks, self.itself = fds, stacks, self

    def __del__(self) -> None:
        below = traceback.walk_stack(sys._getframe())
        self.stacks.append({Path(frame.f_code.co_filename).name for frame, _ in below})
        for fd in self.fds:
            os.close(fd)


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """As it was, whatever a test did."""
    thresholds, enabled = gc.get_threshold(), gc.isenabled()
    gc.collect()
    gc.freeze()  # collections look at what the test makes, not at all of pytest
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    assert gc.isenabled() == enabled


def test_a_collection_at_any_allocation_of_a_system_call(kernel: Kernel) -> None:
    board = Board()
    stacks: list[set[str]] = []
    for allocations in range(1, 160):
        gc.disable()
        fds = [board.dmabuf() for _ in range(3)]
        handles = [rc.create(board.nvmap, 4096) for _ in range(3)]
        gc.collect()
        Garbage(fds, stacks)
        del fds
        gc.set_threshold(allocations)
        gc.enable()
        for handle in handles:
            rc.free(board.nvmap, handle)
        space = rc.alloc_as(board.ctrl)
        rc.alloc_space(space, 16, flags=0)
        os.close(space)
        gc.set_threshold(0)
        gc.collect()
        kernel.check_invariants()
    board.close()
    assert len(stacks) == 159
    behind_the_lock = {"file.py", "nvmap.py", "ctrl.py", "address_space.py", "allocator.py"}
    assert not set().union(*stacks) & behind_the_lock
    assert any("syscall_seam.py" in stack for stack in stacks), "none came near a system call"
    assert kernel.leak_lines() == [] and not kernel.dmabufs


ALLOCATING = """
import gc, os, sys, threading, time
threading.settrace(None)  # a tracer, as coverage has, allocates on every thread that it looks at
sys.path.insert(0, sys.argv[1])
import rawclient as rc
board, threads = rc.Board(), []
class Garbage:
    def __init__(self, fd): self.fd, self.itself = fd, self
    def __del__(self):
        threads.append(threading.current_thread().name)
        os.close(self.fd)
channel = board.channel()
bell = rc.view(board.usermode, 0x10000).cast("I")
for _ in range(20):
    gc.disable()
    Garbage(board.dmabuf())
    channel.submit(0, 0, bell=False)  # a NOP
    gc.set_threshold(1)
    gc.enable()
    bell[0x90 // 4] = channel.token
    time.sleep(5e-3)  # the model's threads are the only ones that allocate
gc.collect()
print(len(threads), *set(threads))
"""


def test_no_finalizer_on_a_thread_of_the_model() -> None:
    run = sim("--quiet", "--", "-c", ALLOCATING, str(KERNEL))
    assert run.stdout == "20 MainThread\n", run.stderr


def test_held_by_whom_and_how_often() -> None:
    lock, other = GcPausingLock(), GcPausingLock()
    with lock:
        assert not gc.isenabled()
        with lock, other:
            assert not gc.isenabled()
        assert not gc.isenabled()
        waiting = threading.Thread(target=lock.acquire, daemon=True)
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
    waiting.join()
    assert not gc.isenabled()  # that thread has it now
    resume_gc()
    assert gc.isenabled()


def test_many_threads() -> None:
    lock, seen = GcPausingLock(), []

    def work() -> None:
        for _ in range(500):
            pause_gc()
            with lock:
                seen.append(gc.isenabled())
            resume_gc()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [False] * 2000 and gc.isenabled()


def test_the_clients_wish_is_kept() -> None:
    hooks = gc_replacements_for_client()
    assert hooks["isenabled"]()
    with GcPausingLock():
        assert hooks["isenabled"]() and not gc.isenabled()
        hooks["disable"]()
        assert not hooks["isenabled"]()
    assert not gc.isenabled() and not hooks["isenabled"]()
    with GcPausingLock():
        hooks["enable"]()
        assert hooks["isenabled"]() and not gc.isenabled()
    assert gc.isenabled()
    hooks["disable"]()
    assert not gc.isenabled()
    hooks["enable"]()
    assert gc.isenabled()


def test_hooks_are_in_place_while_simulated(kernel: Kernel) -> None:
    with kernel.lock:
        assert gc.isenabled()
        gc.disable()
    assert not gc.isenabled()
    gc.enable()


def test_a_child_finds_locks_free_and_collections_on() -> None:
    lock = GcPausingLock()
    holder = threading.Thread(target=lock.acquire, daemon=True)
    holder.start()
    holder.join()
    pid = os.fork()
    if not pid:
        with lock:
            inside = gc.isenabled()
        os._exit(0 if gc.isenabled() and not inside else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    resume_gc()


def test_a_bell_is_not_lost_and_not_counted() -> None:
    bell = WakeBell()
    bell.ring()
    bell.ring()
    bell.wait_for_ring(30)
    start = time.monotonic()
    bell.wait_for_ring(0.05)
    assert time.monotonic() - start >= 0.04
