"""The console script, and `python -m orinbench`."""

import io
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any

# As a shell reports Ctrl-C: 128 + SIGINT. `errors` has it too, but nothing is imported yet.
_INTERRUPTED = 130


def main() -> None:
    """Import a command, which takes half a second in which Ctrl-C is silent, and run it."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    from orinbench.cli import import_command
    from orinbench.cli import main as run
    from orinbench.interrupts import signals_that_end

    import_command(sys.argv[1:])

    if isinstance(sys.stdout.buffer, io.FileIO):  # PYTHONUNBUFFERED loses what a signal cuts off
        raw = sys.stdout.buffer
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", line_buffering=True)
    signals = signals_that_end()
    _set_signal_handlers(signals, signal.default_int_handler)  # none leaves anything half written
    try:
        try:
            run()
        finally:  # the exit code is known, and Python takes a moment to end
            _set_signal_handlers(signals, signal.SIG_IGN)
    except KeyboardInterrupt:  # behind the last line, where there is nothing left to lose
        _set_signal_handlers(signals, signal.SIG_IGN)
        sys.exit(_INTERRUPTED)


def _set_signal_handlers(signals: Iterable[signal.Signals], handler: Any) -> None:
    for number in signals:
        signal.signal(number, handler)


if __name__ == "__main__":
    main()
