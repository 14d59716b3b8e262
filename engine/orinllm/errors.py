"""The error that a user caused and can mend."""


class BadInput(ValueError):  # noqa: N818  (reads as what it says)
    """One line that names the file or flag, what was wrong, and what would be right."""
