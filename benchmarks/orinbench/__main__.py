"""The console script, and `python -m orinbench`."""

import os
import signal

# As a shell reports Ctrl-C: 128 + SIGINT. `errors` has it too, but nothing is imported yet.
_INTERRUPTED = 130


def main() -> None:
    """Import the commands, which takes a second in which Ctrl-C is silent, and run one."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    from orinbench.cli import main as run

    for number in (signal.SIGINT, signal.SIGTERM):  # either leaves nothing half written
        signal.signal(number, signal.default_int_handler)
    try:
        run()
    finally:  # the exit code is known, and Python takes a moment to end
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
