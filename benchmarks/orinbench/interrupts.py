"""Ctrl-C, SIGTERM, SIGHUP: the first one ends a run, later ones must not cost its results."""

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

#: Seconds until an interrupt that Python dropped is raised again.
AGAIN_SECONDS = 0.01
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def signals_that_end() -> list[signal.Signals]:
    """Return the signals that end a run: without SIGHUP where nohup has it ignored."""
    return [
        number
        for number in SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]


class Interrupts:
    """Lets one signal raise KeyboardInterrupt inside the block, and none behind it.

    What ends a run and writes its results calls `start_holding` first, which lets none through.

    Python drops what is raised in the callback of a weak reference or in `__del__`: such an
    interrupt is raised again.
    """

    def __init__(self) -> None:
        self._held = self._came = False
        self._cancel: Callable[[], object] | None = None  # what is told of one that is held
        self.name = "an interrupt"  # of what ended the run
        self._before: dict[signal.Signals, Any] = {}
        self._again: threading.Timer | None = None

    def __enter__(self) -> "Interrupts":
        self._dropped, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        self._before = {
            number: signal.signal(number, self._on_signal) for number in signals_that_end()
        }
        return self

    def __exit__(self, *_: object) -> None:
        if self._again is not None:  # behind this block its signal would end the process
            self.start_holding()
            self._again.cancel()
            self._again.join()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        sys.unraisablehook = self._dropped

    def start_holding(self) -> None:
        """Let nothing through any more."""
        self._held = True

    def release_and_raise(self) -> None:
        """Let one through again; raises KeyboardInterrupt if one came meanwhile."""
        self._held = self._came
        if self._came:
            raise KeyboardInterrupt

    def run_coroutine(self, loop: asyncio.Runner, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine; an interrupt cancels it, then raises KeyboardInterrupt.

        One that is raised in the middle of a loop leaves tasks behind that never end.
        """

        async def cancellable() -> None:
            task = asyncio.create_task(work)
            tell = asyncio.get_running_loop().call_soon_threadsafe
            self._cancel = lambda: tell(task.cancel)
            if self._came:
                task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                if not self._came:
                    raise

        self.start_holding()
        try:
            loop.run(cancellable())
        finally:
            self._cancel = None
            self.release_and_raise()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        if self._held:
            self._came = True
            if self._cancel is not None:
                self._cancel()
            return
        self._held = True
        raise KeyboardInterrupt

    def _on_unraisable(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._dropped(unraisable)
        else:
            self._held = False
            # To this thread: it may be in a system call, which a signal to another does not end.
            signal_to_us = (threading.get_ident(), signal.Signals[self.name])
            self._again = threading.Timer(AGAIN_SECONDS, signal.pthread_kill, signal_to_us)
            self._again.start()
