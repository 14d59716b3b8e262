"""Errors that end orinbench: one line for the user, and an exit code."""

# The request cannot be met.
EXIT_BAD_INPUT = 2
# Rows without a result among others.
EXIT_FAILED_ROWS = 1
# A comparison in which something became slower.
EXIT_SLOWER = 1
# Ctrl-C, as a shell reports it: 128 + SIGINT.
EXIT_INTERRUPTED = 130


class BenchError(Exception):
    """Bad input or a machine that cannot do what was asked.

    The message is the one line that the user sees: it names the file or flag, what was wrong and
    what would be right.
    """

    exit_code = EXIT_BAD_INPUT


class CheckFailed(BenchError):  # noqa: N818
    """The correctness gate found wrong numbers: nothing is timed."""

    exit_code = 3
