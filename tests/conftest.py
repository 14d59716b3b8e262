"""Fixtures that every test may rely on."""

import os
import signal
import sys
from collections import Counter

import pytest
from tests.patches.conftest import COMPILERS, wheel_file

# A job in the background of a shell script ignores Ctrl-C, one under nohup a lost terminal, and so
# would every program that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Thousands of interpreters are started: without byte code each compiles the same modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# tinygrad looks for NVIDIA's compilers when it is imported, which may be the first test's doing.
for variable, pattern in COMPILERS.items():
    os.environ.setdefault(variable, str(wheel_file(pattern)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each reason for which tests were skipped, with their number."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, tests in reasons.most_common():
        terminalreporter.write_line(f"skipped, not passed ({tests}): {reason}")
