"""Errors that are one line for people: what a user can mend, and a device that failed."""


class BadInput(ValueError):  # noqa: N818  (reads as what it says)
    """One line that names the file or flag, what was wrong, and what would be right.

    It may cite a file or a template of strangers: a terminal must not obey what they wrote.
    """

    def __str__(self) -> str:
        """Return the line, with escapes for what cannot be printed."""
        said = super().__str__()
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in said)


class DeviceFault(RuntimeError):  # noqa: N818
    """One line that names a device, and what it failed of. It computes nothing more."""
