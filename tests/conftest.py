"""Fixtures that every test may rely on."""

import os
import signal

from tests.patches.conftest import COMPILERS, wheel_file

# A job in the background of a shell script ignores Ctrl-C, and so would every program that a test
# starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# tinygrad looks for NVIDIA's compilers when it is imported, which may be the first test's doing.
for variable, pattern in COMPILERS.items():
    os.environ.setdefault(variable, str(wheel_file(pattern)))
