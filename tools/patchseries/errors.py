"""The one error of this tool."""


class SeriesError(Exception):
    """One line for the user: what was wrong, where, and what would be right.

    Args:
        message: the line.
        exit_code: 2 for wrong input, 1 for a series that does not hold.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
