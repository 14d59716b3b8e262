"""The error that a user caused and can mend."""


class BadInput(ValueError):
    """One line that names the file or flag, what was wrong, and what would be right."""
