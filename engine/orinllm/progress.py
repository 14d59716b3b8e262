"""Progress of long work, in words."""

from collections.abc import Callable

#: Hears how far work is.
Say = Callable[[str], None]


def say_nothing(text: str) -> None:
    """Say nothing."""
