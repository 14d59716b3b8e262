"""The console script, and `python -m orinllm`."""

import os
import signal

# As a shell reports Ctrl-C: 128 + SIGINT. `cli` has it too, but nothing is imported yet.
_INTERRUPTED = 130


def main() -> None:
    """Import the commands, which takes half a second in which Ctrl-C is silent, and run one."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    # For large matrices numpy starts a thread a core, which takes 25 ms; commands have small ones.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from orinllm.command.cli import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
