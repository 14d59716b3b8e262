"""Errors that the user sees as one line."""

from __future__ import annotations


class SimError(Exception):
    """Bad use: the message is the one line that the user reads; the exit status is 2."""

    exit_code = 2
