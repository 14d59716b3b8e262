"""What every test may rely on."""

import signal

# A job in the background of a shell script ignores Ctrl-C, and so would every program that a test
# starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
