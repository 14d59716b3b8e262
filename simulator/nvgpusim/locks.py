"""Locks of the model: while one is held, Python collects no garbage.

A collection runs finalizers of the client on the thread that happens to allocate. Inside a system
call of the model they would enter it a second time, to close, unmap and free what the call is
looking at, which no kernel ever sees; on a thread of the model they could wait for a lock that the
client's thread holds. So collections wait until no lock is held: they then run on the client's own
threads, between its system calls, as they would on the board.

The client's own wish (gc.enable, gc.disable) is kept: :func:`gc_replacements_for_client` take
their place.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from typing import ClassVar

_enable, _disable, _isenabled = gc.enable, gc.disable, gc.isenabled
_state = threading.RLock()
_holders = 0
_owed = False
"""True if collections are to be switched on when the last holder goes."""


def pause_gc() -> None:
    """No collection starts until :func:`resume_gc`; any thread, any number of times."""
    # A signal handler may come in between any two lines and pause and resume by itself.
    global _holders, _owed
    _state.acquire()
    _holders += 1
    if _holders == 1 and _isenabled():
        _disable()
        _owed = True
    _state.release()


def resume_gc() -> None:
    """The end of a :func:`pause_gc`."""
    global _holders, _owed
    _state.acquire()
    _holders -= 1
    if not _holders and _owed:
        _owed = False
        _enable()
    _state.release()


def gc_replacements_for_client() -> dict[str, Callable[[], object]]:
    """Replacements of gc's functions for the client: its wish holds whenever we do not pause."""

    def enable() -> None:
        global _owed
        with _state:
            if _holders:
                _owed = True
            else:
                _enable()

    def disable() -> None:
        global _owed
        with _state:
            _owed = False
            _disable()

    def isenabled() -> bool:
        return _owed or _isenabled()

    return {"enable": enable, "disable": disable, "isenabled": isenabled}


class GcPausingLock:
    """A reentrant lock during which no collection starts. A forked child finds it free."""

    _all: ClassVar[weakref.WeakSet[GcPausingLock]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._lock = threading.RLock()
        GcPausingLock._all.add(self)

    def acquire(self) -> None:
        """Wait for the lock."""
        got = False
        pause_gc()
        try:
            got = self._lock.acquire()
        finally:
            if not got:
                resume_gc()

    def release(self) -> None:
        """Give it back."""
        self._lock.release()
        resume_gc()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class WakeBell:
    """Wakes one thread; rings that come before it waits are one."""

    def __init__(self) -> None:
        self._quiet = threading.Lock()
        self._quiet.acquire()

    def ring(self) -> None:
        """Wake the thread that waits, or the next one that will."""
        try:
            self._quiet.release()
        except RuntimeError:  # rung already
            return

    def wait_for_ring(self, timeout: float) -> None:
        """Until the bell rings, at most `timeout` seconds."""
        self._quiet.acquire(timeout=timeout)


def _reset_in_fork_child() -> None:
    global _state, _holders, _owed
    _state, _holders = threading.RLock(), 0
    for lock in list(GcPausingLock._all):
        lock._lock = threading.RLock()
    if _owed:
        _owed = False
        _enable()


os.register_at_fork(after_in_child=_reset_in_fork_child)
