"""Errors that are one line for people: what a user can mend, and a device that failed."""


class BadInput(ValueError):  # noqa: N818  (reads as what it says)
    """One line that names the file or flag, what was wrong, and what would be right."""


class DeviceFault(RuntimeError):  # noqa: N818
    """One line that names a device, and what it failed of. It computes nothing more."""
