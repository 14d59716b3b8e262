"""Errors that are one line for people: what a user can mend, and a device that failed."""

import re

# What moves a terminal's cursor or begins a sequence for it, but line breaks and tabs.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def escape_unprintable(text: str) -> str:
    """Return a text with escapes for what cannot be printed."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escape_for_terminal(text: str) -> str:
    """Return a text of lines with escapes for what a terminal would obey."""
    return _CONTROLS.sub(lambda found: escape_unprintable(found[0]), text)


class BadInput(ValueError):  # noqa: N818  (reads as what it says)
    """One line that names the file or flag, what was wrong, and what would be right.

    It may cite a file or a template of strangers: a terminal must not obey what they wrote.
    """

    def __str__(self) -> str:
        """Return the line, with escapes for what cannot be printed."""
        return escape_unprintable(super().__str__())


class DeviceFault(RuntimeError):  # noqa: N818
    """One line that names a device, and what it failed of. It computes nothing more."""
